#include "verify/gpu_mapping.hpp"

#include "attention/context.hpp"

namespace folio::inline v0::verify {

GpuMapping::GpuMapping(const Context& context, std::span<const GuardedBuffer* const> buffers) : context_(context) {
  const attention::GpuBackend* const gpu = context_.state().gpu.get();
  if (gpu == nullptr) return;
  for (const GuardedBuffer* buffer : buffers) {
    buffer->unprotect();  // what the host may not write cannot be mapped
    buffer->for_each_range([&](void* begin, size_t bytes) {
      gpu->map_host_memory(begin, bytes);
      mapped_.push_back(begin);
    });
  }
}

GpuMapping::~GpuMapping() {
  for (void* memory : mapped_) context_.state().gpu->unmap_host_memory(memory);
}

void GpuMapping::synchronize() const {
  if (context_.state().gpu != nullptr) context_.state().gpu->synchronize({});
}

}  // namespace folio::inline v0::verify
