#pragma once

#include <type_traits>

#include "kernels/cuda/sm90/common/softmax.cuh"
#include "kernels/cuda/sm90/prefill/smem.cuh"
#include "ptx/math.cuh"

/// Softmax of a tile's scores for two of a lane's rows, as GEMM0 leaves them (see ptx/wgmma.cuh): logits in base-2
/// units (scale, soft cap, ALiBi), then online softmax. Arithmetic is written out with rounding intrinsics, so that
/// every instantiation computes the same bits.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

/// A soft cap of logits in base-2 units: cap * tanh(x / cap) = cap - 2 cap r with r = 1 / (2^(a x) + 1). Until p is
/// computed, r in units of 2^-kMost replaces the score: nothing else of it is needed. A smaller r is a larger logit,
/// and r of a masked score is infinite.
struct SoftCap {
  static constexpr float kMost = 30.0f;
  static constexpr float kUnit = 0x1p-30f;
  float cap;
  float slope;  ///< a
  __device__ __forceinline__ explicit SoftCap(float soft_cap) : cap(soft_cap * kLog2E), slope(2.0f / soft_cap) {}
  /// The logit plus `add`.
  __device__ __forceinline__ float logit_plus(float add, float r) const {
    return __fmaf_rn(r, -2.0f * kUnit * cap, __fadd_rn(cap, add));
  }
  /// (2^(a x) + 1) * kUnit, at most 1: beyond, r is nothing to a logit. Saturation makes 0 of NaN. `zero` orders
  /// instructions: see capped_softmax.
  template <bool Saturate>
  __device__ __forceinline__ float denominator(float score, float by, float zero = 0.0f) const {
    const float x = __fmaf_rn(score, by, zero);
    if constexpr (Saturate) {
      return ptx::fma_sat(ptx::ex2_approx(x), kUnit, kUnit);
    } else {
      return __fmaf_rn(ptx::ex2_approx(ptx::min_nan(x, kMost)), kUnit, kUnit);
    }
  }
};

/// Replaces scores by r. Four of a row share a reciprocal, because exponentials and reciprocals take most of the time.
/// Where saturation hides a NaN, r of its neighbour is NaN. So where tokens may be masked (`Masked`), exponents are
/// limited instead, with the same bits.
template <bool Masked, int32_t Count>
__device__ __forceinline__ void cap_scores(const SoftCap& cap, const float (&scale)[2], float (&s)[Count]) {
  static_assert(Count % 8 == 0);
  const float by[2] = {__fmul_rn(scale[0], cap.slope), __fmul_rn(scale[1], cap.slope)};
#pragma unroll
  for (int32_t n = 0; n < Count / 4; ++n) {
    const int32_t i = n / 2 * 8 + n % 2 * 2;
    float denominators[4];
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) denominators[j] = cap.denominator<!Masked>(s[i + j / 2 * 4 + j % 2], by[n % 2]);
    const float low = __fmul_rn(denominators[0], denominators[1]);
    const float high = __fmul_rn(denominators[2], denominators[3]);
    const float all = ptx::rcp_approx(__fmul_rn(low, high));
    const float of_low = __fmul_rn(all, high);
    const float of_high = __fmul_rn(all, low);
    s[i] = __fmul_rn(of_low, denominators[1]);
    s[i + 1] = __fmul_rn(of_low, denominators[0]);
    s[i + 4] = __fmul_rn(of_high, denominators[3]);
    s[i + 5] = __fmul_rn(of_high, denominators[2]);
  }
}

/// ALiBi of keys at consecutive positions, in two parts. `apart`: how far a row is behind the lane's first token. The
/// distance up to the lane's last token, or up to the row where that comes first, is one number of the row: `bias`, in
/// units of logits. The rest is subtracted from scores, by `slope` in their units. Where all tokens of the lane stand
/// at or before the row, as in every tile without a mask, that is a constant of the token. Neither part exceeds the
/// distance, so neither rounds more than it. Which path a score takes depends on its row and its token alone, and both
/// give the same bits.
template <bool Masked, int32_t Count>
__device__ __forceinline__ void add_bias(const float (&slope)[2], const float (&logit_slope)[2],
                                         const int32_t (&apart)[2], float (&s)[Count], float (&bias)[2]) {
  constexpr int32_t kLast = Count / 4 * 8 - 7;
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    const int32_t end = Masked ? min(apart[h], kLast) : kLast;
    bias[h] = -__fmul_rn(logit_slope[h], static_cast<float>(apart[h] - end));
    const float from = static_cast<float>(end);
#pragma unroll
    for (int32_t i = 0; i < Count / 2; ++i) {
      float& x = s[i / 2 * 4 + 2 * h + i % 2];
      const int32_t column = i / 2 * 8 + i % 2;
      const float distance =
          Masked ? fabsf(__fadd_rn(from, -static_cast<float>(column))) : static_cast<float>(kLast - column);
      x = __fmaf_rn(-slope[h], distance, x);
    }
  }
}

/// Scales, with ALiBi of keys at any positions: those of shards are not consecutive.
template <int32_t Count>
__device__ __forceinline__ void add_bias_of_shard(const TileContext& context, const RowInfo& rows, int32_t first_row,
                                                  int32_t first, const float (&scale)[2], const float (&slope)[2],
                                                  float (&s)[Count]) {
#pragma unroll
  for (int32_t i = 0; i < Count; ++i) {
    const auto token = static_cast<uint32_t>(first + i / 4 * 8 + i % 2);
    const int64_t key = context.first_pos + position_offset(context.shard, token);
    const int64_t apart = rows.position[first_row + i / 2 % 2 * 8] - key;
    s[i] =
        __fmaf_rn(s[i], scale[i / 2 % 2], -__fmul_rn(slope[i / 2 % 2], static_cast<float>(apart < 0 ? -apart : apart)));
  }
}

/// Scale, soft cap and ALiBi, as far as present.
template <int32_t Count>
__device__ __forceinline__ void to_any_logits(const AttentionParams& params, const SoftCap& cap,
                                              const TileContext& context, const RowInfo& rows, int32_t first_row,
                                              int32_t first, const float (&scale)[2], const float (&slope)[2],
                                              float (&s)[Count]) {
  float left[2] = {scale[0], scale[1]};
  if (params.soft_cap != 0.0f) {
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) {
      const float e = ptx::ex2_approx(__fmul_rn(s[i], __fmul_rn(scale[i / 2 % 2], cap.slope)));
      s[i] = __fmaf_rn(ptx::rcp_approx(__fadd_rn(e, 1.0f)), -2.0f * cap.cap, cap.cap);
    }
    left[0] = left[1] = 1.0f;
  }
  if (params.alibi_slopes != nullptr) {
    add_bias_of_shard(context, rows, first_row, first, left, slope, s);
  } else {
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) s[i] = __fmul_rn(s[i], left[i / 2 % 2]);
  }
}

/// Softmax state of a lane's rows g and g + 8. row_sum is the lane's share until the epilogue.
struct SoftmaxState {
  float row_max[2];
  float row_sum[2];
  float scale[2];        ///< of scores, to logits in base-2 units; positive where has_scale
  float slope[2];        ///< of ALiBi, in units of logits; kAlibi: of scores
  float logit_slope[2];  ///< kAlibi: of ALiBi, in units of logits
  int32_t position[2];   ///< kAlibi: how far the row is behind the lane's column of local token 0
  /// rescales_lazily: bits of the largest sum of p that the lane may have of a tile without its maximum; all ones,
  /// which no sum exceeds, where the work tile has no such row.
  uint32_t max_tile_sum[2];
};

/// Whether logits are scores times a positive scale. Scores of rows with another scale go through negate_scores first.
constexpr bool has_scale(Variant variant) {
  return variant == Variant::kPlain || variant == Variant::kAlibi || variant == Variant::kMask;
}

/// Whether rescaling is lazy: see kRescaleThreshold.
constexpr bool rescales_lazily(Variant variant) {
  return has_scale(variant);
}
/// row_max after a tile whose maximum is `most`.
template <typename T, Variant kVariant>
__device__ __forceinline__ float next_row_max(float row_max, float most) {
  if constexpr (rescales_lazily(kVariant)) {
    return most > __fadd_rn(row_max, kRescaleThreshold<T>) ? most : row_max;
  } else {
    return fmaxf(row_max, most);
  }
}

/// Whether the soft cap alone decides row_max: then no maximum is computed and nothing rescaled. bfloat16 p has the
/// range for it, 2^-kCapRange to 1, or as much more as kMaxFixedCap takes.
template <typename T>
constexpr bool has_fixed_row_max(Variant variant) {
  return variant == Variant::kCap && std::is_same_v<T, __nv_bfloat16>;
}
constexpr float kCapRange = 104.0f;
static_assert(2.0f * kMaxFixedCap * kLog2E < kCapRange + 41.0f);
/// How far the cap is above that row_max.
__device__ __forceinline__ float cap_above_row_max(const SoftCap& cap) {
  return fmaxf(__fmaf_rn(cap.cap, 2.0f, -kCapRange), 0.0f);
}
/// `any_visible`: the row sees some token.
__device__ __forceinline__ float fixed_row_max(const SoftCap& cap, bool any_visible) {
  return any_visible ? __fadd_rn(cap.cap, -cap_above_row_max(cap)) : -INFINITY;
}

/// The logit of a score plus `add`, in base-2 units. See SoftCap; kAny has replaced scores by logits before.
template <Variant kVariant>
__device__ __forceinline__ float logit_plus(float add, float score, float scale, const SoftCap& cap) {
  if constexpr (has_scale(kVariant)) {
    return __fmaf_rn(score, scale, add);
  } else if constexpr (kVariant == Variant::kCap) {
    return cap.logit_plus(add, score);
  } else {
    return __fadd_rn(score, add);
  }
}
/// The score with the larger logit.
template <Variant kVariant>
__device__ __forceinline__ float larger(float a, float b) {
  return kVariant == Variant::kCap ? fminf(a, b) : fmaxf(a, b);
}

/// What is added to a scaled score before it is exponentiated. `base`: row_max, or 0 where that is -infinity. `bias`:
/// see online_softmax.
template <Variant kVariant>
__device__ __forceinline__ float addend(float bias, float base) {
  return kVariant == Variant::kAlibi ? __fadd_rn(bias, -base) : -base;
}

/// Online softmax of a tile: replaces scores by p and updates row_max and row_sum. `bias`: kAlibi: what the lane's
/// logits lack. `factor`: rescales the output accumulated so far.
template <typename T, Variant kVariant, int32_t Count>
requires(!has_fixed_row_max<T>(kVariant)) __device__ __forceinline__
    void online_softmax(SoftmaxState& state, const SoftCap& cap, const float (&bias)[2], float (&s)[Count],
                        float (&factor)[2]) {
  constexpr bool kBiased = kVariant == Variant::kAlibi;
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    float most[4] = {s[2 * h], s[2 * h + 1], s[2 * h + 4], s[2 * h + 5]};
#pragma unroll
    for (int32_t i = 8; i < Count; i += 4) {
      most[i / 2 % 4] = larger<kVariant>(most[i / 2 % 4], s[i + 2 * h]);
      most[i / 2 % 4 + 1] = larger<kVariant>(most[i / 2 % 4 + 1], s[i + 2 * h + 1]);
    }
    float max = larger<kVariant>(larger<kVariant>(most[0], most[1]), larger<kVariant>(most[2], most[3]));
    if constexpr (kBiased) max = __fmaf_rn(max, state.scale[h], bias[h]);
    max = larger<kVariant>(max, __shfl_xor_sync(kAllLanes, max, 1));
    max = larger<kVariant>(max, __shfl_xor_sync(kAllLanes, max, 2));
    const float row_max = next_row_max<T, kVariant>(
        state.row_max[h], kBiased ? __fadd_rn(max, -kPExponentBias<T>)
                                  : logit_plus<kVariant>(-kPExponentBias<T>, max, state.scale[h], cap));
    const float base = row_max == -INFINITY ? 0.0f : row_max;
    const float add = addend<kVariant>(bias[h], base);
    factor[h] = ptx::ex2_approx(__fadd_rn(state.row_max[h], -base));
    state.row_max[h] = row_max;
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int32_t i = 0; i < Count; i += 4) {
#pragma unroll
      for (int32_t j = 0; j < 2; ++j) {
        float& x = s[i + 2 * h + j];
        x = ptx::ex2_approx(logit_plus<kVariant>(add, x, state.scale[h], cap));
        sums[j] = __fadd_rn(sums[j], x);
      }
    }
    state.row_sum[h] = __fmaf_rn(state.row_sum[h], factor[h], __fadd_rn(sums[0], sums[1]));
  }
}

/// Groups of eight of a lane's scores, four of each row, whose exponentials are in flight at once. See capped_softmax.
constexpr int32_t kGroupsInFlight = 3;

/// The same with a fixed row_max: exponentials, shared reciprocals (see cap_scores), exponentials again. ptxas would
/// schedule the first exponentials of all scores, then all multiplications, then the last exponentials, and the MUFU
/// would idle in between. So groups of eight scores wait for row sums of earlier groups, where nothing is masked: the
/// lesser of such a sum and 0, which is 0, is added to their exponents. With a NaN score p may be 0 there, but then p
/// of its neighbour is NaN.
template <bool Masked, int32_t Count>
__device__ __forceinline__ void capped_softmax(SoftmaxState& state, const SoftCap& cap, const RowInfo& rows,
                                               int32_t first_row, int32_t first, float (&s)[Count]) {
  if constexpr (Masked) mask_scores(rows, first_row, first, 0.0f, s);  // or the shared reciprocal would be NaN
  const float by[2] = {__fmul_rn(state.scale[0], cap.slope), __fmul_rn(state.scale[1], cap.slope)};
  const float above = cap_above_row_max(cap);
  const float to_logits = -2.0f * SoftCap::kUnit * cap.cap;
  float sums[Count / 8 + 1][2][2] = {};  // of p of the groups before; of a row's even and odd tokens
#pragma unroll
  for (int32_t n = 0; n < Count / 8; ++n) {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const int32_t first_of_four = 8 * n + 2 * h;
      float denominators[4];
#pragma unroll
      for (int32_t j = 0; j < 4; ++j) {
        const bool waits = !Masked && n >= kGroupsInFlight;
        const float zero = waits ? fminf(sums[n + 1 - kGroupsInFlight][h][j % 2], 0.0f) : 0.0f;
        denominators[j] = cap.denominator<!Masked>(s[first_of_four + j / 2 * 4 + j % 2], by[h], zero);
      }
      const float low = __fmul_rn(denominators[0], denominators[1]);
      const float high = __fmul_rn(denominators[2], denominators[3]);
      const float all = __fmul_rn(ptx::rcp_approx(__fmul_rn(low, high)), to_logits);
      const float of[2] = {__fmul_rn(all, high), __fmul_rn(all, low)};
#pragma unroll
      for (int32_t j = 0; j < 4; ++j) {
        float& x = s[first_of_four + j / 2 * 4 + j % 2];
        x = ptx::ex2_approx(__fmaf_rn(of[j / 2], denominators[j ^ 1], above));
        if constexpr (!Masked) sums[n + 1][h][j % 2] = __fadd_rn(sums[n + j / 2][h][j % 2], x);
      }
    }
  }
  float(&all_sums)[2][2] = sums[Count / 8];
  if constexpr (Masked) {
    mask_scores(rows, first_row, first, 0.0f, s);
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) all_sums[i / 2 % 2][i % 2] = __fadd_rn(all_sums[i / 2 % 2][i % 2], s[i]);
  }
#pragma unroll
  for (int32_t h = 0; h < 2; ++h)
    state.row_sum[h] = __fadd_rn(state.row_sum[h], __fadd_rn(all_sums[h][0], all_sums[h][1]));
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
