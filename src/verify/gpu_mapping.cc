#include "verify/gpu_mapping.hpp"

#include "attention/op_state.hpp"

namespace folio::inline v0::verify {

GpuMapping::GpuMapping(const Context& context, std::span<const GuardedBuffer* const> buffers) : context_(context) {
  const attention::GpuBackend* const gpu = context_.state().gpu.get();
  if (gpu == nullptr) return;
  for (const GuardedBuffer* buffer : buffers) {
    buffer->unprotect();  // what the host may not write cannot be mapped
    const bool keeps = buffer->can_be_kept();
    if (keeps && buffer->is_kept()) continue;  // mapped, for it or for an earlier buffer
    buffer->for_each_range([&](void* begin, size_t bytes) {
      gpu->map_host_memory(begin, bytes);
      if (!keeps) mapped_.push_back(begin);
    });
    if (keeps) buffer->keep();
  }
}

GpuMapping::~GpuMapping() {
  for (void* memory : mapped_) context_.state().gpu->unmap_host_memory(memory);
}

void GpuMapping::synchronize() const {
  if (context_.state().gpu != nullptr) context_.state().gpu->synchronize({});
}

}  // namespace folio::inline v0::verify
