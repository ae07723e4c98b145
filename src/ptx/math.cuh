#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

/// Scalar arithmetic and conversions of packed values that C++ does not express.
namespace folio::inline v0::ptx {

/// 2^x, relative error at most 2^-22. Denormal results are 0; 2^0 is exactly 1; NaN stays NaN.
__device__ __forceinline__ float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 1 / x, within one unit in the last place. 0 for infinities.
__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// The lesser of two, or NaN if either is NaN (compute capability 8.0).
__device__ __forceinline__ float min_nan(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

/// x * y + z, clamped to [0, 1]. NaN becomes 0.
__device__ __forceinline__ float fma_sat(float x, float y, float z) {
  float sum;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(sum) : "f"(x), "f"(y), "f"(z));
  return sum;
}

/// Two values rounded to nearest even, `low` in the lower half.
template <typename T>
__device__ __forceinline__ uint32_t pack_two(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack_two<__nv_bfloat16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
template <>
__device__ __forceinline__ uint32_t pack_two<__half>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

/// Four values as e4m3, the first in the lowest byte: rounded to nearest, saturated, NaN stays NaN (compute capability
/// 8.9).
__device__ __forceinline__ uint32_t pack_e4m3x4(float a, float b, float c, float d) {
  uint32_t packed;
  asm("{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; "
      "mov.b32 %0, {low, high};}"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

/// Upcasts four e4m3 values to float16, exactly, NaN included (compute capability 8.9). `low` gets the first two, the
/// first of them in its lower half.
__device__ __forceinline__ void upcast_e4m3x4(uint32_t four, uint32_t& low, uint32_t& high) {
  asm("{.reg .b16 first, second; mov.b32 {first, second}, %2; cvt.rn.f16x2.e4m3x2 %0, first; "
      "cvt.rn.f16x2.e4m3x2 %1, second;}"
      : "=r"(low), "=r"(high)
      : "r"(four));
}

/// Upcasts four e5m2 values to float16, exactly, NaN and infinities included: an e5m2 is the upper byte of its float16.
__device__ __forceinline__ void upcast_e5m2x4(uint32_t four, uint32_t& low, uint32_t& high) {
  low = __byte_perm(four, 0, 0x1404);
  high = __byte_perm(four, 0, 0x3424);
}

}  // namespace folio::inline v0::ptx
