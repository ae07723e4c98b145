#pragma once

#include <cmath>
#include <cstdint>

#include "folio/types/export.hpp"

namespace folio::inline v0::kernels::cuda {

/// Quotients by one divisor above 0, rounded as the division rounds them: the divisor's reciprocal is taken once, and
/// each product with it is corrected once by what is left over. That gives the rounded quotient because the reciprocal
/// itself is rounded correctly (Markstein, Computation of elementary functions on the IBM RISC System/6000 processor,
/// 1990), as long as nothing comes near the ends of the range; what may, is divided. What is so small that a correction
/// may lose a bit is below 2^-40 when divided, and is stored as 0 in every type of 8 bits and fewer, which this is for.
class Divisor {
 public:
  Divisor() = default;
  FOLIO_HOST_DEVICE explicit Divisor(float divisor)
      : divisor_(divisor), inverse_(1.0f / divisor), largest_(is_moderate(divisor) ? kLargest : -1.0f) {}

  template <int32_t kElements>
  FOLIO_HOST_DEVICE void divide(float* values) const {
    float largest = 0.0f;  // NaNs leave it as it is, and stay NaNs in either branch
    for (int32_t i = 0; i < kElements; ++i) largest = fmaxf(largest, fabsf(values[i]));
    if (largest <= largest_) {
      for (int32_t i = 0; i < kElements; ++i) {
        const float quotient = values[i] * inverse_;
        // The remainder is taken with its sign turned: so -0 stays -0.
        values[i] = fmaf(fmaf(quotient, divisor_, -values[i]), -inverse_, quotient);
      }
      return;
    }
    for (int32_t i = 0; i < kElements; ++i) values[i] /= divisor_;
  }

 private:
  static constexpr float kLargest = 0x1p+80f;
  FOLIO_HOST_DEVICE static bool is_moderate(float divisor) { return divisor >= 0x1p-40f && divisor <= 0x1p+40f; }

  float divisor_ = 1.0f;
  float inverse_ = 1.0f;
  float largest_ = kLargest;  ///< magnitude for which the corrected product serves
};

}  // namespace folio::inline v0::kernels::cuda
