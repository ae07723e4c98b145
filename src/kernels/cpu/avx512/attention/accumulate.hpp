#pragma once

#include "kernels/cpu/avx512/attention/scores.hpp"
#include "kernels/cpu/avx512/attention/values.hpp"
#include "kernels/cpu/common/attention/softmax.hpp"
#include "kernels/cpu/common/attention/special_values.hpp"

/// One item, tile by tile. Few rows (decoding) read keys and values straight from the cache; many rows (prefill) share
/// conversions to floats. Both do the same arithmetic in the same order.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

template <DType kType, bool kPairs>
FOLIO_INLINE void add_stored_values(const ItemCall& call, const ReadyTile& ready, Stream ahead) {
  const unsigned char* const* const v = ready.rows.v;
  const TokenSpan span{ready.tile.begin, ready.tile.end};
  if (call.num_rows == 8) return values_from_stored<kType, kPairs, 8>(call, 0, v, span, ahead);
  int32_t r = 0;
  for (; call.num_rows - r >= 4; r += 4, ahead = {}) values_from_stored<kType, kPairs, 4>(call, r, v, span, ahead);
  for (; call.num_rows - r >= 2; r += 2, ahead = {}) values_from_stored<kType, kPairs, 2>(call, r, v, span, ahead);
  if (r < call.num_rows) values_from_stored<kType, kPairs, 1>(call, r, v, span, ahead);
}

template <DType kType>
FOLIO_INLINE void add_values(const ItemCall& call, const ReadyTile& ready, const Stream& ahead) {
  if (call.num_rows <= kFewRows && ready.uniform) {
    if (!call.keys.packed_v) {
      add_stored_values<kType, false>(call, ready, ahead);
    } else if constexpr (kType != DType::kFloat32) {
      add_stored_values<kType, true>(call, ready, ahead);
    }
    return;
  }
  convert_values<kType>(call, ready.rows.v, ahead);
  int32_t r = 0;
  if (!ready.uniform && has_special_values(call)) {
    for (; r < call.num_rows; ++r) value_row_careful(call, ready.visible[r], r);
  }
  for (; r + 4 <= call.num_rows; r += 4) values_from_converted<4>(call, ready.visible, r);
  for (; r < call.num_rows; ++r) values_from_converted<1>(call, ready.visible, r);
}

template <DType kType, bool kDot>
static void accumulate_as(const ItemCall& call) {
  const ItemKeys& keys = call.keys;
  const ItemScratch& scratch = call.scratch;
  order_queries<kType, kDot>(call);
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
    make_scores<kType, kDot>(call, now.rows.k,
                             {v_is_k ? nullptr : now.rows.v, 0, v_bytes, keys.packed_v ? v_bytes : 0});
    for (int32_t r = 0; r < call.num_rows; ++r) {
      float* const p = scratch.p + r * kTileTokens;
      if (now.visible[r] != 0) {
        scratch.rescale[r] = softmax_row(call, now.tile, r, now.visible[r], p);
      } else {
        scratch.rescale[r] = 1.0f;
        __builtin_memset(p, 0, kTileTokens * sizeof(float));
      }
    }
    add_values<kType>(call, now, {more ? next.rows.k : nullptr, 0, k_bytes, 0});
  }
}

/// Chooses the products: of floats, or of pairs of bfloat16 where the instruction set has them and both sides are
/// bfloat16 without rounding.
template <DType kType>
FOLIO_INLINE void accumulate_type(const ItemCall& call) {
#if defined(__AVX512BF16__)
  if constexpr (kType == DType::kBFloat16 || is_fp8_type(kType)) {
    if (call.q_dtype == DType::kBFloat16 || is_fp8_type(call.q_dtype)) return accumulate_as<kType, true>(call);
  }
#endif
  accumulate_as<kType, false>(call);
}

static void accumulate(const ItemCall& call) noexcept {
  switch (call.keys.dtype) {
    case DType::kFloat32: accumulate_type<DType::kFloat32>(call); break;
    case DType::kFloat16: accumulate_type<DType::kFloat16>(call); break;
    case DType::kBFloat16: accumulate_type<DType::kBFloat16>(call); break;
    case DType::kFloat8E4M3: accumulate_type<DType::kFloat8E4M3>(call); break;
    case DType::kFloat8E5M2: accumulate_type<DType::kFloat8E5M2>(call); break;
    case DType::kFloat4E2M1x2:
    case DType::kUnset: break;
  }
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
