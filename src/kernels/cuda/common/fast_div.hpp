#pragma once

#include <cstdint>

#include "folio/types/export.hpp"

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

}  // namespace folio::inline v0::kernels::cuda
