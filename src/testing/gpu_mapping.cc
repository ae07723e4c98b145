#include "testing/gpu_mapping.hpp"

namespace folio::inline v0::verify {

GpuMapping::GpuMapping(const Context& context, std::span<const GuardedBuffer* const> buffers) : context_(context) {
  if (context.device().type == DeviceType::kCpu) return;
  for (const GuardedBuffer* buffer : buffers) {
    buffer->unprotect();  // what the host may not write cannot be mapped
    const bool keeps = buffer->can_be_kept();
    if (keeps && buffer->is_kept()) continue;  // mapped, for it or for an earlier buffer
    buffer->for_each_range([&](void* begin, size_t bytes) {
      map_host_memory(context_, begin, bytes);
      if (!keeps) mapped_.push_back(begin);
    });
    if (keeps) buffer->keep();
  }
}

GpuMapping::~GpuMapping() {
  for (void* memory : mapped_) unmap_host_memory(context_, memory);
}

void GpuMapping::synchronize() const {
  folio::synchronize(context_);
}

}  // namespace folio::inline v0::verify
