#pragma once

#include "kernels/cpu/avx2/producer.hpp"
#include "kernels/cpu/common/gemm.hpp"

/// GEMM0 and GEMM1 of the AVX2 kernel; common/gemm.hpp says in which order they add. Blocks of GEMM0 are eight scores,
/// those of GEMM1 eight sums, which is what 16 registers hold beside a line of K or V.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// Work tiles of up to so many rows upcast K and V in the loops that multiply them; more rows share upcast copies. The
/// upcast of e4m3 wants most registers, so that only the smallest blocks go with it.
template <DType kType>
inline constexpr int32_t kMostDirectRows = is_byte_type(kType) ? 2 : kMaxDirectRows;

/// Row r of Q, in the order of load_line.
FOLIO_INLINE float* reordered_row(const WorkTileParams& work, int32_t r) {
  return work.scratch.reordered_q + r * work.scratch.reordered_stride;
}

/// Reorders Q as load_line orders components, with zeros for padding.
template <DType kType>
static void reorder_q(const WorkTileParams& work) {
  constexpr int kDims = kLineDims<kType>;
  for (int32_t r = 0; r < padded_rows(work.num_rows); ++r) {
    const float* const q = work.scratch.q + r * work.qk_stride;
    float* const ordered = reordered_row(work, r);
    for (int32_t first = 0; first < work.head_dim_qk; first += kDims) {
      for (int32_t i = 0; i < kDims; ++i) {
        const int32_t d = first + line_component<kType>(i);
        ordered[first + i] = d < work.head_dim_qk ? q[d] : 0.0f;
      }
    }
  }
}

/// The sums of a block of GEMM0: kRows rows and kScoreTokens tokens.
template <int kRows>
struct ScoreBlock {
  static constexpr int kTokens = kScoreTokens<kRows>;
  Vec sums[kRows][kTokens] = {};

  /// Multiply-adds kVecs registers of tokens [first, first + kCount) with those of every row.
  template <int kCount, int kVecs>
  FOLIO_INLINE_MEMBER void fma(const float* q, int32_t stride, int first, const Vec (*keys)[kVecs]) {
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) {
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) {
        const Vec row = in_register(load<Vec>(q + i * stride + c * kLanes));
#pragma GCC unroll 8
        for (int j = 0; j < kCount; ++j) sums[i][first + j] = multiply_add(row, keys[j][c], sums[i][first + j]);
      }
    }
  }
};

/// The sums of kLanes tokens and kRows rows, which are then reduced row by row: a row's scores are one register, and
/// reductions do not wait for the multiply-adds before them.
template <int kRows>
struct ScoreSums {
  Vec sums[kRows][kLanes];

  /// Takes the sums of tokens [first, first + kScoreTokens<kRows>).
  FOLIO_INLINE_MEMBER void put(int first, const ScoreBlock<kRows>& block) {
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < kScoreTokens<kRows>; ++j) sums[i][register_of_score(first + j)] = block.sums[i][j];
    }
  }
  /// scores[i * kTileTokens + j] is row i's with token j.
  FOLIO_INLINE_MEMBER void store_scores(float* scores) const {
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) store(scores + i * kTileTokens, sum_lanes(sums[i]));
  }
};

/// Rows [r, r + kRows) with every token of a KV tile; K is upcast on load.
template <DType kType, int kRows>
static void qk_block_from_cache(const WorkTileParams& work, int32_t r, const unsigned char* const* k_rows,
                                const Prefetch& prefetch) {
  constexpr int kTokens = kScoreTokens<kRows>;
  constexpr int kVecs = kLineVecs<kType>;
  constexpr int kStep = kRows == 1 ? 1 : 2;  // tokens in registers together
  const int32_t lines = work.head_dim_qk / kLineDims<kType>;
  const int32_t rest = work.head_dim_qk % kLineDims<kType>;
  const int32_t stride = work.scratch.reordered_stride;
  const float* const q = reordered_row(work, r);
  for (int32_t group = 0; group < kTileTokens; group += kLanes) {
    ScoreSums<kRows> scores;
#pragma GCC unroll 1
    for (int32_t t = group; t < group + kLanes; t += kTokens) {
      for (int j = 0; j < kTokens; ++j) prefetch.issue(t + j);
      ScoreBlock<kRows> block;
      const auto add_line = [&]<bool kPart>(int32_t line) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int first = 0; first < kTokens; first += kStep) {
          Vec keys[kStep][kVecs];
#pragma GCC unroll 2
          for (int j = 0; j < kStep; ++j) {
            load_line<kType, kPart>(k_rows[t + first + j] + line * kLineBytes<kType>, rest, keys[j]);
          }
          block.template fma<kStep, kVecs>(q + line * kLineDims<kType>, stride, first, keys);
        }
      };
      for (int32_t line = 0; line < lines; ++line) add_line.template operator()<false>(line);
      if (rest != 0) add_line.template operator()<true>(lines);
      scores.put(t - group, block);
    }
    scores.store_scores(work.scratch.p + r * kTileTokens + group);
  }
}

/// Rows [r, r + kRows) with kLanes upcast keys in scratch memory, of `dim` components: scores of tokens [t, t +
/// kLanes).
template <int kRows>
FOLIO_INLINE void qk_block_from_upcast(const WorkTileParams& work, int32_t r, int32_t dim, int32_t t) {
  constexpr int kTokens = kScoreTokens<kRows>;
  const int32_t stride = work.scratch.reordered_stride;
  ScoreSums<kRows> scores;
#pragma GCC unroll 1
  for (int32_t first = 0; first < kLanes; first += kTokens) {
    const float* const k = work.scratch.k + first * stride;
    ScoreBlock<kRows> block;
    for (int32_t d = 0; d < dim; d += kLanes) {
      Vec keys[kTokens][1];
#pragma GCC unroll 8
      for (int j = 0; j < kTokens; ++j) keys[j][0] = load<Vec>(k + j * stride + d);
      block.template fma<kTokens, 1>(reordered_row(work, r) + d, stride, 0, keys);
    }
    scores.put(first, block);
  }
  scores.store_scores(work.scratch.p + r * kTileTokens + t);
}

/// All rows with every token of a KV tile; K is upcast once for all rows, eight keys at a time.
template <DType kType>
static void qk_from_upcast(const WorkTileParams& work, const unsigned char* const* k_rows, const Prefetch& prefetch) {
  constexpr int kDims = kLineDims<kType>;
  const int32_t stride = work.scratch.reordered_stride;
  const int32_t dim = (work.head_dim_qk + kDims - 1) / kDims * kDims;
  for (int32_t t = 0; t < kTileTokens; t += kLanes) {
    for (int32_t j = 0; j < kLanes; ++j) {
      prefetch.issue(t + j);
      float* const k = work.scratch.k + j * stride;
      for (int32_t d = 0; d < dim; d += kDims) {
        Vec vecs[kLineVecs<kType>];
        const unsigned char* const from = k_rows[t + j] + d * element_bytes(kType);
        if (work.head_dim_qk - d >= kDims) {
          load_line<kType, false>(from, kDims, vecs);
        } else {
          load_line<kType, true>(from, work.head_dim_qk - d, vecs);
        }
#pragma GCC unroll 4
        for (int c = 0; c < kLineVecs<kType>; ++c) store(k + d + c * kLanes, vecs[c]);
      }
    }
    int32_t r = 0;
    for (; work.num_rows - r > 2; r += 4) qk_block_from_upcast<4>(work, r, dim, t);
    if (work.num_rows - r == 2) qk_block_from_upcast<2>(work, r, dim, t);
    if (work.num_rows - r == 1) qk_block_from_upcast<1>(work, r, dim, t);
  }
}

/// GEMM0 of a KV tile: S into scratch.p.
template <DType kType>
FOLIO_INLINE void gemm_qk(const WorkTileParams& work, const unsigned char* const* k, const Prefetch& prefetch) {
  if (work.num_rows > kMostDirectRows<kType>) return qk_from_upcast<kType>(work, k, prefetch);
  int32_t r = 0;
  Prefetch once = prefetch;
  if constexpr (!is_byte_type(kType)) {
    for (; work.num_rows - r > 2; r += 4, once = {}) qk_block_from_cache<kType, 4>(work, r, k, once);
  }
  if (work.num_rows - r == 2) qk_block_from_cache<kType, 2>(work, r, k, once);
  if (work.num_rows - r == 1) qk_block_from_cache<kType, 1>(work, r, k, once);
}

/// The prefetches of one block of GEMM1: steps [next, end), a few before every kGroup tokens. The loop over tokens has
/// no room for them.
struct BlockPrefetch {
  static constexpr int32_t kGroup = 8;
  const Prefetch& prefetch;
  int32_t next;
  int32_t end;

  FOLIO_INLINE_MEMBER int32_t per_group() const {
    constexpr int32_t kGroups = kTileTokens / kGroup;
    return (end - next + kGroups - 1) / kGroups;
  }
  FOLIO_INLINE_MEMBER void issue(int32_t per_group) {
    for (int32_t i = 0; i < per_group && next < end; ++i) prefetch.issue(next++);
  }
};

/// One block of GEMM1 straight from the cache: kLines lines from component d on. With kPart: the only line is a part.
template <DType kType, bool kPairs, int kRows, int kLines, bool kPart>
FOLIO_INLINE void pv_block_from_cache(const WorkTileParams& work, int32_t r, const unsigned char* const* v_rows,
                                      int32_t d, TokenSpan span, BlockPrefetch prefetch) {
  constexpr int32_t kGroup = BlockPrefetch::kGroup;
  constexpr int kVecs = kLineVecs<kType>;
  const int32_t per_group = prefetch.per_group();
  const int32_t count = work.head_dim_v - d;
  const int64_t offset = d * element_bytes(kType);
  const float* const p = work.scratch.p + r * kTileTokens;
  PvAccumulator<kRows, kLines * kVecs> block;
  if constexpr (kPairs) {
    for (int32_t t = span.begin & ~1; t < span.end;) {
      prefetch.issue(per_group);
      for (const int32_t stop = smaller(span.end, t + kGroup); t < stop; t += 2) {
        const unsigned char* const row = in_register(v_rows[t / 2] + 2 * offset);
#pragma GCC unroll 4
        for (int i = 0; i < kLines; ++i) {
          Vec even[kVecs];
          Vec odd[kVecs];
          load_line_of_pairs<kType, kPart>(row + 2 * i * kLineBytes<kType>, count, even, odd);
          block.template fma<kVecs>(p + t, even, i * kVecs);
          block.template fma<kVecs>(p + t + 1, odd, i * kVecs);
        }
      }
    }
  } else {
    for (int32_t t = span.begin; t < span.end;) {
      prefetch.issue(per_group);
      for (const int32_t stop = smaller(span.end, t + kGroup); t < stop; ++t) {
        const unsigned char* const row = in_register(v_rows[t] + offset);
#pragma GCC unroll 4
        for (int i = 0; i < kLines; ++i) {
          Vec values[kVecs];
          load_line<kType, kPart>(row + i * kLineBytes<kType>, count, values);
          block.template fma<kVecs>(p + t, values, i * kVecs);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int line = 0; line < kLines; ++line) put_in_order<kType, kPairs>(block.acc_regs[i] + line * kVecs);
  }
  const int32_t vecs = kPart ? (work.v_stride - d) / kLanes : kLines * kVecs;
  block.add_to_acc(work.state.acc + r * work.v_stride + d, work.v_stride, work.scratch.rescale + r, vecs);
}

/// Components [d, head_dim_v), in blocks of kLines lines, then smaller ones. They share `prefetch` by components.
template <DType kType, bool kPairs, int kRows, int kLines>
FOLIO_INLINE void pv_blocks_from_cache(const WorkTileParams& work, int32_t r, const unsigned char* const* v_rows,
                                       int32_t d, TokenSpan span, const Prefetch& prefetch) {
  constexpr int32_t kDims = kLineDims<kType>;
  const int32_t dim = work.head_dim_v;
  const auto share = [&](int32_t at) __attribute__((always_inline)) {
    return BlockPrefetch{prefetch, kTileTokens * at / dim, kTileTokens * smaller(at + kLines * kDims, dim) / dim};
  };
  for (; d + kLines * kDims <= dim; d += kLines * kDims) {
    pv_block_from_cache<kType, kPairs, kRows, kLines, false>(work, r, v_rows, d, span, share(d));
  }
  if constexpr (kLines > 1) {
    pv_blocks_from_cache<kType, kPairs, kRows, kLines / 2>(work, r, v_rows, d, span, prefetch);
  } else if (d < dim) {
    pv_block_from_cache<kType, kPairs, kRows, 1, true>(work, r, v_rows, d, span, share(d));
  }
}

/// Rows [r, r + kRows) straight from the cache: for KV tiles of which exactly the tokens of `span` are visible to every
/// row.
template <DType kType, bool kPairs, int kRows>
static void pv_rows_from_cache(const WorkTileParams& work, int32_t r, const unsigned char* const* v_rows,
                               TokenSpan span, const Prefetch& prefetch) {
  constexpr int kSums = kRows * kLineVecs<kType>;
  pv_blocks_from_cache<kType, kPairs, kRows, kSums >= 8 ? 1 : 8 / kSums>(work, r, v_rows, 0, span, prefetch);
}

template <DType kType, bool kPairs>
FOLIO_INLINE void pv_from_cache(const WorkTileParams& work, const LocatedTile& located, const Prefetch& prefetch) {
  const unsigned char* const* const v = located.rows.v;
  const TokenSpan span{located.tile.begin, located.tile.end};
  int32_t r = 0;
  Prefetch once = prefetch;
  if constexpr (!is_byte_type(kType)) {
    for (; work.num_rows - r >= 4; r += 4, once = {}) pv_rows_from_cache<kType, kPairs, 4>(work, r, v, span, once);
    if (work.num_rows - r == 3) pv_rows_from_cache<kType, kPairs, 3>(work, r, v, span, once);
  }
  if (work.num_rows - r == 2) pv_rows_from_cache<kType, kPairs, 2>(work, r, v, span, once);
  if (work.num_rows - r == 1) pv_rows_from_cache<kType, kPairs, 1>(work, r, v, span, once);
}

/// Upcasts components [begin, end) of the tokens of `span`, in order; `stride` floats from a token to the next, of
/// which those beyond the components become zeros.
template <DType kType, bool kPairs>
static void upcast_v(const unsigned char* const* v_rows, int32_t begin, int32_t end, TokenSpan span, float* to,
                     int32_t stride, BlockPrefetch prefetch) {
  constexpr int32_t kDims = kLineDims<kType>;
  constexpr int kVecs = kLineVecs<kType>;
  const int32_t per_group = prefetch.per_group();
  const int32_t whole = begin + (end - begin) / kDims * kDims;
  const auto add_line = [&]<bool kPart>(int32_t t, int32_t d) __attribute__((always_inline)) {
    const int64_t offset = d * element_bytes(kType);
    Vec first[kVecs];
    Vec second[kVecs];
    if constexpr (kPairs) {
      load_line_of_pairs<kType, kPart>(v_rows[t / 2] + 2 * offset, end - d, first, second);
    } else {
      load_line<kType, kPart>(v_rows[t] + offset, end - d, first);
      load_line<kType, kPart>(v_rows[t + 1] + offset, end - d, second);
    }
    put_in_order<kType, kPairs>(first);
    put_in_order<kType, kPairs>(second);
    float* const at = to + t * stride + (d - begin);
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) {
      if (kPart && d - begin + c * kLanes >= stride) break;
      store(at + c * kLanes, first[c]);
      store(at + stride + c * kLanes, second[c]);
    }
  };
  for (int32_t t = span.begin & ~1; t < span.end; t += 2) {
    if (t % BlockPrefetch::kGroup == 0) prefetch.issue(per_group);
    for (int32_t d = begin; d < whole; d += kDims) add_line.template operator()<false>(t, d);
    if (whole < end) add_line.template operator()<true>(t, whole);
  }
}

/// Rows of a KV tile of which exactly the same tokens are visible to every row, from V that is upcast a few components
/// at a time: the copy stays in L1.
template <DType kType, bool kPairs>
static void pv_by_components(const WorkTileParams& work, const LocatedTile& located, const Prefetch& prefetch) {
  constexpr int32_t kDims = 64;
  const int32_t parts = (work.head_dim_v + kDims - 1) / kDims;
  const int32_t stride = smaller(kDims, work.v_stride);
  for (int32_t part = 0; part < parts; ++part) {
    const int32_t begin = part * kDims;
    const UpcastV v{work.scratch.v, stride, begin, smaller(begin + kDims, work.v_stride)};
    upcast_v<kType, kPairs>(located.rows.v, begin, smaller(begin + kDims, work.head_dim_v),
                            {located.tile.begin, located.tile.end}, work.scratch.v, stride,
                            {prefetch, kTileTokens * part / parts, kTileTokens * (part + 1) / parts});
    int32_t r = 0;
    for (; r + 4 <= work.num_rows; r += 4) pv_rows_from_upcast<4, 2>(work, v, located.visible, r);
    for (; r + 2 <= work.num_rows; r += 2) pv_rows_from_upcast<2, 4>(work, v, located.visible, r);
    for (; r < work.num_rows; ++r) pv_rows_from_upcast<1, 8>(work, v, located.visible, r);
  }
}

/// Rows of any masks, from V that is upcast as a whole.
template <DType kType, bool kPairs>
static void pv_masked(const WorkTileParams& work, const LocatedTile& located, const Prefetch& prefetch) {
  upcast_v<kType, kPairs>(located.rows.v, 0, work.head_dim_v, {0, kTileTokens}, work.scratch.v, work.v_stride,
                          {prefetch, 0, kTileTokens});
  int32_t r = 0;
  if (has_non_finite_v(work)) {
    for (; r < work.num_rows; ++r) pv_row_visible_only(work, located.visible[r], r);
  }
  const UpcastV v{work.scratch.v, work.v_stride, 0, work.v_stride};
  for (; r + 4 <= work.num_rows; r += 4) pv_rows_from_upcast<4, 2>(work, v, located.visible, r);
  for (; r < work.num_rows; ++r) pv_rows_from_upcast<1, 4>(work, v, located.visible, r);
}

/// GEMM1 of a KV tile: O = O * rescale + P V.
template <DType kType, bool kPairs>
FOLIO_INLINE void gemm_pv(const WorkTileParams& work, const LocatedTile& located, const Prefetch& prefetch) {
  if (!located.uniform) return pv_masked<kType, kPairs>(work, located, prefetch);
  if (work.num_rows > kMostDirectRows<kType>) return pv_by_components<kType, kPairs>(work, located, prefetch);
  pv_from_cache<kType, kPairs>(work, located, prefetch);
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
