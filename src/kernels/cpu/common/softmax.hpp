#pragma once

#include "kernels/cpu/common/mask.hpp"
#include "kernels/cpu/common/token_scales.hpp"

/// Online softmax: P of one row and one KV tile, and the row's running maximum and sum; the combination of two states.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

inline constexpr int kTileVecs = kTileTokens / kLanes;

/// |query position - key position| of every token of a KV tile: ALiBi's distances.
FOLIO_INLINE void key_distances(const KvOperand& kv, const QueryRow& row, const KvTile& tile, float* distances) {
  for (int32_t t = 0; t < kTileTokens; ++t) {
    const int64_t distance = row.position - key_position(kv, int64_t{tile.first} + t);
    distances[t] = static_cast<float>(distance < 0 ? -distance : distance);
  }
}

/// S becomes P, in place: scores[kTileTokens] = exp2(logit - row_max) * value_scale, 0 for masked tokens. Updates
/// row_max and row_sum. Returns the factor by which the row's acc must be rescaled.
static inline float softmax_row(const WorkTileParams& work, const KvTile& tile, int32_t r, uint64_t visible,
                                float* scores) {
  const QueryRow& row = work.rows[r];
  Vec s[kTileVecs];
  if (work.soft_cap != 0.0f) {
    const Vec scale = splat(row.logit_scale / work.soft_cap);
    const Vec cap = splat(work.soft_cap * kLog2E);
    for (int i = 0; i < kTileVecs; ++i) s[i] = tanh(load<Vec>(scores + i * kLanes) * scale) * cap;
  } else {
    const Vec scale = splat(row.logit_scale * kLog2E);
    for (int i = 0; i < kTileVecs; ++i) s[i] = load<Vec>(scores + i * kLanes) * scale;
  }
  if (work.alibi) {
    float distances[kTileTokens];
    key_distances(work.kv, row, tile, distances);
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
  for (int i = 0; i < kTileVecs; ++i) most = max_or_second(s[i], most);  // ignores NaN
  const float old_max = work.state.row_max[r];
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
  const float sum = work.state.row_sum[r] * rescale + sum_of_lanes(s[0]);
  work.state.row_sum[r] = sum;
  work.state.row_max[r] = sum != sum ? sum : new_max;  // all visible scores NaN: the state must not look empty
  return rescale;
}

/// softmax_row for every row of a KV tile; a row that sees none of it gets P = 0. Sets scratch.rescale. `scales`: the
/// GEMMs take stored keys and values without them.
FOLIO_INLINE void softmax_rows(const WorkTileParams& work, const KvTile& tile, const uint64_t* visible,
                               const TileScales& scales = {}) {
  for (int32_t r = 0; r < work.num_rows; ++r) {
    float* const p = work.scratch.p + r * kTileTokens;
    if (visible[r] != 0) {
      if (scales.k != nullptr) scale_scores(scales, p);
      work.scratch.rescale[r] = softmax_row(work, tile, r, visible[r], p);
      if (scales.v != nullptr) scale_p(scales, visible[r], p);
    } else {
      work.scratch.rescale[r] = 1.0f;
      __builtin_memset(p, 0, kTileTokens * sizeof(float));
    }
  }
}

/// Collective::combine_states.
static void combine_states(float* row_max, float* row_sum, float* acc, float other_max, float other_sum,
                           const float* other_acc, int32_t n) noexcept {
  if (other_max == -__builtin_inff()) return;
  if (*row_max == -__builtin_inff()) {
    *row_max = other_max;
    *row_sum = other_sum;
    __builtin_memcpy(acc, other_acc, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  const float new_max = *row_max > other_max ? *row_max : other_max;
  const float scale = exp2_nonpositive(*row_max - new_max);
  const float other_scale = exp2_nonpositive(other_max - new_max);
  for (int32_t d = 0; d < n; d += 4) {
    store(acc + d, load<Quad>(acc + d) * scale + load<Quad>(other_acc + d) * other_scale);
  }
  *row_sum = *row_sum * scale + other_sum * other_scale;
  *row_max = *row_sum != *row_sum ? *row_sum : new_max;
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
