#pragma once

#include "kernels/cpu/common/attention/locate.hpp"

/// The pieces that an item is cut into, and the memory that the AMX arithmetic uses for them.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

inline constexpr int32_t kStripRows = 16;  ///< packed rows side by side in the lanes of a vector and the rows of a tile
inline constexpr int32_t kGroupTokens = 16;  ///< keys that one tile register holds
inline constexpr int32_t kHalfTokens = 32;   ///< values that one tile register holds, as 16 pairs
inline constexpr int32_t kStepTiles = 8;     ///< tiles that one pair of strips takes before the next one's turn
inline constexpr int32_t kElement = 2;       ///< bytes of a bfloat16
inline constexpr int32_t kDimStep = 32;      ///< of a query and key that one product takes
inline constexpr int32_t kDimTile = 16;      ///< of a value that one tile register holds
inline constexpr int64_t kTileRowBytes = 64;
inline constexpr int32_t kTileBytes = 1024;

FOLIO_INLINE int32_t rounded_up(int32_t value, int32_t to) {
  return (value + to - 1) / to * to;
}

/// 16 rows of memory for a tile load; null: not needed.
struct TileRow16 {
  const unsigned char* at;
  int64_t stride;
};

/// A tile of 64 tokens, made ready.
struct ReadyTokens {
  Tile tile;          ///< [begin, end): from the first to the last token that some row sees
  bool uniform;       ///< every row sees all of [begin, end), and `visible` is not written
  uint64_t special;   ///< tokens with infinite or NaN components, which `values` has as zeros
  uint64_t* visible;  ///< [rows, padded]: the tokens that each row sees
  TileRow16 keys[kTileTokens / kGroupTokens];
  TileRow16 values[kTileTokens / kHalfTokens];
  unsigned char* key_copy;    ///< [kTileTokens, padded head_dim_qk]
  unsigned char* value_copy;  ///< [kTileTokens / 2, padded head_dim_v, 2]
};

/// ItemScratch::own, carved.
struct OwnScratch {
  unsigned char* visible;      ///< [2, kStepTiles, padded rows] words
  unsigned char* keys;         ///< [kStepTiles] copies
  unsigned char* values;       ///< [kStepTiles] copies
  float* scores;               ///< [2, 2, kTileTokens, kStripRows]: of two tiles, for two strips
  uint16_t* weights;           ///< [kStepTiles, 2, 2, kStripRows, kHalfTokens] bfloat16
  float* logit_scale;          ///< [padded rows]
  float* value_scale;          ///< [padded rows]
  int64_t visible_tile_bytes;  ///< of one tile's words
  int64_t key_tile_bytes;
  int64_t value_tile_bytes;
  size_t bytes;
};

FOLIO_INLINE OwnScratch carve_own(unsigned char* memory, int32_t tile_rows, int32_t head_dim_qk, int32_t head_dim_v) {
  const int64_t rows = rounded_up(tile_rows, kStripRows);
  OwnScratch own;
  own.visible_tile_bytes = rows * 8;
  own.key_tile_bytes = int64_t{kTileTokens} * rounded_up(head_dim_qk, kDimStep) * kElement;
  own.value_tile_bytes = int64_t{kTileTokens} * rounded_up(head_dim_v, kDimTile) * kElement;
  int64_t used = 0;
  const auto take = [&](int64_t bytes) __attribute__((always_inline)) {
    unsigned char* const part = memory == nullptr ? nullptr : memory + used;
    used += (bytes + 63) / 64 * 64;
    return part;
  };
  own.visible = take(2 * kStepTiles * own.visible_tile_bytes);
  own.keys = take(kStepTiles * own.key_tile_bytes);
  own.values = take(kStepTiles * own.value_tile_bytes);
  own.scores = reinterpret_cast<float*>(take(4 * kTileTokens * kStripRows * 4));
  own.weights = reinterpret_cast<uint16_t*>(take(kStepTiles * 4 * kTileBytes));
  own.logit_scale = reinterpret_cast<float*>(take(rows * 4));
  own.value_scale = reinterpret_cast<float*>(take(rows * 4));
  own.bytes = static_cast<size_t>(used);
  return own;
}

/// What all rows of an item see, for the quick way past tiles that lie within it.
struct CommonSight {
  int32_t begin;
  int32_t end;
  bool masked;  ///< some row has a custom mask
};

FOLIO_INLINE CommonSight common_sight(const ItemCall& call) {
  CommonSight sight{call.rows[0].visible_begin, call.rows[0].visible_end, false};
  for (int32_t r = 0; r < call.num_rows; ++r) {
    sight.begin = larger(sight.begin, call.rows[r].visible_begin);
    sight.end = smaller(sight.end, call.rows[r].visible_end);
    sight.masked |= call.rows[r].mask != nullptr;
  }
  return sight;
}

/// The first tile from token `first` on of which some row sees a token; false if there is none.
static inline bool find_tokens(const ItemCall& call, const CommonSight& sight, int32_t first, ReadyTokens& ready) {
  const ItemKeys& keys = call.keys;
  for (; first < keys.kv_end; first += kTileTokens) {
    const Tile part{first, larger(keys.kv_begin - first, 0), smaller(keys.kv_end - first, kTileTokens)};
    ready.special = 0;
    if (!sight.masked && sight.begin <= first + part.begin && first + part.end <= sight.end) {
      ready.tile = part;
      ready.uniform = true;
      return true;
    }
    uint64_t any = 0;
    uint64_t all = ~uint64_t{0};
    for (int32_t r = 0; r < call.num_rows; ++r) {
      ready.visible[r] = visible_tokens(call.rows[r], part);
      any |= ready.visible[r];
      all &= ready.visible[r];
    }
    if (any == 0) continue;
    for (int32_t r = call.num_rows; r % kStripRows != 0; ++r) ready.visible[r] = 0;
    ready.tile = {first, __builtin_ctzll(any), 64 - __builtin_clzll(any)};
    ready.uniform = all == bit_range(ready.tile.begin, ready.tile.end);
    return true;
  }
  return false;
}

/// A step: up to kStepTiles tiles.
struct Step {
  ReadyTokens tiles[kStepTiles];
  int32_t count;
};

/// Fills the step with tiles from token `first` on, at most `most`; returns where the next step begins.
static inline int32_t find_step(const ItemCall& call, const CommonSight& sight, int32_t first, int32_t most,
                                Step& step) {
  step.count = 0;
  while (step.count < most && find_tokens(call, sight, first, step.tiles[step.count])) {
    first = step.tiles[step.count++].tile.first + kTileTokens;
  }
  return first;
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
