#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <initializer_list>

#include "core/error.hpp"
#include "folio/types/device.hpp"
#include "folio/types/dtype.hpp"

/// Host side of kernel launches: streams, grids, shared memory, programmatic dependent launch.
namespace folio::inline v0::kernels::cuda {

inline cudaStream_t native(Stream stream) {
  return static_cast<cudaStream_t>(stream.handle);
}

/// Throws Error(kDeviceError) where the launch before failed.
inline void check_launch(const char* what) {
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) core::fail(ErrorCode::kDeviceError, "launching ", what, ": ", cudaGetErrorString(status));
}

/// Whether the current device has programmatic dependent launch (PDL; ptx/griddepcontrol.cuh).
inline bool kernels_overlap() {
  int32_t device = 0;
  int32_t major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9;
}

/// CTAs of a grid-stride loop over `items`.
inline uint32_t grid_for(int64_t items, int64_t per_block, int64_t most = int64_t{1} << 20) {
  return static_cast<uint32_t>(std::clamp<int64_t>((items + per_block - 1) / per_block, 1, most));
}

/// Calls launch(first, count) for slices of `tokens` of which each has fewer than 2^30 pieces: indices of 31 bits do.
template <typename Launch>
void for_slices(int64_t tokens, int64_t pieces_per_token, const Launch& launch) {
  const int64_t most = std::max<int64_t>((int64_t{1} << 30) / std::max<int64_t>(pieces_per_token, 1), 1);
  for (int64_t first = 0; first < tokens; first += most) launch(first, std::min(most, tokens - first));
}

/// Whether every row begins where eight elements can be read or written at once.
inline bool is_wide(const void* data, DType dtype, std::initializer_list<int64_t> strides) {
  int64_t all = 0;
  for (const int64_t stride : strides) all |= stride;
  const auto bytes = static_cast<uintptr_t>(std::min(8 * size_of(dtype), 16));
  return all % 8 == 0 && reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

/// Lets a kernel's launches on the current device use `bytes` of dynamic shared memory. `largest`: the largest
/// carve-out, so that several CTAs share an SM. Set once a device: `Kernel` is a template parameter, so each kernel has
/// its flag.
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

/// Enqueues a kernel. `overlaps`: programmatic dependent launch (PDL). The kernel may begin before its predecessor in
/// the stream ends, and waits for it with ptx::griddep_wait. Allowed from compute capability 9.0 on.
template <typename Params>
cudaError_t launch_overlapping(void (*kernel)(Params), const dim3& grid, int32_t threads, int32_t shared_bytes,
                               Stream stream, bool overlaps, const Params& params) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream.handle);
  config.attrs = &attribute;
  config.numAttrs = overlaps ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace folio::inline v0::kernels::cuda
