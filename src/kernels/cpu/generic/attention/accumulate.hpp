#pragma once

#include "kernels/cpu/common/attention/softmax.hpp"
#include "kernels/cpu/common/attention/special_values.hpp"
#include "kernels/cpu/generic/attention/scores.hpp"
#include "kernels/cpu/generic/attention/values.hpp"

/// One item, tile by tile. Few rows (decoding) read keys and values straight from the cache; many rows (prefill) share
/// conversions to floats. Both do the same arithmetic in the same order.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

inline constexpr int32_t kFewRows = 8;

template <DType kType>
static void convert_values(const ItemCall& call, const ReadyTile& ready, const Stream& ahead) {
  float* const v = call.scratch.v;
  for (int32_t t = 0; t < kTileTokens; ++t) {
    ahead.request(t, 0, 1);
    if (!call.keys.packed_v) {
      convert_row<kType>(ready.rows.v[t], call.head_dim_v, v + t * call.v_stride);
    } else if constexpr (kType != DType::kFloat32) {
      float* const row = v + t * call.v_stride;
      if (t % 2 == 0) {
        convert_row_of_pairs<kType, 0>(ready.rows.v[t / 2], call.head_dim_v, row);
      } else {
        convert_row_of_pairs<kType, 1>(ready.rows.v[t / 2], call.head_dim_v, row);
      }
    }
  }
}

template <DType kType>
FOLIO_INLINE void make_scores(const ItemCall& call, const ReadyTile& ready, const Stream& ahead) {
  const unsigned char* const* const k = ready.rows.k;
  if (call.num_rows > kFewRows || call.rope != nullptr) return scores_by_fours<kType>(call, ready.tile.first, k, ahead);
  int32_t r = 0;
  Stream once = ahead;
  for (; call.num_rows - r > 2; r += 4, once = {}) scores_from_stored<kType, 4>(call, r, k, once);
  if (call.num_rows - r == 2) scores_from_stored<kType, 2>(call, r, k, once);
  if (call.num_rows - r == 1) scores_from_stored<kType, 1>(call, r, k, once);
}

template <DType kType, bool kPairs>
FOLIO_INLINE void add_values_from_stored(const ItemCall& call, const ReadyTile& ready, const Stream& ahead) {
  const unsigned char* const* const v = ready.rows.v;
  const TokenSpan span{ready.tile.begin, ready.tile.end};
  int32_t r = 0;
  Stream once = ahead;
  for (; call.num_rows - r >= 4; r += 4, once = {}) values_from_stored<kType, kPairs, 4>(call, r, v, span, once);
  if (call.num_rows - r == 3) values_from_stored<kType, kPairs, 3>(call, r, v, span, once);
  if (call.num_rows - r == 2) values_from_stored<kType, kPairs, 2>(call, r, v, span, once);
  if (call.num_rows - r == 1) values_from_stored<kType, kPairs, 1>(call, r, v, span, once);
}

template <DType kType>
FOLIO_INLINE void add_values(const ItemCall& call, const ReadyTile& ready, const Stream& ahead) {
  if (call.num_rows <= kFewRows && ready.uniform) {
    if (!call.keys.packed_v) {
      add_values_from_stored<kType, false>(call, ready, ahead);
    } else if constexpr (kType != DType::kFloat32) {
      add_values_from_stored<kType, true>(call, ready, ahead);
    }
    return;
  }
  convert_values<kType>(call, ready, ahead);
  int32_t r = 0;
  if (!ready.uniform && has_special_values(call)) {
    for (; r < call.num_rows; ++r) value_row_careful(call, ready.visible[r], r);
  }
  for (; r + 4 <= call.num_rows; r += 4) value_rows<4>(call, ready.visible, r);
  for (; r < call.num_rows; ++r) value_rows<1>(call, ready.visible, r);
}

template <DType kType>
static void accumulate_as(const ItemCall& call) {
  const ItemKeys& keys = call.keys;
  const ItemScratch& scratch = call.scratch;
  ReadyTile ready[2];
  for (int i = 0; i < 2; ++i) {
    const unsigned char** const rows = scratch.rows + 2 * i * kTileTokens;
    ready[i].rows = {rows, rows + kTileTokens, scratch.pairs + 8 * i * call.v_stride};
    ready[i].visible = scratch.visible + i * padded_rows(call.num_rows);
  }
  const auto k_bytes = static_cast<int32_t>(call.head_dim_qk * element_bytes(kType));
  const auto v_bytes = static_cast<int32_t>(call.head_dim_v * element_bytes(kType));
  const bool v_is_k = keys.v >= keys.k && keys.v < keys.k + k_bytes;
  bool more = find_tile(call, keys.kv_begin / kTileTokens * kTileTokens, ready[0]);
  for (int current = 0; more; current ^= 1) {
    const ReadyTile& now = ready[current];
    ReadyTile& next = ready[current ^ 1];
    more = find_tile(call, now.tile.first + kTileTokens, next);
    make_scores<kType>(call, now, {v_is_k ? nullptr : now.rows.v, v_bytes, keys.packed_v});
    for (int32_t r = 0; r < call.num_rows; ++r) {
      float* const p = scratch.p + r * kTileTokens;
      if (now.visible[r] != 0) {
        scratch.rescale[r] = softmax_row(call, now.tile, r, now.visible[r], p);
      } else {
        scratch.rescale[r] = 1.0f;
        __builtin_memset(p, 0, kTileTokens * sizeof(float));
      }
    }
    add_values<kType>(call, now, {more ? next.rows.k : nullptr, k_bytes, false});
  }
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
