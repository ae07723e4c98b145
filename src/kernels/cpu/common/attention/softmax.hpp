#pragma once

#include "kernels/cpu/common/attention/locate.hpp"
#include "kernels/cpu/common/attention/math.hpp"

/// Scores of one row and one tile to weights, and the row's running maximum and sum.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

inline constexpr int kTileVecs = kTileTokens / kLanes;

/// |query position - key position| of every token of a tile.
FOLIO_INLINE void key_distances(const ItemKeys& keys, const ItemRow& row, const Tile& tile, float* distances) {
  for (int32_t t = 0; t < kTileTokens; ++t) {
    const int64_t distance = row.position - key_position(keys, int64_t{tile.first} + t);
    distances[t] = static_cast<float>(distance < 0 ? -distance : distance);
  }
}

/// scores[kTileTokens] become exp2(logit - maximum) * value_scale, 0 where the row does not see the token. Returns what
/// the row's accumulator is to be multiplied by.
static inline float softmax_row(const ItemCall& call, const Tile& tile, int32_t r, uint64_t visible, float* scores) {
  const ItemRow& row = call.rows[r];
  Vec s[kTileVecs];
  if (call.soft_cap != 0.0f) {
    const Vec scale = splat(row.logit_scale / call.soft_cap);
    const Vec cap = splat(call.soft_cap * kLog2E);
    for (int i = 0; i < kTileVecs; ++i) s[i] = tanh(load<Vec>(scores + i * kLanes) * scale) * cap;
  } else {
    const Vec scale = splat(row.logit_scale * kLog2E);
    for (int i = 0; i < kTileVecs; ++i) s[i] = load<Vec>(scores + i * kLanes) * scale;
  }
  if (call.alibi) {
    float distances[kTileTokens];
    key_distances(call.keys, row, tile, distances);
    const Vec slope = splat(row.alibi_slope * -kLog2E);
    for (int i = 0; i < kTileVecs; ++i) s[i] = multiply_add(slope, load<Vec>(distances + i * kLanes), s[i]);
  }
  const Vec nothing = splat(-__builtin_inff());
  if (visible != ~uint64_t{0}) {
    for (int i = 0; i < kTileVecs; ++i) {
      s[i] = select(lanes_of_bits(static_cast<uint32_t>(visible >> (i * kLanes))), s[i], nothing);
    }
  }
  Vec most = nothing;
  for (int i = 0; i < kTileVecs; ++i) most = max_or_second(s[i], most);  // passes over NaN
  const float old_max = call.states.max[r];
  const float tile_max = max_of_lanes(most);
  const float new_max = tile_max > old_max ? tile_max : old_max;
  const Vec base = splat(new_max == -__builtin_inff() ? 0.0f : new_max);
  for (int i = 0; i < kTileVecs; ++i) s[i] = exp2_nonpositive(s[i] - base);
  const Vec value_scale = splat(row.value_scale);
  for (int i = 0; i < kTileVecs; ++i) store(scores + i * kLanes, s[i] * value_scale);
  for (int width = kTileVecs / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) s[i] += s[i + width];
  }
  const float rescale = new_max == old_max ? 1.0f : exp2_nonpositive(old_max - new_max);
  const float sum = call.states.sum[r] * rescale + sum_of_lanes(s[0]);
  call.states.sum[r] = sum;
  call.states.max[r] = sum != sum ? sum : new_max;  // all visible scores NaN: the state must not look empty
  return rescale;
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
