#pragma once

#include <cstdint>

/// Codes of 8 bits widened to float16 in registers, exactly: NaN and infinities too.
namespace folio::inline v0::ptx {

/// Four e4m3 codes (compute capability 8.9): the first two to `low`, the first of them in its lower half.
__device__ __forceinline__ void upcast_e4m3x4(uint32_t codes, uint32_t& low, uint32_t& high) {
  asm("{.reg .b16 first, second; mov.b32 {first, second}, %2; cvt.rn.f16x2.e4m3x2 %0, first; "
      "cvt.rn.f16x2.e4m3x2 %1, second;}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
}

/// Four e5m2 codes: each is the upper byte of its float16.
__device__ __forceinline__ void upcast_e5m2x4(uint32_t codes, uint32_t& low, uint32_t& high) {
  low = __byte_perm(codes, 0, 0x1404);
  high = __byte_perm(codes, 0, 0x3424);
}

}  // namespace folio::inline v0::ptx
