#pragma once

/// A minimum that NaN passes (compute capability 8.0): PTX `min.NaN`.
namespace folio::inline v0::ptx {

/// The lesser of two; NaN if one of them is.
__device__ __forceinline__ float least(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

/// The larger of two; NaN if one of them is.
__device__ __forceinline__ float most(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

}  // namespace folio::inline v0::ptx
