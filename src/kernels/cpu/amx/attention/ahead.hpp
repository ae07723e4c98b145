#pragma once

#include "kernels/cpu/amx/attention/operands.hpp"

/// Asking for memory ahead of its use.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// What goes on beside the products hears of these: at_product() and at_weights() come with every product and pair of
/// tokens; the rest says how far the products have come, and is asked where they find their factors. Here: keys and
/// values lie where ReadyTokens says.
struct AsLocated {
  FOLIO_INLINE_MEMBER void enter_keys(int32_t /*step*/) {}
  FOLIO_INLINE_MEMBER void scores_made() {}
  FOLIO_INLINE_MEMBER void enter_values(int32_t /*dim_tile*/) {}
  /// 16 keys, 32 of their components.
  FOLIO_INLINE_MEMBER const unsigned char* key_tile(const TileRow16* keys, int32_t group, int32_t step) const {
    return keys[group].at + step * kTileRowBytes;
  }
  /// 16 pairs of values, from 16 components on.
  FOLIO_INLINE_MEMBER const unsigned char* value_tiles(const TileRow16* values, int32_t half, int32_t dim_tile) const {
    return values[half].at + dim_tile * kTileRowBytes;
  }
};

/// Asks for a tile's values while its scores are made, and then for the next tile's keys, a few lines of four runs at a
/// time, spread evenly over the work. A run is what 16 tokens' keys or values take. In this order no more than one tile
/// is wanted in L1 at a time: a tile's keys are no longer needed when its values are, and the other way round.
struct Ahead : AsLocated {
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
  FOLIO_INLINE_MEMBER void at_product() {
    request();
  }
  FOLIO_INLINE_MEMBER void at_weights() {
    request();
  }
  FOLIO_INLINE_MEMBER void finish() {
    while (stage == 0 || at < ends[1]) request();
  }
};

/// Items of many rows wait for arithmetic: there, asking ahead costs more than it gains.
struct NothingAhead : AsLocated {
  FOLIO_INLINE_MEMBER void at_product() {}
  FOLIO_INLINE_MEMBER void at_weights() {}
};

/// The token of a tile that group g's run is found by: one that some row sees.
FOLIO_INLINE int32_t run_token(const Tile& tile, int32_t g) {
  return tile.first + larger(smaller(g * kGroupTokens, tile.end - 1), tile.begin);
}

/// The runs of a tile's values, and of the keys of the tile that comes next; null: none does. fp8 is copied before its
/// tile begins: then both are the next tile's.
static inline Ahead ahead_of(const ItemCall& call, const Tile& tile, const Tile* next) {
  Ahead ahead;
  const bool copied = holds_fp8(call.keys);
  const Tile* const values = copied ? next : &tile;
  for (int32_t g = 0; g < Ahead::kRuns; ++g) {
    if (values != nullptr) ahead.runs[0][g] = value_at(call.keys, run_token(*values, g));
    if (next != nullptr) ahead.runs[1][g] = key_at(call.keys, run_token(*next, g));
  }
  const int32_t run_bytes = kGroupTokens * element_bytes(call.keys);
  ahead.ends[0] = values == nullptr ? 0 : run_bytes * call.head_dim_v;
  ahead.ends[1] = next == nullptr ? 0 : run_bytes * call.head_dim_qk;
  return ahead;
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
