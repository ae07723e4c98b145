#pragma once

#include "kernels/cpu/amx/attention/lanes.hpp"
#include "kernels/cpu/amx/attention/step.hpp"

/// Scores of a strip and one tile to weights, and the rows' running maxima and sums. A row in each lane: no operation
/// goes across lanes, and a row's bits do not depend on its lane.
///
/// A row's reference, against which its exponentials and sum are taken, follows the maximum lazily: it is set to the
/// largest logit seen when that has risen by more than kLazyRise, so that the sums of values need not be rescaled at
/// every tile. Weights are then at most 2^kLazyRise, and lose nothing by it.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

inline constexpr float kLazyRise = 8.0f;

/// What a strip's rows see of a tile.
struct StripSight {
  bool any;
  bool masked;  ///< some row does not see all 64 tokens: the words below are used
  IntVec low;   ///< tokens [0, 32) of each row
  IntVec high;
};

FOLIO_INLINE StripSight sight_of_strip(const ReadyTokens& ready, int32_t r, int32_t rows) {
  const uint64_t range = bit_range(ready.tile.begin, ready.tile.end);
  if (ready.uniform) {
    return {true, range != ~uint64_t{0}, splat_int(static_cast<int32_t>(range)),
            splat_int(static_cast<int32_t>(range >> 32))};
  }
  uint64_t any = 0;
  uint64_t all = ~uint64_t{0};
  for (int32_t i = 0; i < rows; ++i) {
    any |= ready.visible[r + i];
    all &= ready.visible[r + i];
  }
  const IntVec first = load<IntVec>(ready.visible + r);
  const IntVec second = load<IntVec>(ready.visible + r + 8);
  return {any != 0, all != ~uint64_t{0},
          FOLIO_SHUFFLE(first, second, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
          FOLIO_SHUFFLE(first, second, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)};
}

/// Lanes whose rows see token t.
FOLIO_INLINE __mmask16 lanes_that_see(const StripSight& sight, int32_t t) {
  const IntVec word = t < 32 ? sight.low : sight.high;
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(word),
                                reinterpret_cast<__m512i>(splat_int(static_cast<int32_t>(uint32_t{1} << (t % 32)))));
}

/// Scores to logits in base-2 units, in place: for what a factor alone does not do.
static inline void finish_logits(const ItemCall& call, const Tile& tile, int32_t r, int32_t rows, Vec logit_scale,
                                 float* scores) {
  const Vec cap = splat(call.soft_cap);
  float slopes[kStripRows] = {};
  int64_t positions[kStripRows] = {};
  for (int32_t i = 0; i < rows; ++i) {
    slopes[i] = call.rows[r + i].alibi_slope;
    positions[i] = call.rows[r + i].position;
  }
  const Vec slope = load<Vec>(slopes) * splat(-kLog2E);
  const Vec to_cap = logit_scale / cap;
  for (int32_t t = tile.begin; t < tile.end; ++t) {
    Vec logit = load<Vec>(scores + t * kStripRows);
    logit =
        call.soft_cap != 0.0f ? tanh(logit * to_cap) * (cap * splat(kLog2E)) : logit * (logit_scale * splat(kLog2E));
    if (call.alibi) {
      const int64_t key = key_position(call.keys, int64_t{tile.first} + t);
      float distances[kStripRows];
      for (int32_t i = 0; i < kStripRows; ++i) {
        const int64_t distance = positions[i] - key;
        distances[i] = static_cast<float>(distance < 0 ? -distance : distance);
      }
      logit = multiply_add(slope, load<Vec>(distances), logit);
    }
    store(scores + t * kStripRows, logit);
  }
}

/// The references of a strip after a tile.
struct StripReference {
  Vec logit_scale;   ///< what the scores are still to be multiplied by
  Vec base;          ///< the reference; 0 where the row has seen nothing
  Vec rescale;       ///< what sums so far are to be multiplied by
  __mmask16 raised;  ///< rows of which that is not 1
};

static inline StripReference raise_reference(const ItemCall& call, const ReadyTokens& ready, const StripSight& sight,
                                             int32_t r, Vec logit_scale, const float* scores) {
  const Vec nothing = splat(-__builtin_inff());
  Vec most[4] = {nothing, nothing, nothing, nothing};
  if (!sight.masked) {
    for (int32_t t = 0; t < kTileTokens; t += 4) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        most[i] = max_or_second(load<Vec>(scores + (t + i) * kStripRows) * logit_scale, most[i]);  // passes over NaN
      }
    }
  } else {
    for (int32_t t = ready.tile.begin; t < ready.tile.end; ++t) {
      const Vec logit = load<Vec>(scores + t * kStripRows) * logit_scale;
      most[0] = _mm512_mask_max_ps(most[0], lanes_that_see(sight, t), logit, most[0]);
    }
  }
  const Vec tile_most = max_or_second(max_or_second(most[0], most[1]), max_or_second(most[2], most[3]));
  const Vec before = load<Vec>(call.states.max + r);
  StripReference reference;
  reference.logit_scale = logit_scale;
  reference.raised = _mm512_cmp_ps_mask(tile_most, before + splat(kLazyRise), _CMP_GT_OQ);
  const Vec after = _mm512_mask_mov_ps(before, reference.raised, tile_most);
  reference.base = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(after, nothing, _CMP_NEQ_UQ), after);
  reference.rescale = _mm512_mask_mov_ps(splat(1.0f), reference.raised, exp2_of_lanes(before - after, 0xffff));
  store(call.states.max + r, after);
  return reference;
}

/// weights[half][row][token] = exp2(logit - reference) * value scale in bfloat16, 0 where the row does not see the
/// token; halves that no row of the item sees are left out. Updates the rows' sums, in float32 of the unrounded
/// exponentials.
template <bool kMasked, bool kScaled, class A>
static void make_weights(const ItemCall& call, const ReadyTokens& ready, const StripSight& sight, int32_t r,
                         const StripReference& reference, const float* scores, const float* value_scales,
                         uint16_t* weights, A& ahead) {
  const Vec value_scale = kScaled ? load<Vec>(value_scales) : splat(1.0f);
  const Vec base = -reference.base;
  Vec even_sum{};
  Vec odd_sum{};
  for (int32_t h = 0; h < kTileTokens / kHalfTokens; ++h) {
    if (ready.values[h].at == nullptr) continue;
    const float* const from = scores + h * kHalfTokens * kStripRows;
    IntVec pairs[kHalfTokens / 2];
#pragma GCC unroll 16
    for (int j = 0; j < kHalfTokens / 2; ++j) {
      const int32_t t = h * kHalfTokens + 2 * j;
      const __mmask16 sees_even = kMasked ? lanes_that_see(sight, t) : __mmask16{0xffff};
      const __mmask16 sees_odd = kMasked ? lanes_that_see(sight, t + 1) : __mmask16{0xffff};
      Vec even = multiply_add(load<Vec>(from + 2 * j * kStripRows), reference.logit_scale, base);
      Vec odd = multiply_add(load<Vec>(from + (2 * j + 1) * kStripRows), reference.logit_scale, base);
      even = exp2_of_lanes(even, sees_even);
      odd = exp2_of_lanes(odd, sees_odd);
      even_sum += even;
      odd_sum += odd;
      if constexpr (kScaled) {
        even *= value_scale;
        odd *= value_scale;
      }
      pairs[j] = pack_bfloat16(even, odd);
      ahead.at_weights();
    }
    transpose(pairs);
#pragma GCC unroll 16
    for (int i = 0; i < kStripRows; ++i) store(weights + (h * kStripRows + i) * kHalfTokens, pairs[i]);
  }
  const Vec sum = multiply_add(load<Vec>(call.states.sum + r), reference.rescale, even_sum + odd_sum);
  store(call.states.sum + r, sum);
  // All visible scores NaN: the state must not look empty.
  const Vec max = load<Vec>(call.states.max + r);
  store(call.states.max + r, Vec(_mm512_mask_mov_ps(max, _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q), sum)));
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
