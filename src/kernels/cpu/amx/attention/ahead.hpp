#pragma once

#include "kernels/cpu/amx/attention/operands.hpp"

/// Asking for memory ahead of its use.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// Asks for a tile's values while its scores are made, and then for the next tile's keys, a few lines of four runs at a
/// time, spread evenly over the work. A run is what 16 tokens' keys or values take. In this order no more than one tile
/// is wanted in L1 at a time: a tile's keys are no longer needed when its values are, and the other way round.
struct Ahead {
  static constexpr int32_t kRuns = kTileTokens / kGroupTokens;
  static constexpr int32_t kLine = 64;
  static constexpr int32_t kAtOnce = 2;  ///< lines of each run at a time
  const unsigned char* runs[2][kRuns];   ///< of values, of keys
  int32_t ends[2] = {};                  ///< bytes of a run
  int32_t stage = 0;
  int32_t at = 0;

  FOLIO_INLINE_MEMBER void request() {
    if (at >= ends[stage]) {
      if (stage == 1) return;
      stage = 1;
      at = 0;
      if (ends[1] == 0) return;
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRuns; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kAtOnce; ++j) __builtin_prefetch(runs[stage][i] + at + j * kLine, 0, 3);
    }
    at += kAtOnce * kLine;
  }
  FOLIO_INLINE_MEMBER bool done() const {
    return stage == 1 && at >= ends[1];
  }
};

/// Items of many rows wait for arithmetic: there, asking ahead costs more than it gains.
struct NothingAhead {
  FOLIO_INLINE_MEMBER void request() {}
};

/// The token of a tile that group g's run is found by: one that some row sees.
FOLIO_INLINE int32_t run_token(const Tile& tile, int32_t g) {
  return tile.first + larger(smaller(g * kGroupTokens, tile.end - 1), tile.begin);
}

/// The runs of a tile's values, and of the keys of the tile that comes next; null: none does.
static inline Ahead ahead_of(const ItemCall& call, const Tile& tile, const Tile* next) {
  Ahead ahead;
  for (int32_t g = 0; g < Ahead::kRuns; ++g) {
    ahead.runs[0][g] = value_at(call.keys, run_token(tile, g));
    if (next != nullptr) ahead.runs[1][g] = key_at(call.keys, run_token(*next, g));
  }
  ahead.ends[0] = kGroupTokens * kElement * call.head_dim_v;
  ahead.ends[1] = next == nullptr ? 0 : kGroupTokens * kElement * call.head_dim_qk;
  return ahead;
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
