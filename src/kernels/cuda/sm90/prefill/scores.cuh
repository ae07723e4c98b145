#pragma once

#include <type_traits>

#include "kernels/cuda/sm90/common/softmax.cuh"
#include "kernels/cuda/sm90/prefill/logits.cuh"

/// How scores of a tile's tokens become weights of two of a lane's rows.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

/// Running state of a lane's rows g and g + 8. Sums are this lane's share until they are joined.
struct RowState {
  float top[2];
  float sum[2];
  float scale[2];        ///< of scores, to logits in base-2 units; kPlain, kAlibi: positive
  float slope[2];        ///< ALiBi's, of logits; kAlibi: of scores
  float logit_slope[2];  ///< kAlibi: of logits
  int32_t position[2];   ///< kAlibi: how far the row is behind the lane's column of local token 0
  /// keeps_top: bits of the largest sum of weights that the lane may have of a tile without looking for the maximum;
  /// all ones, which no sum exceeds, where the item has no such row.
  uint32_t most_sum[2];
};

/// Whether weights are made of scores times a positive scale. Rows with another turn their scores before.
constexpr bool has_scale(Variant variant) {
  return variant == Variant::kPlain || variant == Variant::kAlibi;
}

/// Whether a row's top stays as long as its logits grow by no more than kSlack beyond it. Then a tile whose weights,
/// made by the top as it is, have sums of kMostSum at most needs no maximum: each weight is kMostSum at most, and the
/// maximum less than kSlack above what the top was made of, however logits are rounded. Weights are 2^(kPExponentBias +
/// kSlack) at most, which float16 holds; a lane's 32 of a tile, all as they were when the top was new, sum up to less
/// than kMostSum.
constexpr bool keeps_top(Variant variant) {
  return has_scale(variant);
}
template <typename T>
constexpr float kSlack = 12.0f;
template <>
inline constexpr float kSlack<__half> = 8.0f;
template <typename T>
constexpr float kMostSum = 0x1p11f;
template <>
inline constexpr float kMostSum<__half> = 0x1p13f;
/// A row's top behind a tile whose maximum is `most`.
template <typename T, Variant kVariant>
__device__ __forceinline__ float next_top(float top, float most) {
  if constexpr (keeps_top(kVariant)) {
    return most > __fadd_rn(top, kSlack<T>) ? most : top;
  } else {
    return fmaxf(top, most);
  }
}

/// Whether weights are 2^(logit - top) for a top that the cap alone decides: then there is no maximum to be found and
/// nothing to be multiplied with. bfloat16 has the range for it: 2^-kCapRange to 1, or as much more as kLargestCap
/// takes.
template <typename T>
constexpr bool has_fixed_top(Variant variant) {
  return variant == Variant::kCap && std::is_same_v<T, __nv_bfloat16>;
}
constexpr float kCapRange = 104.0f;
static_assert(2.0f * kLargestCap * kLog2E < kCapRange + 41.0f);
/// How far the cap is above that top.
__device__ __forceinline__ float cap_above_top(const Cap& cap) {
  return fmaxf(__fmaf_rn(cap.cap, 2.0f, -kCapRange), 0.0f);
}
/// `shows`: some key.
__device__ __forceinline__ float fixed_top(const Cap& cap, bool shows) {
  return shows ? __fadd_rn(cap.cap, -cap_above_top(cap)) : -INFINITY;
}

/// A score's logit and `add`, in base-2 units. See Cap; kAny has made logits of scores before.
template <Variant kVariant>
__device__ __forceinline__ float logit_and(float add, float score, float scale, const Cap& cap) {
  if constexpr (has_scale(kVariant)) {
    return __fmaf_rn(score, scale, add);
  } else if constexpr (kVariant == Variant::kCap) {
    return cap.logit_and(add, score);
  } else {
    return __fadd_rn(score, add);
  }
}
/// The score with the larger logit.
template <Variant kVariant>
__device__ __forceinline__ float larger(float a, float b) {
  return kVariant == Variant::kCap ? fminf(a, b) : fmaxf(a, b);
}

/// What is added to scaled scores where weights are made by the top `base`. `bias`: see take_in.
template <Variant kVariant>
__device__ __forceinline__ float added(float bias, float base) {
  return kVariant == Variant::kAlibi ? __fadd_rn(bias, -base) : -base;
}

/// Scores become weights, the state takes them in. `bias`: kAlibi: what a lane's logits lack. `factor`: what the values
/// accumulated so far are to be multiplied with.
template <typename T, Variant kVariant, int32_t Count>
requires(!has_fixed_top<T>(kVariant)) __device__ __forceinline__
    void take_in(RowState& state, const Cap& cap, const float (&bias)[2], float (&s)[Count], float (&factor)[2]) {
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
    const float top = next_top<T, kVariant>(
        state.top[h], kBiased ? __fadd_rn(max, -kPExponentBias<T>)
                              : logit_and<kVariant>(-kPExponentBias<T>, max, state.scale[h], cap));
    const float base = top == -INFINITY ? 0.0f : top;
    const float add = added<kVariant>(bias[h], base);
    factor[h] = ptx::ex2_approx(__fadd_rn(state.top[h], -base));
    state.top[h] = top;
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int32_t i = 0; i < Count; i += 4) {
#pragma unroll
      for (int32_t j = 0; j < 2; ++j) {
        float& x = s[i + 2 * h + j];
        x = ptx::ex2_approx(logit_and<kVariant>(add, x, state.scale[h], cap));
        sums[j] = __fadd_rn(sums[j], x);
      }
    }
    state.sum[h] = __fmaf_rn(state.sum[h], factor[h], __fadd_rn(sums[0], sums[1]));
  }
}

/// Of eight of a lane's scores, four of each row, how many are on their way to weights at once, see take_in_capped.
constexpr int32_t kEightsUnderWay = 3;

/// Scores become weights with a fixed top, the state takes them in: exponentials, shared reciprocals (see cap_scores),
/// exponentials again. ptxas would take the first exponentials of all scores, then all that is multiplied, then the
/// last ones of all, and the unit that makes exponentials would rest meanwhile. So eights of scores wait for sums of
/// weights of earlier ones, where nothing is masked: what is added to them, the lesser of such a sum and 0, is 0. There
/// a NaN score may have a weight of 0, but then its neighbours' weights are NaN.
template <bool Masked, int32_t Count>
__device__ __forceinline__ void take_in_capped(RowState& state, const Cap& cap, const RowInfo& rows, int32_t first_row,
                                               int32_t first, float (&s)[Count]) {
  if constexpr (Masked) mask_scores(rows, first_row, first, 0.0f, s);  // or what they share would be NaN
  const float by[2] = {__fmul_rn(state.scale[0], cap.slope), __fmul_rn(state.scale[1], cap.slope)};
  const float above = cap_above_top(cap);
  const float to_logits = -2.0f * Cap::kUnit * cap.cap;
  float sums[Count / 8 + 1][2][2] = {};  // of weights of the eights before; of a row's even and odd tokens
#pragma unroll
  for (int32_t n = 0; n < Count / 8; ++n) {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const int32_t first_of_four = 8 * n + 2 * h;
      float parts[4];
#pragma unroll
      for (int32_t j = 0; j < 4; ++j) {
        const bool waits = !Masked && n >= kEightsUnderWay;
        const float zero = waits ? fminf(sums[n + 1 - kEightsUnderWay][h][j % 2], 0.0f) : 0.0f;
        parts[j] = cap.part<!Masked>(s[first_of_four + j / 2 * 4 + j % 2], by[h], zero);
      }
      const float low = __fmul_rn(parts[0], parts[1]);
      const float high = __fmul_rn(parts[2], parts[3]);
      const float all = __fmul_rn(ptx::rcp_approx(__fmul_rn(low, high)), to_logits);
      const float of[2] = {__fmul_rn(all, high), __fmul_rn(all, low)};
#pragma unroll
      for (int32_t j = 0; j < 4; ++j) {
        float& x = s[first_of_four + j / 2 * 4 + j % 2];
        x = ptx::ex2_approx(__fmaf_rn(of[j / 2], parts[j ^ 1], above));
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
  for (int32_t h = 0; h < 2; ++h) state.sum[h] = __fadd_rn(state.sum[h], __fadd_rn(all_sums[h][0], all_sums[h][1]));
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
