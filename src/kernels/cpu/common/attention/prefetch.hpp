#pragma once

#include "kernels/cpu/common/attention/convert.hpp"

/// Asks for memory ahead of its use, evenly spread: while the scores of a tile are made, for its values; while the
/// values are added, for the next tile's keys.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

inline constexpr int32_t kCacheLine = 64;

/// The stored vectors of a tile, as memory to ask for.
struct Stream {
  const unsigned char* const* rows = nullptr;  ///< [kTileTokens], or [kTileTokens / 2] pairs; null = nothing to ask for
  int32_t bytes = 0;                           ///< of a token's vector
  bool pairs = false;

  /// Asks for part `part` of `parts` of the vector whose turn is `turn`, one a token of the tile at work. Turns visit
  /// four quarters of the tile in step: different pages, where pages have 16 tokens.
  FOLIO_INLINE_MEMBER void request(int32_t turn, int32_t part, int32_t parts) const {
    if (rows == nullptr) return;
    const unsigned char* row;
    if (pairs) {
      row = rows[(turn >> 1 & 3) * (kTileTokens / 8) + (turn >> 3)] + (turn & 1) * bytes;
    } else {
      row = rows[(turn & 3) * (kTileTokens / 4) + (turn >> 2)];
    }
    const int32_t end = bytes * (part + 1) / parts;
    for (int32_t at = bytes * part / parts; at < end; at += kCacheLine) __builtin_prefetch(row + at, 0, 2);
  }
};

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
