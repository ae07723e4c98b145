#include "platform/cuda/memory.hpp"

#include <cuda_runtime_api.h>

#include <utility>

#include "platform/cuda/device.hpp"
#include "platform/cuda/stream.hpp"

namespace folio::inline v0::platform::cuda {

DeviceMemory::DeviceMemory(size_t bytes) : bytes_(bytes) {
  const RelaxedCapture relaxed;
  if (bytes > 0) check(cudaMalloc(&data_, bytes), "allocating device memory");
}

DeviceMemory::~DeviceMemory() {
  if (data_ == nullptr) return;
  const RelaxedCapture relaxed;
  static_cast<void>(cudaFree(data_));
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

PinnedMemory::PinnedMemory(size_t bytes) : bytes_(bytes) {
  const RelaxedCapture relaxed;
  if (bytes > 0) check(cudaHostAlloc(&data_, bytes, cudaHostAllocDefault), "allocating page-locked memory");
}

PinnedMemory::~PinnedMemory() {
  if (data_ == nullptr) return;
  const RelaxedCapture relaxed;
  static_cast<void>(cudaFreeHost(data_));
}

PinnedMemory::PinnedMemory(PinnedMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

PinnedMemory& PinnedMemory::operator=(PinnedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace folio::inline v0::platform::cuda
