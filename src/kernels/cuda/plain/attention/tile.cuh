#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/cuda/common/row_state.cuh"

/// Sizes and element access.
namespace folio::inline v0::kernels::cuda::plain {

constexpr int32_t kThreads = 256;
constexpr int32_t kWarps = kThreads / 32;
constexpr int32_t kRows = 16;    ///< most packed rows of an item
constexpr int32_t kTokens = 32;  ///< keys of a tile: one for each lane
constexpr int32_t kMaxHeadDim = 256;
constexpr int32_t kRowPadding = 2;  ///< elements between rows in shared memory, so that lanes meet different banks

__device__ inline float to_float(__half value) {
  return __half2float(value);
}
__device__ inline float to_float(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
__device__ inline float2 to_float2(__half2 value) {
  return __half22float2(value);
}
__device__ inline float2 to_float2(__nv_bfloat162 value) {
  return __bfloat1622float2(value);
}

template <typename T>
struct Pair;
template <>
struct Pair<__half> {
  using Type = __half2;
};
template <>
struct Pair<__nv_bfloat16> {
  using Type = __nv_bfloat162;
};

}  // namespace folio::inline v0::kernels::cuda::plain
