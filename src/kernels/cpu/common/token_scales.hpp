#pragma once

#include "kernels/cpu/common/vec.hpp"

/// Scales of the tokens of a KV tile (int8 caches): a key or a value is its stored components times its token's scale.
/// Scores are multiplied by those of K, and P by those of V, so that GEMMs take stored components.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// [kTileTokens] each; null: the KV tile has none.
struct TileScales {
  float* k = nullptr;
  float* v = nullptr;
};

/// Copies the scales of `count` tokens of a page, from slot `slot` on, to those from token `t` of the tile on.
FOLIO_INLINE void copy_token_scales(const KvOperand& kv, int64_t page, int64_t slot, int32_t t, int32_t count,
                                    const TileScales& scales) {
  const float* const k = kv.k_scales + page * kv.k_scale_page + slot * kv.k_scale_token;
  const float* const v = kv.v_scales + page * kv.v_scale_page + slot * kv.v_scale_token;
  for (int32_t i = 0; i < count; ++i) scales.k[t + i] = k[i * kv.k_scale_token];
  for (int32_t i = 0; i < count; ++i) scales.v[t + i] = v[i * kv.v_scale_token];
}

/// Scales of 0 for a whole tile: those of its tokens that nobody attends to are never read from the cache.
FOLIO_INLINE void clear_token_scales(const TileScales& scales) {
  __builtin_memset(scales.k, 0, kTileTokens * sizeof(float));
  __builtin_memset(scales.v, 0, kTileTokens * sizeof(float));
}

/// A row's scores, of stored keys, become those of the keys.
FOLIO_INLINE void scale_scores(const TileScales& scales, float* scores) {
  for (int32_t i = 0; i < kTileTokens; i += kLanes) {
    store(scores + i, load<Vec>(scores + i) * load<Vec>(scales.k + i));
  }
}

/// A row's P, of values, becomes that of stored values. A masked token's stays 0: its scale may be NaN.
FOLIO_INLINE void scale_p(const TileScales& scales, uint64_t visible, float* p) {
  for (int32_t i = 0; i < kTileTokens; i += kLanes) {
    const Vec scaled = load<Vec>(p + i) * load<Vec>(scales.v + i);
    store(p + i, select(lanes_of_bits(static_cast<uint32_t>(visible >> i)), scaled, Vec{}));
  }
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
