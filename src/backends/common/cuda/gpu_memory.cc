#include <cuda_runtime_api.h>

#include "backends/common/gpu_memory.hpp"
#include "platform/cuda/device.hpp"

namespace folio::inline v0::backends::gpu {

using platform::cuda::check;
using platform::cuda::DeviceScope;

std::shared_ptr<void> allocate(int32_t device, size_t bytes) {
  const DeviceScope scope(device);
  void* data = nullptr;
  check(cudaMalloc(&data, bytes), "allocating device memory");
  std::shared_ptr<void> memory(data, [](void* owned) { static_cast<void>(cudaFree(owned)); });
  check(cudaMemset(data, 0, bytes), "clearing device memory");
  // The legacy stream's work is not ordered with that of streams which do not block on it.
  check(cudaDeviceSynchronize(), "clearing device memory");
  return memory;
}

void copy_to_device(int32_t device, void* to, const void* from, size_t bytes) {
  const DeviceScope scope(device);
  check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "copying to the device");
  // From pageable memory the call may return before the last bytes have arrived.
  check(cudaDeviceSynchronize(), "copying to the device");
}

void upload(int32_t device, void* to, const void* from, size_t bytes, Stream stream) {
  if (bytes == 0) return;
  const DeviceScope scope(device);
  auto* const cuda_stream = static_cast<cudaStream_t>(stream.handle);
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, cuda_stream), "copying to the device");
}

void copy(int32_t device, void* to, const void* from, size_t bytes, Stream stream) {
  if (bytes == 0) return;
  const DeviceScope scope(device);
  auto* const cuda_stream = static_cast<cudaStream_t>(stream.handle);
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, cuda_stream), "copying on a GPU");
}

void zero_rows(int32_t device, void* data, int64_t stride_bytes, int64_t row_bytes, int64_t rows, Stream stream) {
  if (rows == 0) return;
  const DeviceScope scope(device);
  auto* const cuda_stream = static_cast<cudaStream_t>(stream.handle);
  check(cudaMemset2DAsync(data, static_cast<size_t>(stride_bytes), 0, static_cast<size_t>(row_bytes),
                          static_cast<size_t>(rows), cuda_stream),
        "clearing an output");
}

}  // namespace folio::inline v0::backends::gpu
