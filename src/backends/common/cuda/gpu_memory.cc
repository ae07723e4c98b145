#include <cuda_runtime_api.h>

#include "backends/common/gpu_memory.hpp"
#include "platform/cuda/device.hpp"
#include "platform/cuda/memory.hpp"
#include "platform/cuda/stream.hpp"

namespace folio::inline v0::backends::gpu {

using platform::cuda::check;
using platform::cuda::DeviceMemory;
using platform::cuda::DeviceScope;
using platform::cuda::native;
using platform::cuda::OwnedStream;
using platform::cuda::RelaxedCapture;

std::shared_ptr<void> allocate(int32_t device, size_t bytes) {
  const DeviceScope scope(device);
  auto memory = std::make_shared<DeviceMemory>(bytes);
  const OwnedStream stream;  // of its own: it waits for nobody's work, and breaks nobody's capture
  check(cudaMemsetAsync(memory->data(), 0, bytes, native(stream.get())), "clearing device memory");
  platform::cuda::synchronize(stream.get());
  return {memory, memory->data()};
}

void copy_to_device(int32_t device, void* to, const void* from, size_t bytes) {
  const DeviceScope scope(device);
  const OwnedStream stream;
  const RelaxedCapture relaxed;
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, native(stream.get())), "copying to the device");
  platform::cuda::synchronize(stream.get());
}

void upload(int32_t device, void* to, const void* from, size_t bytes, Stream stream) {
  if (bytes == 0) return;
  const DeviceScope scope(device);
  const RelaxedCapture relaxed;
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, native(stream)), "copying to the device");
}

void copy(int32_t device, void* to, const void* from, size_t bytes, Stream stream) {
  if (bytes == 0) return;
  const DeviceScope scope(device);
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, native(stream)), "copying on a GPU");
}

void zero_rows(int32_t device, void* data, int64_t stride_bytes, int64_t row_bytes, int64_t rows, Stream stream) {
  if (rows == 0) return;
  const DeviceScope scope(device);
  check(cudaMemset2DAsync(data, static_cast<size_t>(stride_bytes), 0, static_cast<size_t>(row_bytes),
                          static_cast<size_t>(rows), native(stream)),
        "clearing an output");
}

}  // namespace folio::inline v0::backends::gpu
