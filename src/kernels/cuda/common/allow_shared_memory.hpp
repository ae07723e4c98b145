#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace folio::inline v0::kernels::cuda {

/// Lets launches of a kernel on the current device ask for `bytes` of shared memory, more than the driver gives by
/// itself. `largest`: as much is set aside as several CTAs of an SM need, not one. Done once a
/// device: `Kernel` is a parameter of the template, so that each has its mark.
template <auto Kernel>
cudaError_t allow_shared_memory(int32_t bytes, bool largest) {
  static std::atomic<uint64_t> allowed{0};  // a bit for each of the first 64 devices
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (status != cudaSuccess || (allowed.load(std::memory_order_relaxed) & bit) != 0) return status;
  status = cudaFuncSetAttribute(Kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status == cudaSuccess && largest) {
    status =
        cudaFuncSetAttribute(Kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  }
  if (status == cudaSuccess) allowed.fetch_or(bit, std::memory_order_relaxed);
  return status;
}

}  // namespace folio::inline v0::kernels::cuda
