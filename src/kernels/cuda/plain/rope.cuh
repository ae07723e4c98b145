#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/attention_kernel.hpp"

/// Rotary embedding of Feature::kRopeLlama (RopeArgs): rotates components d and d + head_dim_qk / 2.
namespace folio::inline v0::kernels::cuda::plain {

/// Quarter turns of pair d for each position. In float64, as in rotate: what is left of an angle after whole turns must
/// be exact at every position.
__device__ inline double quarter_turns_of(const RopeParams& rope, int32_t head_dim, int32_t d) {
  constexpr double kQuartersPerRadian = 0.636619772367581343;
  return pow(double{rope.theta}, -2.0 * d / head_dim) / double{rope.scale} * kQuartersPerRadian;
}

/// Rotates a pair to `position`.
__device__ inline void rotate(double quarter_turns, int64_t position, float& x, float& y) {
  const double angle = static_cast<double>(position) * quarter_turns;
  const double whole = rint(angle);
  float sine;
  float cosine;
  sincospif(0.5f * static_cast<float>(angle - whole), &sine, &cosine);
  // Puts the whole quarter turns back: one turns (x, y) into (-y, x).
  const auto quarters = static_cast<int64_t>(whole);
  if ((quarters & 1) != 0) {
    const float kept = cosine;
    cosine = -sine;
    sine = kept;
  }
  if ((quarters & 2) != 0) {
    cosine = -cosine;
    sine = -sine;
  }
  const float turned_x = __fmaf_rn(x, cosine, -__fmul_rn(y, sine));
  y = __fmaf_rn(y, cosine, __fmul_rn(x, sine));
  x = turned_x;
}

}  // namespace folio::inline v0::kernels::cuda::plain
