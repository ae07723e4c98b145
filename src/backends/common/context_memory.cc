#include "backends/common/context_memory.hpp"

#include <algorithm>

#include "backends/common/gpu_memory.hpp"

namespace folio::inline v0::backends {

void ContextMemory::reserve(size_t bytes) {
  if (bytes <= bytes_) return;
  if (device_.type == DeviceType::kCpu) {
    host_ = core::AlignedBuffer(bytes, core::AlignedBuffer::kWorkspaceAlignment);
  } else {
    gpu_ = gpu::allocate(device_.index, bytes);
  }
  bytes_ = bytes;
}

void KernelArray::reserve(size_t bytes) {
  if (device_.type != DeviceType::kCpu) memory_.reserve(bytes);
}

void KernelArray::grow(size_t bytes) {
  // Twice as much as before, so that batches which grow by a page each step seldom wait for memory. An empty array has
  // an address too.
  if (bytes <= memory_.bytes() && memory_.bytes() > 0) return;
  memory_.reserve(std::max({bytes, 2 * memory_.bytes(), core::AlignedBuffer::kWorkspaceAlignment}));
}

void KernelArray::copy(const void* from, size_t bytes, Stream stream, Where where) {
  grow(bytes);
  if (where == Where::kDevice) {
    gpu::copy(device_.index, memory_.data(), from, bytes, stream);
  } else {
    gpu::upload(device_.index, memory_.data(), from, bytes, stream);
  }
}

std::shared_ptr<float> copy_on_gpu(const Device& device, std::span<const float> values) {
  if (device.type == DeviceType::kCpu || values.empty()) return nullptr;
  auto memory = std::static_pointer_cast<float>(gpu::allocate(device.index, values.size_bytes()));
  update_on_gpu(device, memory, values);
  return memory;
}

void update_on_gpu(const Device& device, const std::shared_ptr<float>& memory, std::span<const float> values) {
  if (memory != nullptr) gpu::copy_to_device(device.index, memory.get(), values.data(), values.size_bytes());
}

}  // namespace folio::inline v0::backends
