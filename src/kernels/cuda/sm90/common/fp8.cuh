#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "kernels/cuda/sm90/common/config.hpp"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"

/// Elements of keys and values in shared memory: the 16-bit type `T` of the MMA, or fp8 data that is dequantized to
/// float16 in front of it.
namespace folio::inline v0::kernels::cuda::sm90 {

/// Upcasts the four fp8 values of `word` to two pairs of float16. Exact.
template <Fp8 kFp8>
__device__ __forceinline__ void upcast_fp8x4(uint32_t word, uint32_t& low, uint32_t& high) {
  if constexpr (kFp8 == Fp8::kE4M3) {
    ptx::upcast_e4m3x4(word, low, high);
  } else {
    ptx::upcast_e5m2x4(word, low, high);
  }
}

/// Upcasts two fp8 values to a pair of `T`. Exact, NaN and Inf included.
template <typename T>
__device__ __forceinline__ uint32_t upcast_fp8x2(uint32_t pair, __nv_fp8_interpretation_t kind) {
  const __half2 values = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), kind);
  const float2 wide = __half22float2(values);
  return ptx::pack_two<T>(wide.x, wide.y);
}

}  // namespace folio::inline v0::kernels::cuda::sm90
