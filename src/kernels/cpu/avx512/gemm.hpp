#pragma once

#include "kernels/cpu/avx512/producer.hpp"

/// GEMM0 (S = Q K^T) and GEMM1 (O += P V).
///
/// A score is the sum over the registers of a key, in order, and then over the lanes, always by halves. GEMM1 adds up a
/// KV tile's tokens in order, each by a multiply-add, from 0; acc takes the tile's sum at once. A sum that took every
/// token one by one would drift over long contexts. Blocks of every shape do the same operations: a row's bits do not
/// depend on the rows beside it. A masked token has p = 0 and changes nothing, so that rows may share loops over more
/// than their own tokens.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// Work tiles of up to so many rows read K and V straight from the cache; more rows share upcast copies.
inline constexpr int32_t kMaxDirectRows = 8;

/// A block is 16 scores: their sums over lanes make one register.
inline constexpr int kBlockScores = 16;

/// Lane l of the result = the sum of the lanes of v[l]. Each step adds the halves of pairs of registers, then the
/// halves of those, and so on. Additions commute: a register's bits do not depend on its place.
FOLIO_INLINE __m512 reduce_lanes(const __m512* v) {
  __m512 eights[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m512 a = v[i + i / 4 * 4];
    const __m512 b = v[i + i / 4 * 4 + 4];
    eights[i] = _mm512_add_ps(_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4(a, b, _MM_SHUFFLE(1, 0, 3, 2)));
  }
  __m512 fours[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    fours[i] = _mm512_add_ps(_mm512_shuffle_f32x4(eights[i], eights[i + 4], _MM_SHUFFLE(2, 0, 2, 0)),
                             _mm512_shuffle_f32x4(eights[i], eights[i + 4], _MM_SHUFFLE(3, 1, 3, 1)));
  }
  __m512 twos[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m512d a = _mm512_castps_pd(fours[2 * i]);
    const __m512d b = _mm512_castps_pd(fours[2 * i + 1]);
    twos[i] = _mm512_castpd_ps(_mm512_mask_blend_pd(0xaa, a, b));
    twos[i] = _mm512_add_ps(twos[i], _mm512_castpd_ps(_mm512_shuffle_pd(a, b, 0x55)));
  }
  return _mm512_add_ps(_mm512_shuffle_ps(twos[0], twos[1], _MM_SHUFFLE(2, 0, 2, 0)),
                       _mm512_shuffle_ps(twos[0], twos[1], _MM_SHUFFLE(3, 1, 3, 1)));
}

/// sum + row * key, lane by lane; with kDot each lane adds the products of two bfloat16.
template <bool kDot>
FOLIO_INLINE __m512 multiply_add_lanes(__m512 sum, __m512i row, __m512i key) {
  if constexpr (kDot) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(row), reinterpret_cast<__m512bh>(key));
#endif
  } else {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(row), _mm512_castsi512_ps(key), sum);
  }
}

/// Multiply-adds kVecs registers of every token with those of every row; rows are `stride` bytes apart.
template <bool kDot, int kRows, int kVecs, typename Key>
FOLIO_INLINE void multiply_add_block(const unsigned char* rows, int64_t stride, Key key,
                                     __m512 (&acc_regs)[kBlockScores]) {
  constexpr int kTokens = kBlockScores / kRows;
  constexpr int kStep = kTokens < 4 ? kTokens : 4;  // tokens in registers together
#pragma GCC unroll 4
  for (int first = 0; first < kTokens; first += kStep) {
    __m512i keys[kStep][kVecs];
#pragma GCC unroll 4
    for (int j = 0; j < kStep; ++j) key(first + j, keys[j]);
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) {
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const __m512i row = in_register(_mm512_loadu_si512(rows + i * stride + 64 * c));
#pragma GCC unroll 4
        for (int j = 0; j < kStep; ++j) {
          __m512& sum = acc_regs[i * kTokens + first + j];
          sum = multiply_add_lanes<kDot>(sum, row, keys[j][c]);
        }
      }
    }
  }
}

/// Reduces and stores a block: scores[i * kTileTokens + j] is row i's with token j.
template <int kRows>
FOLIO_INLINE void store_scores(const __m512 (&acc_regs)[kBlockScores], float* scores) {
  constexpr int kTokens = kBlockScores / kRows;
  const __m512 block = reduce_lanes(acc_regs);
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
    __builtin_memcpy(scores + i * kTileTokens, reinterpret_cast<const char*>(&block) + i * kTokens * 4, kTokens * 4);
  }
}

#define FOLIO_CLEAR_ACC(acc_regs) \
  __m512 acc_regs[kBlockScores];  \
  _Pragma("GCC unroll 16") for (int clear_ = 0; clear_ < kBlockScores; ++clear_)(acc_regs)[clear_] = _mm512_setzero_ps()

/// Row r of Q, in the order of load_key.
FOLIO_INLINE const unsigned char* reordered_row(const WorkTileParams& work, int32_t r) {
  return reinterpret_cast<const unsigned char*>(work.scratch.reordered_q + r * work.scratch.reordered_stride);
}

/// Rows [r, r + kRows) with every token of a KV tile; K is upcast on load.
template <DType kType, bool kDot, int kRows>
static void qk_block_from_cache(const WorkTileParams& work, int32_t r, const unsigned char* const* k_rows,
                                Prefetch prefetch) {
  constexpr int kTokens = kBlockScores / kRows;
  constexpr int kVecs = kKeyVecs<kType, kDot>;
  constexpr int32_t kDims = kKeyDims<kType>;
  constexpr int32_t kBytes = kDims * static_cast<int32_t>(element_bytes(kType));
  const Upcaster<kType> upcaster;
  const int32_t chunks = work.head_dim_qk / kDims;
  const int32_t rest = work.head_dim_qk % kDims;
  const int64_t stride = int64_t{4} * work.scratch.reordered_stride;
  const unsigned char* const rows = reordered_row(work, r);
  for (int32_t t = 0; t < kTileTokens; t += kTokens) {
    for (int j = 0; j < kTokens; ++j) prefetch.issue(t + j);
    FOLIO_CLEAR_ACC(acc_regs);
    for (int32_t c = 0; c < chunks; ++c) {
      multiply_add_block<kDot, kRows, kVecs>(
          rows + c * kVecs * 64, stride,
          [&](int j, __m512i* vecs) __attribute__((always_inline)) {
            load_key<kType, kDot, false>(upcaster, k_rows[t + j] + c * kBytes, kDims, vecs);
          },
          acc_regs);
    }
    if (rest != 0) {
      multiply_add_block<kDot, kRows, kVecs>(
          rows + chunks * kVecs * 64, stride,
          [&](int j, __m512i* vecs) __attribute__((always_inline)) {
            load_key<kType, kDot, true>(upcaster, k_rows[t + j] + chunks * kBytes, rest, vecs);
          },
          acc_regs);
    }
    store_scores<kRows>(acc_regs, work.scratch.p + r * kTileTokens + t);
  }
}

/// Upcasts a key to registers in memory. Returns how many.
template <DType kType, bool kDot>
FOLIO_INLINE int32_t upcast_key(const Upcaster<kType>& upcaster, const unsigned char* from, int32_t dim,
                                unsigned char* to) {
  constexpr int kVecs = kKeyVecs<kType, kDot>;
  constexpr int32_t kDims = kKeyDims<kType>;
  int32_t count = 0;
  for (int32_t d = 0; d < dim; d += kDims, from += kDims * element_bytes(kType)) {
    __m512i vecs[kVecs];
    if (dim - d >= kDims) {
      load_key<kType, kDot, false>(upcaster, from, kDims, vecs);
    } else {
      load_key<kType, kDot, true>(upcaster, from, dim - d, vecs);
    }
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) _mm512_storeu_si512(to + 64 * count++, vecs[c]);
  }
  return count;
}

/// All rows with every token of a KV tile; K is upcast once for all rows, 16 keys at a time.
template <DType kType, bool kDot>
static void qk_from_upcast(const WorkTileParams& work, const unsigned char* const* k_rows, Prefetch prefetch) {
  constexpr int kRows = 4;
  const Upcaster<kType> upcaster;
  const int64_t stride = int64_t{4} * work.scratch.reordered_stride;
  auto* const keys = reinterpret_cast<unsigned char*>(work.scratch.k);
  for (int32_t t = 0; t < kTileTokens; t += kUpcastKeys) {
    int32_t vecs = 0;
    for (int32_t j = 0; j < kUpcastKeys; ++j) {
      prefetch.issue(t + j);
      vecs = upcast_key<kType, kDot>(upcaster, k_rows[t + j], work.head_dim_qk, keys + j * stride);
    }
    for (int32_t r = 0; r < work.num_rows; r += kRows) {
      for (int32_t j = 0; j < kUpcastKeys; j += kBlockScores / kRows) {
        FOLIO_CLEAR_ACC(acc_regs);
        for (int32_t c = 0; c < vecs; ++c) {
          multiply_add_block<kDot, kRows, 1>(
              reordered_row(work, r) + 64 * c, stride,
              [&](int i, __m512i* key) __attribute__((always_inline)) {
                key[0] = in_register(_mm512_loadu_si512(keys + (j + i) * stride + 64 * c));
              },
              acc_regs);
        }
        store_scores<kRows>(acc_regs, work.scratch.p + r * kTileTokens + t + j);
      }
    }
  }
}

#undef FOLIO_CLEAR_ACC

/// Reorders Q as load_key orders components, with zeros for padding. With kDot, Q is bfloat16 by type: as a float its
/// lower half is 0, and the upper half is stored.
template <DType kType, bool kDot>
static void reorder_q(const WorkTileParams& work) {
  constexpr int32_t kDims = kKeyDims<kType>;
  for (int32_t r = 0; r < padded_rows(work.num_rows); ++r) {
    const float* const q = work.scratch.q + r * work.qk_stride;
    float* const ordered = work.scratch.reordered_q + r * work.scratch.reordered_stride;
    for (int32_t first = 0; first < work.head_dim_qk; first += kDims) {
      for (int32_t i = 0; i < kDims; ++i) {
        const int32_t d = first + key_component<kType, kDot>(i);
        const float component = d < work.head_dim_qk ? q[d] : 0.0f;
        if constexpr (kDot) {
          const auto* const half = reinterpret_cast<const unsigned char*>(&component) + 2;
          __builtin_memcpy(reinterpret_cast<unsigned char*>(ordered) + 2 * (first + i), half, 2);
        } else {
          ordered[first + i] = component;
        }
      }
    }
  }
}

/// GEMM0 of a KV tile: S into scratch.p.
template <DType kType, bool kDot>
FOLIO_INLINE void gemm_qk(const WorkTileParams& work, const unsigned char* const* k, const Prefetch& prefetch) {
  constexpr bool kNothingToConvert = kType == DType::kBFloat16 && kDot;
  if (work.num_rows > kMaxDirectRows && !kNothingToConvert) return qk_from_upcast<kType, kDot>(work, k, prefetch);
  const int32_t parts = (work.num_rows + 3) / 4;
  int32_t r = 0;
  for (; work.num_rows - r > 2; r += 4) {
    qk_block_from_cache<kType, kDot, 4>(work, r, k, prefetch.part(r / 4, r / 4 + 1, parts));
  }
  if (work.num_rows - r == 2) qk_block_from_cache<kType, kDot, 2>(work, r, k, prefetch.part(r / 4, r / 4 + 1, parts));
  if (work.num_rows - r == 1) qk_block_from_cache<kType, kDot, 1>(work, r, k, prefetch.part(r / 4, r / 4 + 1, parts));
}

/// Tokens of a KV tile.
struct TokenSpan {
  int32_t begin;
  int32_t end;
};

/// Units of V's components that a block of kRows rows keeps in registers.
template <int kRows>
inline constexpr int kBlockUnits = kRows == 8   ? 1
                                   : kRows == 4 ? 2
                                                : 4;

/// The sum over a KV tile, of kRows rows and kUnits units, in registers. With kPart: the first `count` components of
/// the only unit.
template <int kRows, int kUnits, bool kPart>
struct PvAccumulator {
  static constexpr int kVecs = kUnits * kUnitVecs;
  __m512 acc_regs[kRows][kVecs];

  FOLIO_INLINE_MEMBER static __mmask16 lanes(int c, int32_t count) {
    const int32_t left = count - c * kLanes;
    return static_cast<__mmask16>(left >= kLanes ? 0xffff : left <= 0 ? 0 : 0xffff >> (kLanes - left));
  }
  FOLIO_INLINE_MEMBER void clear() {
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (int c = 0; c < kVecs; ++c) acc_regs[i][c] = _mm512_setzero_ps();
    }
  }
  /// Adds a token's V, one unit of it.
  FOLIO_INLINE_MEMBER void fma(int unit, const float* p, const __m512* values) {
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const __m512 p_i = _mm512_set1_ps(p[i * kTileTokens]);
#pragma GCC unroll 2
      for (int c = 0; c < kUnitVecs; ++c) {
        __m512& sum = acc_regs[i][unit * kUnitVecs + c];
        sum = _mm512_fmadd_ps(p_i, values[c], sum);
      }
    }
  }
  /// acc = acc * rescale + the sum.
  FOLIO_INLINE_MEMBER void add_to_acc(float* acc, int32_t stride, const float* rescale, int32_t count) const {
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const __m512 factor = _mm512_set1_ps(rescale[i]);
#pragma GCC unroll 8
      for (int c = 0; c < kVecs; ++c) {
        float* const at = acc + i * stride + c * kLanes;
        if constexpr (kPart) {
          const __m512 before = _mm512_maskz_loadu_ps(lanes(c, count), at);
          _mm512_mask_storeu_ps(at, lanes(c, count), _mm512_fmadd_ps(before, factor, acc_regs[i][c]));
        } else {
          _mm512_storeu_ps(at, _mm512_fmadd_ps(_mm512_loadu_ps(at), factor, acc_regs[i][c]));
        }
      }
    }
  }
};

/// Calls block<units, part>(d, share) for components [d, head_dim_v): in blocks of kUnits units, then smaller ones,
/// with their shares of `prefetch`. The last may be a part of a unit.
template <int kUnits, typename Block>
FOLIO_INLINE void for_value_blocks(int32_t head_dim_v, int32_t d, const Prefetch& prefetch, Block block) {
  const int32_t units = (head_dim_v + kUnitDims - 1) / kUnitDims;
  const auto share = [&](int32_t first) __attribute__((always_inline)) {
    return prefetch.part(first / kUnitDims, first / kUnitDims + kUnits, units);
  };
  for (; d + kUnits * kUnitDims <= head_dim_v; d += kUnits * kUnitDims) {
    block.template operator()<kUnits, false>(d, share(d));
  }
  if constexpr (kUnits > 1) {
    for_value_blocks<kUnits / 2>(head_dim_v, d, prefetch, block);
  } else if (d < head_dim_v) {
    block.template operator()<1, true>(d, share(d));
  }
}

/// Components [d, d + kUnits * kUnitDims) of rows [r, r + kRows), straight from the cache.
template <DType kType, bool kPairs, int kRows, int kUnits, bool kPart>
FOLIO_INLINE void pv_block_from_cache(const WorkTileParams& work, int32_t r, const unsigned char* const* v_rows,
                                      int32_t d, TokenSpan span, const Prefetch& prefetch) {
  constexpr int64_t kElement = element_bytes(kType);
  constexpr int64_t kUnitBytes = kUnitDims * kElement;
  const Upcaster<kType> upcaster;
  const int32_t count = work.head_dim_v - d;
  const float* const p = work.scratch.p + r * kTileTokens;
  float* const acc = work.state.acc + r * work.v_stride + d;
  PvAccumulator<kRows, kUnits, kPart> block;
  block.clear();
  if constexpr (kPairs) {
    for (int32_t t = span.begin & ~1; t < span.end; t += 2) {
      prefetch.issue(t);
      prefetch.issue(t + 1);
      const unsigned char* const row = v_rows[t / 2] + 2 * d * kElement;
#pragma GCC unroll 4
      for (int u = 0; u < kUnits; ++u) {
        __m512 even[kUnitVecs];
        __m512 odd[kUnitVecs];
        load_value_pairs<kType, kPart>(upcaster, row + 2 * u * kUnitBytes, count, even, odd);
        block.fma(u, p + t, even);
        block.fma(u, p + t + 1, odd);
      }
    }
  } else {
    for (int32_t t = span.begin; t < span.end; ++t) {
      prefetch.issue(t);
      const unsigned char* const row = v_rows[t] + d * kElement;
#pragma GCC unroll 4
      for (int u = 0; u < kUnits; ++u) {
        __m512 values[kUnitVecs];
        load_values<kType, kPart>(upcaster, row + u * kUnitBytes, count, values);
        block.fma(u, p + t, values);
      }
    }
  }
  block.add_to_acc(acc, work.v_stride, work.scratch.rescale + r, count);
}

/// Rows [r, r + kRows) straight from the cache: for KV tiles of which exactly the tokens of `span` are visible to every
/// row.
template <DType kType, bool kPairs, int kRows>
static void pv_rows_from_cache(const WorkTileParams& work, int32_t r, const unsigned char* const* v_rows,
                               TokenSpan span, const Prefetch& prefetch) {
  for_value_blocks<kBlockUnits<kRows>>(
      work.head_dim_v, 0,
      prefetch, [&]<int kUnits, bool kPart>(int32_t d, const Prefetch& share) __attribute__((always_inline)) {
        pv_block_from_cache<kType, kPairs, kRows, kUnits, kPart>(work, r, v_rows, d, span, share);
      });
}

/// Rows [r, r + kRows) from upcast V, over the tokens that are visible to some of them.
template <int kRows>
static void pv_rows_from_upcast(const WorkTileParams& work, const uint64_t* visible, int32_t r) {
  uint64_t any = 0;
  for (int i = 0; i < kRows; ++i) any |= visible[r + i];
  if (any == 0) return;
  const TokenSpan span{__builtin_ctzll(any), 64 - __builtin_clzll(any)};
  const float* const p = work.scratch.p + r * kTileTokens;
  float* const acc = work.state.acc + r * work.v_stride;
  const auto block_of = [&]<int kUnits, bool kPart>(int32_t d, const Prefetch&) __attribute__((always_inline)) {
    PvAccumulator<kRows, kUnits, kPart> block;
    const int32_t count = work.head_dim_v - d;
    block.clear();
    for (int32_t t = span.begin; t < span.end; ++t) {
      const float* const from = work.scratch.v + t * work.v_stride + d;
#pragma GCC unroll 4
      for (int u = 0; u < kUnits; ++u) {
        __m512 values[kUnitVecs];
#pragma GCC unroll 2
        for (int c = 0; c < kUnitVecs; ++c) {
          const float* const at = from + (u * kUnitVecs + c) * kLanes;
          values[c] = kPart ? _mm512_maskz_loadu_ps(block.lanes(c, count), at) : _mm512_loadu_ps(at);
        }
        block.fma(u, p + t, values);
      }
    }
    block.add_to_acc(acc + d, work.v_stride, work.scratch.rescale + r, count);
  };
  for_value_blocks<kBlockUnits<kRows>>(work.head_dim_v, 0, {}, block_of);
}

/// Upcasts the KV tile's V into scratch memory.
template <DType kType>
static void upcast_v(const WorkTileParams& work, const unsigned char* const* v_rows, const Prefetch& prefetch) {
  constexpr int64_t kElement = element_bytes(kType);
  const Upcaster<kType> upcaster;
  const int32_t dim = work.head_dim_v;
  const auto store_unit = [&](int32_t t, int32_t d, const __m512* vecs) __attribute__((always_inline)) {
    float* const to = work.scratch.v + t * work.v_stride + d;
    _mm512_storeu_ps(to, vecs[0]);
    if (d + kLanes < dim) _mm512_storeu_ps(to + kLanes, vecs[1]);
  };
  for (int32_t t = 0; t < kTileTokens; t += 2) {
    prefetch.issue(t);
    prefetch.issue(t + 1);
    for (int32_t d = 0; d < dim; d += kUnitDims) {
      const bool part = dim - d < kUnitDims;
      __m512 first[kUnitVecs] = {};
      __m512 second[kUnitVecs] = {};
      if (work.kv.packed_v) {
        const unsigned char* const from = v_rows[t / 2] + 2 * d * kElement;
        if constexpr (kType != DType::kFloat32) {
          if (part) {
            load_value_pairs<kType, true>(upcaster, from, dim - d, first, second);
          } else {
            load_value_pairs<kType, false>(upcaster, from, kUnitDims, first, second);
          }
        }
      } else if (part) {
        load_values<kType, true>(upcaster, v_rows[t] + d * kElement, dim - d, first);
        load_values<kType, true>(upcaster, v_rows[t + 1] + d * kElement, dim - d, second);
      } else {
        load_values<kType, false>(upcaster, v_rows[t] + d * kElement, kUnitDims, first);
        load_values<kType, false>(upcaster, v_rows[t + 1] + d * kElement, kUnitDims, second);
      }
      store_unit(t, d, first);
      store_unit(t + 1, d, second);
    }
  }
}

template <DType kType, bool kPairs>
FOLIO_INLINE void pv_from_cache(const WorkTileParams& work, const LocatedTile& located, Prefetch prefetch) {
  const unsigned char* const* const v = located.rows.v;
  const TokenSpan span{located.tile.begin, located.tile.end};
  if (work.num_rows == 8) return pv_rows_from_cache<kType, kPairs, 8>(work, 0, v, span, prefetch);
  int32_t r = 0;
  for (; work.num_rows - r >= 4; r += 4, prefetch = {})
    pv_rows_from_cache<kType, kPairs, 4>(work, r, v, span, prefetch);
  for (; work.num_rows - r >= 2; r += 2, prefetch = {})
    pv_rows_from_cache<kType, kPairs, 2>(work, r, v, span, prefetch);
  if (r < work.num_rows) pv_rows_from_cache<kType, kPairs, 1>(work, r, v, span, prefetch);
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
  upcast_v<kType>(work, located.rows.v, prefetch);
  int32_t r = 0;
  if (!located.uniform && has_non_finite_v(work)) {
    for (; r < work.num_rows; ++r) pv_row_visible_only(work, located.visible[r], r);
  }
  for (; r + 4 <= work.num_rows; r += 4) pv_rows_from_upcast<4>(work, located.visible, r);
  for (; r < work.num_rows; ++r) pv_rows_from_upcast<1>(work, located.visible, r);
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
