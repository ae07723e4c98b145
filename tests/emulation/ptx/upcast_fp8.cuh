#pragma once

#include <cuda_fp8.h>

#include "warp_emulator.hpp"

/// src/ptx/upcast_fp8.cuh, emulated.
namespace folio::inline v0::ptx {

inline uint32_t widened_pair(uint32_t codes, __nv_fp8_interpretation_t kind) {
  const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes & 0xffffu), kind);
  return pair.x | uint32_t{pair.y} << 16;
}
inline void upcast_e4m3x4(uint32_t codes, uint32_t& low, uint32_t& high) {
  low = widened_pair(codes, __NV_E4M3);
  high = widened_pair(codes >> 16, __NV_E4M3);
}
inline void upcast_e5m2x4(uint32_t codes, uint32_t& low, uint32_t& high) {
  low = widened_pair(codes, __NV_E5M2);
  high = widened_pair(codes >> 16, __NV_E5M2);
}

}  // namespace folio::inline v0::ptx
