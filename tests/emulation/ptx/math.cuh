#pragma once

#include <cmath>

/// src/ptx/math.cuh, emulated.
namespace folio::inline v0::ptx {

inline float min_nan(float x, float y) {
  return x < y || x != x ? x : y;
}

inline float fma_sat(float x, float y, float z) {
  const float sum = std::fma(x, y, z);
  return sum > 0.0f ? std::fmin(sum, 1.0f) : 0.0f;
}

}  // namespace folio::inline v0::ptx
