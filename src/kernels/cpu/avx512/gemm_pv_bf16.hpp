#pragma once

#include "kernels/cpu/avx512/gemm.hpp"

#if defined(__AVX512BF16__)

/// GEMM1 by VDPBF16PS: O += P V with P rounded to bfloat16, two tokens an instruction.
///
/// V comes as words: the bfloat16 of two tokens, the even one below, as packed caches store it and as fp8 is upcast.
/// GEMM1 adds up a KV tile's pairs in order, from 0; acc takes the tile's sum at once. A masked token has p = 0 and
/// changes nothing: VDPBF16PS never leaves a denormal that a later zero could flush.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// Rounds a row of P to bfloat16 in place: token t becomes 16-bit word t.
FOLIO_INLINE void round_p(float* p) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const __m512 lower = _mm512_loadu_ps(p + half * 32);
    const __m512 upper = _mm512_loadu_ps(p + half * 32 + kLanes);
    const auto words = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(upper, lower));
    _mm512_storeu_si512(reinterpret_cast<unsigned char*>(p) + 64 * half, words);
  }
}

/// Whether the two registers of a unit have its components interleaved by quarters: 0 to 3, 8 to 11 and so on in the
/// first. That is how two rows of bfloat16 meet in two operations; the sums are put in order at the end.
template <DType kType, bool kPairs>
inline constexpr bool kQuartersApart = kType == DType::kBFloat16 && !kPairs;

/// Registers of components in order from two of quarters.
FOLIO_INLINE void put_in_order(__m512 (&vecs)[kUnitVecs]) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  const __m512 lower = vecs[0];
  vecs[0] = _mm512_permutex2var_ps(lower, first, vecs[1]);
  vecs[1] = _mm512_permutex2var_ps(lower, second, vecs[1]);
}

/// Loads one unit of a pair of tokens as words. `rows`: of the pair, or of its two tokens; `offset` in elements.
template <DType kType, bool kPairs, bool kPart>
FOLIO_INLINE void load_value_words(const Upcaster<kType>& upcaster, const unsigned char* const* rows, int32_t offset,
                                   int32_t count, __m512i (&words)[kUnitVecs]) {
  constexpr int32_t kElement = static_cast<int32_t>(element_bytes(kType));
  if constexpr (kPairs) {
    const unsigned char* const at = rows[0] + 2 * offset * kElement;
    if constexpr (is_fp8_type(kType)) {
      const __m512i line = load_bytes(at, kPart ? 2 * count : 64);
      const __m512i fp8 = _mm512_permutexvar_epi8(_mm512_load_si512(kLineOrder.paired_fp8), line);
      upcaster.lookup.upcast(fp8, words[0], words[1]);
    } else {
#pragma GCC unroll 2
      for (int c = 0; c < kUnitVecs; ++c) words[c] = load_bytes(at + 64 * c, kPart ? 4 * count - 64 * c : 64);
    }
  } else {
    const int32_t bytes = kPart ? count * kElement : kUnitDims * kElement;
    const __m512i even = load_bytes(rows[0] + offset * kElement, bytes);
    const __m512i odd = load_bytes(rows[1] + offset * kElement, bytes);
    if constexpr (is_fp8_type(kType)) {
      const __m512i fp8 = _mm512_permutex2var_epi8(even, _mm512_load_si512(kLineOrder.two_rows_fp8), odd);
      upcaster.lookup.upcast(fp8, words[0], words[1]);
    } else {
      words[0] = _mm512_unpacklo_epi16(even, odd);
      words[1] = _mm512_unpackhi_epi16(even, odd);
    }
  }
}

/// Adds a pair of tokens to the sums of a block, one unit of it.
template <int kRows, int kUnits, bool kPart>
FOLIO_INLINE void add_pair(PvAccumulator<kRows, kUnits, kPart>& block, int unit, const float* p, int32_t pair,
                           const __m512i (&words)[kUnitVecs]) {
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
    const __m512i p_i = _mm512_set1_epi32(load<int32_t>(p + i * kTileTokens + pair));
#pragma GCC unroll 2
    for (int c = 0; c < kUnitVecs; ++c) {
      __m512& sum = block.acc_regs[i][unit * kUnitVecs + c];
      sum = _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(words[c]), reinterpret_cast<__m512bh>(p_i));
    }
  }
}

/// Components [d, d + kUnits * kUnitDims) of rows [r, r + kRows), straight from the cache.
template <DType kType, bool kPairs, int kRows, int kUnits, bool kPart>
FOLIO_INLINE void pv_bf16_block_from_cache(const WorkTileParams& work, int32_t r, const unsigned char* const* v_rows,
                                           int32_t d, TokenSpan span, const Prefetch& prefetch) {
  const Upcaster<kType> upcaster;
  const int32_t count = work.head_dim_v - d;
  const float* const p = work.scratch.p + r * kTileTokens;
  PvAccumulator<kRows, kUnits, kPart> block;
  block.clear();
  for (int32_t t = span.begin & ~1; t < span.end; t += 2) {
    prefetch.issue(t);
    prefetch.issue(t + 1);
    const unsigned char* const* const rows = v_rows + (kPairs ? t / 2 : t);
#pragma GCC unroll 4
    for (int u = 0; u < kUnits; ++u) {
      __m512i words[kUnitVecs];
      load_value_words<kType, kPairs, kPart>(upcaster, rows, d + u * kUnitDims, count, words);
      add_pair(block, u, p, t / 2, words);
    }
  }
  if constexpr (kQuartersApart<kType, kPairs>) {
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int u = 0; u < kUnits; ++u) {
        __m512 vecs[kUnitVecs] = {block.acc_regs[i][2 * u], block.acc_regs[i][2 * u + 1]};
        put_in_order(vecs);
        block.acc_regs[i][2 * u] = vecs[0];
        block.acc_regs[i][2 * u + 1] = vecs[1];
      }
    }
  }
  block.add_to_acc(work.state.acc + r * work.v_stride + d, work.v_stride, work.scratch.rescale + r, count);
}

template <DType kType, bool kPairs, int kRows>
static void pv_bf16_rows_from_cache(const WorkTileParams& work, int32_t r, const unsigned char* const* v_rows,
                                    TokenSpan span, const Prefetch& prefetch) {
  for_value_blocks<kBlockUnits<kRows>>(
      work.head_dim_v, 0,
      prefetch, [&]<int kUnits, bool kPart>(int32_t d, const Prefetch& share) __attribute__((always_inline)) {
        pv_bf16_block_from_cache<kType, kPairs, kRows, kUnits, kPart>(work, r, v_rows, d, span, share);
      });
}

/// The words of pair `pair`, from component d on, in scratch memory.
FOLIO_INLINE unsigned char* words_at(const WorkTileParams& work, int32_t pair, int32_t d) {
  return reinterpret_cast<unsigned char*>(work.scratch.v + pair * work.v_stride + d);
}

/// Writes the KV tile's V to scratch memory as words, components in order. Returns whether one is infinite or NaN.
template <DType kType, bool kPairs>
static bool interleave_v(const WorkTileParams& work, const unsigned char* const* v_rows, const Prefetch& prefetch) {
  const Upcaster<kType> upcaster;
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  __mmask32 non_finite = 0;
  for (int32_t t = 0; t < kTileTokens; t += 2) {
    prefetch.issue(t);
    prefetch.issue(t + 1);
    const unsigned char* const* const rows = v_rows + (kPairs ? t / 2 : t);
    for (int32_t d = 0; d < work.head_dim_v; d += kUnitDims) {
      const int32_t count = work.head_dim_v - d;
      __m512i words[kUnitVecs];
      if (count < kUnitDims) {
        load_value_words<kType, kPairs, true>(upcaster, rows, d, count, words);
      } else {
        load_value_words<kType, kPairs, false>(upcaster, rows, d, kUnitDims, words);
      }
      if constexpr (kQuartersApart<kType, kPairs>) {
        __m512 vecs[kUnitVecs] = {_mm512_castsi512_ps(words[0]), _mm512_castsi512_ps(words[1])};
        put_in_order(vecs);
        words[0] = _mm512_castps_si512(vecs[0]);
        words[1] = _mm512_castps_si512(vecs[1]);
      }
#pragma GCC unroll 2
      for (int c = 0; c < kUnitVecs; ++c) {
        non_finite |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(words[c], exponent), exponent);
        if (c * kLanes < count) _mm512_storeu_si512(words_at(work, t / 2, d + c * kLanes), words[c]);
      }
    }
  }
  return non_finite != 0;
}

/// Rows [r, r + kRows) from words in scratch memory, over the tokens that are visible to some of them.
template <int kRows>
static void pv_bf16_rows_from_words(const WorkTileParams& work, const uint64_t* visible, int32_t r) {
  uint64_t any = 0;
  for (int i = 0; i < kRows; ++i) any |= visible[r + i];
  if (any == 0) return;
  const int32_t begin = __builtin_ctzll(any) / 2;
  const int32_t end = (65 - __builtin_clzll(any)) / 2;
  const float* const p = work.scratch.p + r * kTileTokens;
  const auto block_of = [&]<int kUnits, bool kPart>(int32_t d, const Prefetch&) __attribute__((always_inline)) {
    PvAccumulator<kRows, kUnits, kPart> block;
    const int32_t count = work.head_dim_v - d;
    block.clear();
    for (int32_t pair = begin; pair < end; ++pair) {
#pragma GCC unroll 4
      for (int u = 0; u < kUnits; ++u) {
        __m512i words[kUnitVecs];
#pragma GCC unroll 2
        for (int c = 0; c < kUnitVecs; ++c) {
          const int32_t first = u * kUnitDims + c * kLanes;
          words[c] = load_bytes(words_at(work, pair, d + first), kPart ? 4 * (count - first) : 64);
        }
        add_pair(block, u, p, pair, words);
      }
    }
    block.add_to_acc(work.state.acc + r * work.v_stride + d, work.v_stride, work.scratch.rescale + r, count);
  };
  for_value_blocks<kBlockUnits<kRows>>(work.head_dim_v, 0, {}, block_of);
}

/// One row over its visible tokens alone, for tiles with non-finite values: a masked token has p = 0, and 0 * NaN would
/// be NaN.
static inline void pv_bf16_row_visible_only(const WorkTileParams& work, uint64_t visible, int32_t r) {
  const float* const p = work.scratch.p + r * kTileTokens;
  const __m512 rescale = _mm512_set1_ps(work.scratch.rescale[r]);
  float* const acc = work.state.acc + r * work.v_stride;
  for (int32_t d = 0; d < work.v_stride; d += kLanes) {
    __m512 sum = _mm512_setzero_ps();
    for (int32_t pair = 0; pair < kTileTokens / 2; ++pair) {
      const auto seen = static_cast<uint32_t>(visible >> (2 * pair)) & 3;
      if (seen == 0) continue;
      const __m512i mask = _mm512_set1_epi32(static_cast<int32_t>((seen & 1) * 0xffffu | (seen >> 1) * 0xffff0000u));
      const __m512i words = _mm512_and_si512(_mm512_loadu_si512(words_at(work, pair, d)), mask);
      const __m512i p_pair = _mm512_set1_epi32(load<int32_t>(p + pair));
      sum = _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(words), reinterpret_cast<__m512bh>(p_pair));
    }
    _mm512_storeu_ps(acc + d, _mm512_fmadd_ps(_mm512_loadu_ps(acc + d), rescale, sum));
  }
}

template <DType kType, bool kPairs>
FOLIO_INLINE void pv_bf16_as(const WorkTileParams& work, const LocatedTile& located, Prefetch prefetch) {
  const unsigned char* const* const v = located.rows.v;
  int32_t r = 0;
  if (work.num_rows <= kMaxDirectRows && located.uniform) {
    const TokenSpan span{located.tile.begin, located.tile.end};
    if (work.num_rows == 8) return pv_bf16_rows_from_cache<kType, kPairs, 8>(work, 0, v, span, prefetch);
    for (; work.num_rows - r >= 4; r += 4, prefetch = {})
      pv_bf16_rows_from_cache<kType, kPairs, 4>(work, r, v, span, prefetch);
    for (; work.num_rows - r >= 2; r += 2, prefetch = {})
      pv_bf16_rows_from_cache<kType, kPairs, 2>(work, r, v, span, prefetch);
    if (r < work.num_rows) pv_bf16_rows_from_cache<kType, kPairs, 1>(work, r, v, span, prefetch);
    return;
  }
  if (interleave_v<kType, kPairs>(work, v, prefetch) && !located.uniform) {
    for (; r < work.num_rows; ++r) pv_bf16_row_visible_only(work, located.visible[r], r);
  }
  for (; r + 4 <= work.num_rows; r += 4) pv_bf16_rows_from_words<4>(work, located.visible, r);
  for (; r < work.num_rows; ++r) pv_bf16_rows_from_words<1>(work, located.visible, r);
}

/// GEMM1 of a KV tile whose P is rounded.
template <DType kType>
FOLIO_INLINE void gemm_pv_bf16(const WorkTileParams& work, const LocatedTile& located, const Prefetch& prefetch) {
  if (work.kv.packed_v) {
    pv_bf16_as<kType, true>(work, located, prefetch);
  } else {
    pv_bf16_as<kType, false>(work, located, prefetch);
  }
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA

#endif  // __AVX512BF16__
