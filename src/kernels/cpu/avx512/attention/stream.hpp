#pragma once

#include "kernels/cpu/common/attention/item_call.hpp"
#include "kernels/cpu/common/attention/vec.hpp"

/// Memory asked for ahead of its use, evenly spread: while the scores of a tile are made, its values; while the values
/// are added, the next tile's keys.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// Part of every stored vector of a tile.
struct Stream {
  const unsigned char* const* rows = nullptr;  ///< [kTileTokens], or [kTileTokens / 2] pairs; null = nothing to ask for
  int32_t begin = 0;                           ///< bytes [begin, end) of a token's vector
  int32_t end = 0;
  int32_t pair_bytes = 0;  ///< of a token, in pairs; 0 = not in pairs

  /// Asks for the part of token `t`.
  FOLIO_INLINE_MEMBER void request(int32_t t) const {
    if (rows == nullptr) return;
    const unsigned char* const row = pair_bytes != 0 ? rows[t >> 1] + (t & 1) * pair_bytes : rows[t];
    for (int32_t at = begin; at < end; at += kCacheLine) __builtin_prefetch(row + at, 0, 2);
  }
  /// The part `part` of `parts`, in whole lines.
  FOLIO_INLINE_MEMBER Stream part(int32_t part, int32_t parts) const {
    const int32_t lines = (end - begin + kCacheLine - 1) / kCacheLine;
    Stream some = *this;
    some.begin = begin + lines * part / parts * kCacheLine;
    const int32_t stop = begin + lines * (part + 1) / parts * kCacheLine;
    some.end = stop < end ? stop : end;
    return some;
  }

 private:
  static constexpr int32_t kCacheLine = 64;
};

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
