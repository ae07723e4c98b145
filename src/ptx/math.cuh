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

/// The greater of `largest` and |x|, or NaN if either is NaN (compute capability 8.0).
__device__ __forceinline__ float max_abs_nan(float largest, float x) {
  asm("{.reg .f32 magnitude; abs.f32 magnitude, %1; max.NaN.f32 %0, magnitude, %0;}" : "+f"(largest) : "f"(x));
  return largest;
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

/// Two values as e4m3, or as e5m2, `low` in the low byte: as pack_e4m3x4 (compute capability 8.9).
__device__ __forceinline__ uint16_t pack_e4m3x2(float low, float high) {
  uint16_t packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ __forceinline__ uint16_t pack_e5m2x2(float low, float high) {
  uint16_t packed;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}

/// Upcasts a float16, exactly.
__device__ __forceinline__ float upcast_f16(uint16_t half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}

/// Upcasts two e4m3 values to float16, exactly, NaN included (compute capability 8.9).
__device__ __forceinline__ uint32_t upcast_e4m3x2(uint16_t two) {
  uint32_t wide;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(wide) : "h"(two));
  return wide;
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

/// All bits of each half where the magnitude of a 16-bit value is at least its limit; none where it is a NaN (compute
/// capability 9.0 for bfloat16).
template <typename T>
__device__ __forceinline__ uint32_t set_abs_ge(uint32_t pair, uint32_t limits);
template <>
__device__ __forceinline__ uint32_t set_abs_ge<__nv_bfloat16>(uint32_t pair, uint32_t limits) {
  uint32_t mask;
  asm("{.reg .b32 magnitudes; abs.bf16x2 magnitudes, %1; set.ge.u32.bf16x2 %0, magnitudes, %2;}"
      : "=r"(mask)
      : "r"(pair), "r"(limits));
  return mask;
}
template <>
__device__ __forceinline__ uint32_t set_abs_ge<__half>(uint32_t pair, uint32_t limits) {
  uint32_t mask;
  asm("{.reg .b32 magnitudes; abs.f16x2 magnitudes, %1; set.ge.u32.f16x2 %0, magnitudes, %2;}"
      : "=r"(mask)
      : "r"(pair), "r"(limits));
  return mask;
}

/// All bits of each half whose sign bit is set (PTX `prmt`).
__device__ __forceinline__ uint32_t signs_of_halves(uint32_t pair) {
  uint32_t mask;
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(mask) : "r"(pair));
  return mask;
}

}  // namespace folio::inline v0::ptx
