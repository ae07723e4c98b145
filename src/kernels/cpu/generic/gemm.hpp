#pragma once

#include "kernels/cpu/common/gemm.hpp"
#include "kernels/cpu/generic/producer.hpp"

/// GEMM0 and GEMM1 of the portable kernel; common/gemm.hpp says in which order they add.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// One block of GEMM0. key(token, d) gives kLanes components of a key from d on, upcast; `dim` is the padded dimension.
/// scores[i * kTileTokens + j] is row i's with token j.
template <int kRows, typename Key>
FOLIO_INLINE void qk_block(const float* q, int32_t q_stride, int32_t dim, Key key, float* scores) {
  constexpr int kTokens = kScoreTokens<kRows>;
  constexpr int kMostStep = kBlockScores > kLanes ? 8 : 4;
  constexpr int kStep = kTokens < kMostStep ? kTokens : kMostStep;  // tokens in registers together
  Vec acc_regs[kBlockScores];
#pragma GCC unroll 16
  for (int first = 0; first < kTokens; first += kStep) {
    Vec part[kRows][kStep] = {};
    for (int32_t d = 0; d < dim; d += kLanes) {
      Vec rows[kRows];
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) rows[i] = load<Vec>(q + i * q_stride + d);
#pragma GCC unroll 8
      for (int j = 0; j < kStep; ++j) {
        const Vec token = key(first + j, d);
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) part[i][j] = multiply_add(rows[i], token, part[i][j]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < kStep; ++j) {
        acc_regs[register_of_score(i * kTokens + first + j)] = part[i][j];
      }
    }
  }
  if constexpr (kBlockScores == kLanes) {
    const Vec block = sum_lanes(acc_regs);
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      __builtin_memcpy(scores + i * kTileTokens, reinterpret_cast<const char*>(&block) + i * kTokens * 4, kTokens * 4);
    }
  } else {
#pragma GCC unroll 4
    for (int first = 0; first < kBlockScores; first += kLanes) {
      store(scores + first / kTokens * kTileTokens + first % kTokens, sum_lanes(acc_regs + first));
    }
  }
}

/// Rows [r, r + kRows) with every token of a KV tile; K is upcast on load.
template <DType kType, int kRows>
__attribute__((noinline)) static void qk_block_from_cache(const WorkTileParams& work, int32_t r,
                                                          const unsigned char* const* k_rows,
                                                          const Prefetch& prefetch) {
  constexpr int kTokens = kScoreTokens<kRows>;
  const int32_t whole = work.head_dim_qk / kLanes * kLanes;
  const int32_t padded = (work.head_dim_qk + kLanes - 1) / kLanes * kLanes;
  for (int32_t t = 0; t < kTileTokens; t += kTokens) {
    for (int32_t j = 0; j < kTokens; ++j) prefetch.issue(t + j);
    const unsigned char* const* const rows = k_rows + t;
    const float* const q = work.scratch.q + r * work.qk_stride;
    float* const scores = work.scratch.p + r * kTileTokens + t;
    if (whole == padded) {
      qk_block<kRows>(
          q, work.qk_stride, padded,
          [&](int j, int32_t d)
              __attribute__((always_inline)) { return load_elements<kType>(rows[j] + d * element_bytes(kType)); },
          scores);
    } else {
      qk_block<kRows>(
          q, work.qk_stride, padded,
          [&](int j, int32_t d) __attribute__((always_inline)) {
            const unsigned char* const at = rows[j] + d * element_bytes(kType);
            return d < whole ? load_elements<kType>(at) : load_some<kType>(at, work.head_dim_qk - d);
          },
          scores);
    }
  }
}

inline constexpr int kBlockRows = kBlockScores / 4;  ///< rows of a block of 4 tokens

/// All rows with every token of the KV tile from local token `first` on. K is upcast, and rotated where there is a
/// rotary embedding, once for all rows, four keys at a time.
template <DType kType>
static void qk_from_upcast(const WorkTileParams& work, int32_t first, const unsigned char* const* k_rows,
                           const Prefetch& prefetch) {
  float* const k = work.scratch.k;
  const int32_t stride = work.qk_stride;
  for (int32_t t = 0; t < kTileTokens; t += 4) {
    for (int32_t j = 0; j < 4; ++j) {
      prefetch.issue(t + j);
      convert_row<kType>(k_rows[t + j], work.head_dim_qk, k + j * stride);
      if (work.rope != nullptr) rotate(work, key_position(work.kv, int64_t{first} + t + j), k + j * stride);
    }
    for (int32_t r = 0; r < work.num_rows; r += kBlockRows) {
      qk_block<kBlockRows>(
          work.scratch.q + r * stride, stride,
          stride, [&](int j, int32_t d) __attribute__((always_inline)) { return load<Vec>(k + j * stride + d); },
          work.scratch.p + r * kTileTokens + t);
    }
  }
}

/// One block of GEMM1 straight from the cache; V is upcast on load.
template <DType kType, bool kPairs, int kRows, int kVecs>
FOLIO_INLINE void pv_block_from_cache(const WorkTileParams& work, int32_t r, const unsigned char* const* v_rows,
                                      int32_t d, TokenSpan span, const Prefetch& prefetch) {
  constexpr int64_t kElement = element_bytes(kType);
  const int32_t count = work.head_dim_v - d;  // fewer than kVecs * kLanes only where kVecs is 1
  const float* const p = work.scratch.p + r * kTileTokens;
  float* const acc = work.state.acc + r * work.v_stride + d;
  PvAccumulator<kRows, kVecs> block;
  if constexpr (kPairs) {
    for (int32_t pair = span.begin / 2; pair < (span.end + 1) / 2; ++pair) {
      prefetch.issue(2 * pair);
      prefetch.issue(2 * pair + 1);
      const unsigned char* const row = v_rows[pair] + 2 * d * kElement;
      Vec even[kVecs];
      Vec odd[kVecs];
#pragma GCC unroll 8
      for (int c = 0; c < kVecs; ++c) {
        const unsigned char* const at = row + 2 * c * kLanes * kElement;
        const bool some = kVecs == 1 && count < kLanes;
        even[c] = some ? load_some_of_pairs<kType, 0>(at, count) : load_of_pairs<kType, 0>(at);
        odd[c] = some ? load_some_of_pairs<kType, 1>(at, count) : load_of_pairs<kType, 1>(at);
      }
      block.fma(p + 2 * pair, even);
      block.fma(p + 2 * pair + 1, odd);
    }
  } else {
    for (int32_t t = span.begin; t < span.end; ++t) {
      prefetch.issue(t);
      const unsigned char* const row = v_rows[t] + d * kElement;
      Vec values[kVecs];
#pragma GCC unroll 8
      for (int c = 0; c < kVecs; ++c) {
        const unsigned char* const at = row + c * kLanes * kElement;
        values[c] = kVecs == 1 && count < kLanes ? load_some<kType>(at, count) : load_elements<kType>(at);
      }
      block.fma(p + t, values);
    }
  }
  block.add_to_acc(acc, work.v_stride, work.scratch.rescale + r);
}

/// Components [d, head_dim_v), in blocks of kVecs registers, then smaller ones. Each issues its share of `prefetch`.
template <DType kType, bool kPairs, int kRows, int kVecs>
FOLIO_INLINE void pv_blocks_from_cache(const WorkTileParams& work, int32_t r, const unsigned char* const* v_rows,
                                       int32_t d, TokenSpan span, const Prefetch& prefetch) {
  const int32_t parts = (work.head_dim_v + kLanes - 1) / kLanes;
  for (; kVecs == 1 ? d < work.head_dim_v : d + kVecs * kLanes <= work.head_dim_v; d += kVecs * kLanes) {
    const Prefetch share = prefetch.part(d / kLanes, d / kLanes + kVecs, parts);
    pv_block_from_cache<kType, kPairs, kRows, kVecs>(work, r, v_rows, d, span, share);
  }
  if constexpr (kVecs > 1) pv_blocks_from_cache<kType, kPairs, kRows, kVecs / 2>(work, r, v_rows, d, span, prefetch);
}

/// Rows [r, r + kRows) straight from the cache: for KV tiles of which exactly the tokens of `span` are visible to every
/// row.
template <DType kType, bool kPairs, int kRows>
static void pv_rows_from_cache(const WorkTileParams& work, int32_t r, const unsigned char* const* v_rows,
                               TokenSpan span, const Prefetch& prefetch) {
  pv_blocks_from_cache<kType, kPairs, kRows, kValueVecs<kRows, kPairs>>(work, r, v_rows, 0, span, prefetch);
}

template <DType kType>
static void upcast_v(const WorkTileParams& work, const LocatedTile& located, const Prefetch& prefetch) {
  float* const v = work.scratch.v;
  for (int32_t t = 0; t < kTileTokens; ++t) {
    prefetch.issue(t);
    if (!work.kv.packed_v) {
      convert_row<kType>(located.rows.v[t], work.head_dim_v, v + t * work.v_stride);
    } else if constexpr (kType != DType::kFloat32) {
      float* const row = v + t * work.v_stride;
      if (t % 2 == 0) {
        convert_row_of_pairs<kType, 0>(located.rows.v[t / 2], work.head_dim_v, row);
      } else {
        convert_row_of_pairs<kType, 1>(located.rows.v[t / 2], work.head_dim_v, row);
      }
    }
  }
}

template <DType kType>
FOLIO_INLINE void gemm_qk(const WorkTileParams& work, const LocatedTile& located, const Prefetch& prefetch) {
  const unsigned char* const* const k = located.rows.k;
  if (work.num_rows > kMaxDirectRows || work.rope != nullptr)
    return qk_from_upcast<kType>(work, located.tile.first, k, prefetch);
  int32_t r = 0;
  Prefetch once = prefetch;
  for (; work.num_rows - r > 2; r += 4, once = {}) qk_block_from_cache<kType, 4>(work, r, k, once);
  if (work.num_rows - r == 2) qk_block_from_cache<kType, 2>(work, r, k, once);
  if (work.num_rows - r == 1) qk_block_from_cache<kType, 1>(work, r, k, once);
}

template <DType kType, bool kPairs>
FOLIO_INLINE void pv_from_cache(const WorkTileParams& work, const LocatedTile& located, const Prefetch& prefetch) {
  const unsigned char* const* const v = located.rows.v;
  const TokenSpan span{located.tile.begin, located.tile.end};
  int32_t r = 0;
  Prefetch once = prefetch;
  for (; work.num_rows - r >= 4; r += 4, once = {}) pv_rows_from_cache<kType, kPairs, 4>(work, r, v, span, once);
  if (work.num_rows - r == 3) pv_rows_from_cache<kType, kPairs, 3>(work, r, v, span, once);
  if (work.num_rows - r == 2) pv_rows_from_cache<kType, kPairs, 2>(work, r, v, span, once);
  if (work.num_rows - r == 1) pv_rows_from_cache<kType, kPairs, 1>(work, r, v, span, once);
}

template <DType kType>
FOLIO_INLINE void gemm_pv(const WorkTileParams& work, const LocatedTile& located, const Prefetch& prefetch) {
  if (work.num_rows <= kMaxDirectRows && located.uniform) {
    if (!work.kv.packed_v) {
      pv_from_cache<kType, false>(work, located, prefetch);
    } else if constexpr (kType != DType::kFloat32) {
      pv_from_cache<kType, true>(work, located, prefetch);
    }
    return;
  }
  upcast_v<kType>(work, located, prefetch);
  int32_t r = 0;
  if (kType != DType::kInt8 && !located.uniform && has_non_finite_v(work)) {
    for (; r < work.num_rows; ++r) pv_row_visible_only(work, located.visible[r], r);
  }
  const UpcastV v{work.scratch.v, work.v_stride, 0, work.v_stride};
  for (; r + 4 <= work.num_rows; r += 4) pv_rows_from_upcast<4>(work, v, located.visible, r);
  for (; r < work.num_rows; ++r) pv_rows_from_upcast<1>(work, v, located.visible, r);
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
