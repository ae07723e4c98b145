#pragma once

#include <cmath>
#include <cstdint>

#include "folio/types/export.hpp"

/// Divisions by numbers that stay the same: integers (FastDiv) and floats (Divisor).
namespace folio::inline v0::kernels::cuda {

/// Division of numbers below 2^31 by a number that is known on the host, without dividing. With L = ceil(log2 d) and m
/// = ceil(2^(31 + L) / d), n / d = n * m >> 31 + L: m is too large by less than one d-th, which n < 2^31 cannot turn
/// into a whole one (Granlund and Montgomery, 1994).
class FastDiv {
 public:
  FastDiv() = default;
  /// 1 <= divisor < 2^31.
  explicit FastDiv(int32_t divisor) : divisor_(static_cast<uint32_t>(divisor)) {
    while ((uint64_t{1} << (shift_ - 31)) < divisor_) ++shift_;
    multiplier_ = static_cast<uint32_t>(((uint64_t{1} << shift_) + divisor_ - 1) / divisor_);
  }
  FOLIO_HOST_DEVICE uint32_t quotient(uint32_t n) const {
    return static_cast<uint32_t>(uint64_t{n} * multiplier_ >> shift_);
  }
  FOLIO_HOST_DEVICE uint32_t remainder(uint32_t n) const { return n - quotient(n) * divisor_; }
  FOLIO_HOST_DEVICE uint32_t divisor() const { return divisor_; }

 private:
  uint32_t divisor_ = 1;
  uint32_t multiplier_ = uint32_t{1} << 31;
  uint32_t shift_ = 31;
};

/// A piece of a tensor's rows: token, head and piece of the head.
struct PieceIndex {
  uint32_t token;
  uint32_t head;
  uint32_t piece;
};

/// Pieces counted over heads and tokens, split again.
struct PieceSplit {
  FastDiv per_token;
  FastDiv per_head;
  PieceSplit() = default;
  PieceSplit(int32_t pieces_per_head, int32_t num_heads)
      : per_token(pieces_per_head * num_heads), per_head(pieces_per_head) {}
  FOLIO_HOST_DEVICE PieceIndex at(uint32_t i) const {
    const uint32_t token = per_token.quotient(i);
    const uint32_t in_token = i - token * per_token.divisor();
    const uint32_t head = per_head.quotient(in_token);
    return {token, head, in_token - head * per_head.divisor()};
  }
};

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
