#pragma once

#include "kernels/cpu/amx/attention/operands.hpp"

/// Weighted sums of values: a strip's weights are the left factor, pairs of values as stored the right one.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// Tiles of a step whose weights are made and whose values are not yet added, for the strips from row `r` on.
struct Pending {
  const ReadyTokens* tiles[kStepTiles];
  const uint16_t* weights[kStepTiles];  ///< [strip][half][kStripRows][kHalfTokens]
  int32_t count = 0;
};

inline constexpr int32_t kHalfWeights = kStripRows * kHalfTokens;
inline constexpr int32_t kStripWeights = 2 * kHalfWeights;

template <class Tiles, int kFrom, int kCount>
FOLIO_INLINE void load_sums(const float* acc, int64_t stride) {
  if constexpr (kCount > 0) {
    Tiles::template load<kFrom>(acc, stride);
    load_sums<Tiles, kFrom + 1, kCount - 1>(acc + kDimTile, stride);
  }
}

template <class Tiles, int kFrom, int kCount>
FOLIO_INLINE void store_sums(float* acc, int64_t stride) {
  if constexpr (kCount > 0) {
    Tiles::template store<kFrom>(acc, stride);
    store_sums<Tiles, kFrom + 1, kCount - 1>(acc + kDimTile, stride);
  }
}

template <class Tiles, int kStrips, int kDims, int kDim, class A>
FOLIO_INLINE void multiply_dims(const unsigned char* values, int64_t stride, A& ahead) {
  if constexpr (kDim < kDims) {
    constexpr int kValues = 6 + kDim % 2;
    Tiles::template load<kValues>(values + kDim * kTileRowBytes, stride);
    Tiles::template multiply_add<kDim, 4, kValues>();
    if constexpr (kStrips == 2) Tiles::template multiply_add<kDims + kDim, 5, kValues>();
    ahead.at_product();
    multiply_dims<Tiles, kStrips, kDims, kDim + 1>(values, stride, ahead);
  }
}

/// kDims tiles of the dimension, beginning with tile `d`.
template <class Tiles, int kStrips, int kDims, class A>
FOLIO_INLINE void add_dims(float* acc, int32_t v_stride, int32_t d, const Pending& pending, A& ahead) {
  const int64_t stride = int64_t{v_stride} * 4;
  float* const sums = acc + d * kDimTile;
  ahead.enter_values(d);
  load_sums<Tiles, 0, kDims>(sums, stride);
  if constexpr (kStrips == 2) load_sums<Tiles, kDims, kDims>(sums + kStripRows * v_stride, stride);
  for (int32_t i = 0; i < pending.count; ++i) {
    for (int32_t h = 0; h < kTileTokens / kHalfTokens; ++h) {
      const TileRow16& values = pending.tiles[i]->values[h];
      if (values.at == nullptr) continue;
      const uint16_t* const weights = pending.weights[i] + h * kHalfWeights;
      Tiles::template load<4>(weights, kTileRowBytes);
      if constexpr (kStrips == 2) Tiles::template load<5>(weights + kStripWeights, kTileRowBytes);
      multiply_dims<Tiles, kStrips, kDims, 0>(ahead.value_tiles(pending.tiles[i]->values, h, d), values.stride, ahead);
    }
  }
  store_sums<Tiles, 0, kDims>(sums, stride);
  if constexpr (kStrips == 2) store_sums<Tiles, kDims, kDims>(sums + kStripRows * v_stride, stride);
}

FOLIO_INLINE float bfloat16_value(uint16_t code) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(code) << 16);
}

/// The components that products had as zeros, added to the rows that see them: whatever the order, the sum is infinite
/// or NaN.
static inline void add_special(const ItemCall& call, int32_t r, int32_t rows, const ReadyTokens& ready,
                               const uint16_t* weights) {
  const ItemKeys& keys = call.keys;
  const int32_t step = keys.packed_v ? 2 : 1;
  for (uint64_t left = ready.special; left != 0; left &= left - 1) {
    const int32_t t = __builtin_ctzll(left);
    const int32_t local = ready.tile.first + t;
    const unsigned char* const from = value_at(keys, local) + (keys.packed_v ? local % 2 * element_bytes(keys) : 0);
    for (int32_t i = 0; i < rows; ++i) {
      if ((ready.visible[r + i] >> t & 1) == 0) continue;
      const int32_t strip = i / kStripRows;
      const uint16_t weight = weights[strip * kStripWeights + t / kHalfTokens * kHalfWeights +
                                      i % kStripRows * kHalfTokens + t % kHalfTokens];
      float* const acc = call.states.acc + (r + i) * call.v_stride;
      for (int32_t d = 0; d < call.head_dim_v; ++d) {
        const uint16_t code = bfloat16_element(keys, from, d * step);
        if ((code & 0x7f80) == 0x7f80) acc[d] += bfloat16_value(weight) * bfloat16_value(code);
      }
    }
  }
}

/// Adds the pending tiles' values to the sums of the strips from row `r` on, and forgets them. Dimension tiles before
/// `d` have been added already.
template <class Tiles, int kStrips, class A>
static void add_pending(const ItemCall& call, int32_t r, int32_t d, Pending& pending, A& ahead) {
  if (pending.count == 0) return;
  float* const acc = call.states.acc + r * call.v_stride;
  const int32_t dims = call.v_stride / kDimTile;
  constexpr int kAtOnce = 4 / kStrips;
  for (; d + kAtOnce <= dims; d += kAtOnce) add_dims<Tiles, kStrips, kAtOnce>(acc, call.v_stride, d, pending, ahead);
  for (; d < dims; ++d) add_dims<Tiles, kStrips, 1>(acc, call.v_stride, d, pending, ahead);
  const int32_t rows = smaller(call.num_rows - r, kStrips * kStripRows);
  for (int32_t i = 0; i < pending.count; ++i) {
    if (pending.tiles[i]->special != 0) add_special(call, r, rows, *pending.tiles[i], pending.weights[i]);
  }
  pending.count = 0;
}

/// Multiplies the sums of the raised rows of a strip.
FOLIO_INLINE void rescale_sums(const ItemCall& call, int32_t r, __mmask16 raised, Vec rescale) {
  for (uint32_t left = raised; left != 0; left &= left - 1) {
    const int32_t i = __builtin_ctz(left);
    float* const acc = call.states.acc + (r + i) * call.v_stride;
    const Vec factor = splat(rescale[i]);
    for (int32_t d = 0; d < call.v_stride; d += kLanes) store(acc + d, load<Vec>(acc + d) * factor);
  }
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
