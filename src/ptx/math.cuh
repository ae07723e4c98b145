#pragma once

/// A minimum that NaN passes (compute capability 8.0), and a saturating sum: PTX `min.NaN` and `fma.sat`.
namespace folio::inline v0::ptx {

/// The lesser of two; NaN if one of them is.
__device__ __forceinline__ float min_nan(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

/// x * y + z, and not less than 0 nor more than 1; 0 if it is NaN.
__device__ __forceinline__ float fma_sat(float x, float y, float z) {
  float sum;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(sum) : "f"(x), "f"(y), "f"(z));
  return sum;
}

}  // namespace folio::inline v0::ptx
