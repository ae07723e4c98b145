#include "backends/token_pool/device_memory.hpp"

#include "backends/token_pool/gpu.hpp"

namespace folio::inline v0::backends::token_pool {

void ContextMemory::reserve(size_t bytes) {
  if (bytes <= bytes_) return;
  if (device_.type == DeviceType::kCpu) {
    host_ = core::AlignedBuffer(bytes, core::AlignedBuffer::kWorkspaceAlignment);
  } else {
    gpu_ = gpu::allocate(device_.index, bytes);
  }
  bytes_ = bytes;
}

}  // namespace folio::inline v0::backends::token_pool
