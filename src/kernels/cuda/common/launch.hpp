#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "core/error.hpp"
#include "folio/types/device.hpp"
#include "folio/types/dtype.hpp"

/// What launching kernels on the host takes.
namespace folio::inline v0::kernels::cuda {

inline cudaStream_t native(Stream stream) {
  return static_cast<cudaStream_t>(stream.handle);
}

/// Throws Error(kDeviceError) where the launch before failed.
inline void check_launch(const char* what) {
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) core::fail(ErrorCode::kDeviceError, "launching ", what, ": ", cudaGetErrorString(status));
}

/// Whether the current device offers cudaLaunchAttributeProgrammaticStreamSerialization (ptx/control.cuh).
inline bool kernels_overlap() {
  int32_t device = 0;
  int32_t major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9;
}

/// CTAs for `items`, which the kernel walks with a grid's stride.
inline uint32_t grid_for(int64_t work_tiles, int64_t per_block, int64_t most = int64_t{1} << 20) {
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

}  // namespace folio::inline v0::kernels::cuda
