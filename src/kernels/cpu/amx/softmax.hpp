#pragma once

#include "kernels/cpu/amx/mask.hpp"
#include "kernels/cpu/amx/producer.hpp"
#include "kernels/cpu/common/vec.hpp"

/// Online softmax of a row block: a row in each lane. No operation goes across lanes, so a row's bits do not depend on
/// its lane.
///
/// Lazy rescaling (FlashAttention-4): row_max follows the true maximum only when that has risen by more than
/// kRescaleThreshold. Then acc needs rescaling rarely.
///
/// P is at most 2^kRescaleThreshold. Its rounding to bfloat16 is relative, so every p errs by at most 2^-8 of itself
/// and an output by at most 2^-8 of the row's weighted mean of |v|, whatever the threshold. Within this bound lazy
/// rescaling costs accuracy. The true maximum has p = 1, which is not rounded: where one key outweighs the others, the
/// output errs by 2^-8 of their share alone. Relative to an older maximum that key's p is rounded too, and the output
/// errs by up to 2^-8 of |v|. Every positive threshold does so, and a threshold of 0 rescales acc, and empties the
/// pipeline of GEMMs, with every new maximum of any of 16 rows. row_sum, and with it the LSE, takes p before its
/// rounding.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// 2^x, 0 in lanes that `lanes` leaves out: relative error below 2^-22.6, exactly 1 at 0, exactly 0 below -126,
/// infinite from 128 on; NaN stays. x = n + f with n = floor(x), by VREDUCEPS; 2^f by a polynomial with constant term
/// 1, fitted over [0, 1] as exp2_nonpositive's is (vec.hpp; 2^-23.5 before rounding); 2^n by VSCALEFPS. That takes some
/// hundred cycles for denormal results: lanes that would have one are left out.
FOLIO_INLINE Vec exp2_lanes(Vec x, __mmask16 lanes) {
  lanes = _mm512_mask_cmp_ps_mask(lanes, x, splat(-126.0f), _CMP_NLT_UQ);
  const Vec fraction = _mm512_maskz_reduce_ps(0xffff, x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  Vec y = splat(0x1.e974fap-10f);
  y = multiply_add(y, fraction, splat(0x1.277856p-7f));
  y = multiply_add(y, fraction, splat(0x1.c91ce6p-5f));
  y = multiply_add(y, fraction, splat(0x1.ebdb56p-3f));
  y = multiply_add(y, fraction, splat(0x1.62e4bap-1f));
  y = multiply_add(y, fraction, splat(1.0f));
  return _mm512_maskz_scalef_ps(lanes, y, x);
}

/// Integer sums that may wrap around, as the bits of a NaN do.
FOLIO_INLINE IntVec wrapping_sum(IntVec a, IntVec b) {
  return reinterpret_cast<IntVec>(_mm512_add_epi32(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}

/// Rounds both vectors to bfloat16, ties upwards: `even` into the low halves of the lanes, `odd` into the high ones. A
/// NaN stays one unless the low half of its bits carries; callers have no such NaN.
FOLIO_INLINE IntVec pack_bfloat16(Vec even, Vec odd) {
  const IntVec half = splat_int(0x8000);
  const IntVec low = reinterpret_cast<IntVec>(
      _mm512_maskz_srli_epi32(0xffff, reinterpret_cast<__m512i>(wrapping_sum(bits(even), half)), 16));
  return low | (wrapping_sum(bits(odd), half) & splat_int(-65536));
}

inline constexpr float kRescaleThreshold = 8.0f;

/// Up to so large a |row_max|, exponents may come of a fused multiply-add: a logit and its rounding differ by 2^-5.
inline constexpr float kMaxFusedRowMax = 0x1p20f;

/// S to logits in base-2 units, in place: soft cap and ALiBi, which need more than a factor.
static inline void finish_logits(const WorkTileParams& work, const KvTile& tile, int32_t r, int32_t rows,
                                 Vec logit_scale, float* scores) {
  const Vec cap = splat(work.soft_cap);
  float slopes[kRowBlock] = {};
  int64_t positions[kRowBlock] = {};
  for (int32_t i = 0; i < rows; ++i) {
    slopes[i] = work.rows[r + i].alibi_slope;
    positions[i] = work.rows[r + i].position;
  }
  const Vec slope = load<Vec>(slopes) * splat(-kLog2E);
  const Vec to_cap = logit_scale / cap;
  for (int32_t t = tile.begin; t < tile.end; ++t) {
    Vec logit = load<Vec>(scores + t * kRowBlock);
    logit =
        work.soft_cap != 0.0f ? tanh(logit * to_cap) * (cap * splat(kLog2E)) : logit * (logit_scale * splat(kLog2E));
    if (work.alibi) {
      const int64_t key = key_position(work.kv, int64_t{tile.first} + t);
      float distances[kRowBlock];
      for (int32_t i = 0; i < kRowBlock; ++i) {
        const int64_t distance = positions[i] - key;
        distances[i] = static_cast<float>(distance < 0 ? -distance : distance);
      }
      logit = multiply_add(slope, load<Vec>(distances), logit);
    }
    store(scores + t * kRowBlock, logit);
  }
}

/// Scores and row_max of a row block in a KV tile.
struct RowBlockMax {
  Vec logit_scale;   ///< factor that the scores still need
  Vec row_max;       ///< 0 where no token has been visible yet
  Vec rescale;       ///< factor of row_sum and acc
  __mmask16 raised;  ///< rows whose row_max moved, but for the first: rescale is not 1
};

/// Whether all rows have a row_max that a tile may be tried with before its maximum is known.
FOLIO_INLINE bool has_row_max(const float* row_max, __mmask16 rows) {
  const Vec magnitude = from_bits(bits(load<Vec>(row_max)) & splat_int(0x7fffffff));
  return (rows & ~_mm512_cmp_ps_mask(magnitude, splat(kMaxFusedRowMax), _CMP_LE_OQ)) == 0;
}

/// row_max as it stands.
FOLIO_INLINE RowBlockMax keep_row_max(const float* row_max, Vec logit_scale) {
  return {logit_scale, load<Vec>(row_max), splat(1.0f), 0};
}

/// Lazy rescaling: row_max moves only when the tile's maximum exceeds it by more than kRescaleThreshold.
static inline RowBlockMax update_block_row_max(const WorkTileParams& work, const TileOperands& operands,
                                               const RowBlockMask& mask, int32_t r, Vec logit_scale,
                                               const float* scores) {
  const Vec nothing = splat(-__builtin_inff());
  Vec most[4] = {nothing, nothing, nothing, nothing};
  if (!mask.masked) {
    for (int32_t t = 0; t < kTileTokens; t += 4) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        most[i] = max_or_second(load<Vec>(scores + (t + i) * kRowBlock) * logit_scale, most[i]);  // passes over NaN
      }
    }
  } else {
    for (int32_t t = operands.tile.begin / 4 * 4; t < operands.tile.end; t += 4) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {  // tokens outside the tile are visible to no lane
        const Vec logit = load<Vec>(scores + (t + i) * kRowBlock) * logit_scale;
        most[i] = _mm512_mask_max_ps(most[i], visible_lanes(mask, t + i), logit, most[i]);
      }
    }
  }
  const Vec tile_max = max_or_second(max_or_second(most[0], most[1]), max_or_second(most[2], most[3]));
  const Vec before = load<Vec>(work.state.row_max + r);
  RowBlockMax max;
  max.logit_scale = logit_scale;
  const __mmask16 moved = _mm512_cmp_ps_mask(tile_max, before + splat(kRescaleThreshold), _CMP_GT_OQ);
  const Vec after = _mm512_mask_mov_ps(before, moved, tile_max);
  max.raised = moved & _mm512_cmp_ps_mask(before, nothing, _CMP_NEQ_UQ);
  max.row_max = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(after, nothing, _CMP_NEQ_UQ), after);
  max.rescale = _mm512_mask_mov_ps(splat(1.0f), max.raised, exp2_lanes(before - after, 0xffff));
  store(work.state.row_max + r, after);
  return max;
}

/// Makes logits of scores, in rows whose |row_max| is large. row_max is a rounded product. There its rounding is no
/// longer small beside an exponent: the exponent of the maximum itself would be far from 0 if it came of the product
/// before rounding.
FOLIO_INLINE void round_large_logits(RowBlockMax& max, float* scores) {
  const Vec magnitude = from_bits(bits(max.row_max) & splat_int(0x7fffffff));
  const __mmask16 large = _mm512_cmp_ps_mask(magnitude, splat(kMaxFusedRowMax), _CMP_GT_OQ);
  if (large == 0) return;
  for (int32_t t = 0; t < kTileTokens; ++t) {
    const Vec score = load<Vec>(scores + t * kRowBlock);
    store(scores + t * kRowBlock, Vec(_mm512_mask_mul_ps(score, large, score, max.logit_scale)));
  }
  max.logit_scale = _mm512_mask_mov_ps(max.logit_scale, large, splat(1.0f));
}

/// Up to this sum, no logit exceeded row_max by kRescaleThreshold: 2^7.78, less than 2^kRescaleThreshold by more than
/// what logits below kMaxFusedRowMax and their rounded products differ by.
inline constexpr float kMaxKeptSum = 220.0f;

/// False if a logit of some row may exceed row_max by more than kRescaleThreshold.
FOLIO_INLINE bool keeps_row_max(Vec tile_sum, __mmask16 rows) {
  return (rows & ~_mm512_cmp_ps_mask(tile_sum, splat(kMaxKeptSum), _CMP_LE_OQ)) == 0;
}

/// What pack_bfloat16 leaves of a number.
FOLIO_INLINE Vec rest_of_bfloat16(Vec value) {
  return value - from_bits(wrapping_sum(bits(value), splat_int(0x8000)) & splat_int(-65536));
}

/// The factors of values that P takes: v_scale, which is the row's, and the scales of int8 tokens.
enum class ValueScales { kNone, kOfRows, kOfRowsAndTokens };

/// The scores of a KV tile's stored int8 keys become those of the keys.
FOLIO_INLINE void scale_token_scores(const TileOperands& operands, float* scores) {
  for (int32_t t = operands.tile.begin; t < operands.tile.end; ++t) {
    store(scores + t * kRowBlock, load<Vec>(scores + t * kRowBlock) * splat(operands.scales.k[t]));
  }
}

/// p[term][row block][half][row][token] = exp2(logit - row_max) * value scales in bfloat16, 0 for masked tokens, whose
/// scales may be NaN; halves that no row of the work tile attends to are left out. kTerms 2: the low term is what
/// rounding left, rounded itself. Returns what the tile adds to row_sum: the exponentials before their rounding.
template <bool kMasked, ValueScales kScales, int kTerms, class Pipeline>
static Vec exponentiate(const TileOperands& operands, const RowBlockMask& mask, const RowBlockMax& max,
                        const float* scores, const float* value_scales, uint16_t* p, Pipeline& pipeline) {
  const Vec value_scale = kScales != ValueScales::kNone ? load<Vec>(value_scales) : splat(1.0f);
  const Vec base = -max.row_max;
  Vec even_sum{};
  Vec odd_sum{};
  for (int32_t h = 0; h < kTileTokens / kHalfTokens; ++h) {
    if (operands.values[h].at == nullptr) continue;
    const float* const from = scores + h * kHalfTokens * kRowBlock;
    IntVec pairs[kHalfTokens / 2];
    IntVec low_pairs[kHalfTokens / 2];
#pragma GCC unroll 16
    for (int j = 0; j < kHalfTokens / 2; ++j) {
      const int32_t t = h * kHalfTokens + 2 * j;
      const __mmask16 visible_even = kMasked ? visible_lanes(mask, t) : __mmask16{0xffff};
      const __mmask16 visible_odd = kMasked ? visible_lanes(mask, t + 1) : __mmask16{0xffff};
      Vec even = multiply_add(load<Vec>(from + 2 * j * kRowBlock), max.logit_scale, base);
      Vec odd = multiply_add(load<Vec>(from + (2 * j + 1) * kRowBlock), max.logit_scale, base);
      even = exp2_lanes(even, visible_even);
      odd = exp2_lanes(odd, visible_odd);
      even_sum += even;
      odd_sum += odd;
      if constexpr (kScales == ValueScales::kOfRows) {
        even *= value_scale;
        odd *= value_scale;
      } else if constexpr (kScales == ValueScales::kOfRowsAndTokens) {
        even = _mm512_maskz_mul_ps(visible_even, even, value_scale * splat(operands.scales.v[t]));
        odd = _mm512_maskz_mul_ps(visible_odd, odd, value_scale * splat(operands.scales.v[t + 1]));
      }
      pairs[j] = pack_bfloat16(even, odd);
      if constexpr (kTerms == 2) low_pairs[j] = pack_bfloat16(rest_of_bfloat16(even), rest_of_bfloat16(odd));
      pipeline.at_softmax_step(j);
    }
    transpose(pairs);
#pragma GCC unroll 16
    for (int i = 0; i < kRowBlock; ++i) store(p + (h * kRowBlock + i) * kHalfTokens, pairs[i]);
    if constexpr (kTerms == 2) {
      transpose(low_pairs);
#pragma GCC unroll 16
      for (int i = 0; i < kRowBlock; ++i) store(p + kTermP + (h * kRowBlock + i) * kHalfTokens, low_pairs[i]);
    }
  }
  return even_sum + odd_sum;
}

FOLIO_INLINE void add_to_row_sum(const WorkTileParams& work, int32_t r, const RowBlockMax& max, Vec tile_sum) {
  const Vec sum = multiply_add(load<Vec>(work.state.row_sum + r), max.rescale, tile_sum);
  store(work.state.row_sum + r, sum);
  // All visible scores NaN: the state must not look empty.
  const Vec row_max = load<Vec>(work.state.row_max + r);
  store(work.state.row_max + r, Vec(_mm512_mask_mov_ps(row_max, _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q), sum)));
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
