#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "warp_emulator.hpp"

/// src/ptx/math.cuh, emulated.
namespace folio::inline v0::ptx {

inline float ex2_approx(float x) {
  return std::exp2(x);
}
inline float rcp_approx(float x) {
  return 1.0f / x;
}
inline float min_nan(float x, float y) {
  return x < y || x != x ? x : y;
}

inline float max_abs_nan(float largest, float x) {
  const float magnitude = std::fabs(x);
  return magnitude > largest || magnitude != magnitude ? magnitude : largest;
}

inline float fma_sat(float x, float y, float z) {
  const float sum = std::fma(x, y, z);
  return sum > 0.0f ? std::fmin(sum, 1.0f) : 0.0f;
}

template <typename T>
uint32_t pack_two(float low, float high);
template <>
inline uint32_t pack_two<__nv_bfloat16>(float low, float high) {
  const auto bits = [](float x) { return static_cast<__nv_bfloat16_raw>(__float2bfloat16_rn(x)).x; };
  return bits(low) | static_cast<uint32_t>(bits(high)) << 16;
}
template <>
inline uint32_t pack_two<__half>(float low, float high) {
  const auto bits = [](float x) { return static_cast<__half_raw>(__float2half_rn(x)).x; };
  return bits(low) | static_cast<uint32_t>(bits(high)) << 16;
}
inline uint32_t pack_e4m3x4(float a, float b, float c, float d) {
  uint32_t packed = 0;
  int32_t at = 0;
  for (const float x : {a, b, c, d}) {
    packed |= uint32_t{__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3)} << 8 * at++;
  }
  return packed;
}

inline uint16_t pack_e4m3x2(float low, float high) {
  return static_cast<uint16_t>(pack_e4m3x4(low, high, 0.0f, 0.0f));
}
inline uint16_t pack_e5m2x2(float low, float high) {
  return static_cast<uint16_t>(__nv_cvt_float_to_fp8(low, __NV_SATFINITE, __NV_E5M2) |
                               __nv_cvt_float_to_fp8(high, __NV_SATFINITE, __NV_E5M2) << 8);
}
inline float upcast_f16(uint16_t half) {
  __half_raw raw;
  raw.x = half;
  return __half2float(__half(raw));
}

inline uint32_t upcast_pair(uint32_t data, __nv_fp8_interpretation_t kind) {
  const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(data & 0xffffu), kind);
  return pair.x | uint32_t{pair.y} << 16;
}
inline void upcast_e4m3x4(uint32_t data, uint32_t& low, uint32_t& high) {
  low = upcast_pair(data, __NV_E4M3);
  high = upcast_pair(data >> 16, __NV_E4M3);
}
inline uint32_t upcast_e4m3x2(uint16_t two) {
  return upcast_pair(two, __NV_E4M3);
}
inline void upcast_e5m2x4(uint32_t data, uint32_t& low, uint32_t& high) {
  low = upcast_pair(data, __NV_E5M2);
  high = upcast_pair(data >> 16, __NV_E5M2);
}

/// A magnitude's bits are ordered as its values are, up to the infinity.
template <typename T>
uint32_t set_abs_ge(uint32_t pair, uint32_t limits) {
  const uint32_t infinity = std::is_same_v<T, __half> ? 0x7c00u : 0x7f80u;
  uint32_t mask = 0;
  for (int32_t shift = 0; shift < 32; shift += 16) {
    const uint32_t magnitude = pair >> shift & 0x7fffu;
    const uint32_t limit = limits >> shift & 0xffffu;
    if (magnitude <= infinity && limit <= infinity && magnitude >= limit) mask |= 0xffffu << shift;
  }
  return mask;
}
inline uint32_t signs_of_halves(uint32_t pair) {
  return __byte_perm(pair, 0, 0xbb99);
}

}  // namespace folio::inline v0::ptx
