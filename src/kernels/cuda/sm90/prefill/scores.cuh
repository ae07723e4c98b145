#pragma once

#include <type_traits>

#include "kernels/cuda/sm90/prefill/logits.cuh"

/// How scores of a tile's tokens become weights of two of a lane's rows.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

/// Weights are 2^(logit - top): their maximum is 2^kWeightShift, which keeps float16 weights of keys that matter little
/// above its subnormal numbers.
template <typename T>
constexpr float kWeightShift = 0.0f;
template <>
inline constexpr float kWeightShift<__half> = 12.0f;

/// Running state of a lane's rows g and g + 8. Sums are this lane's share until they are joined.
struct RowState {
  float top[2];
  float sum[2];
  float scale[2];  ///< of scores, to logits in base-2 units; kPlain, kAlibi: positive
  float slope[2];  ///< ALiBi's, of logits; kAlibi: of scores
  float logit_slope[2];  ///< kAlibi: of logits
  int32_t position[2];   ///< kAlibi: how far the row is behind the lane's column of local token 0
};

/// Whether weights are made of scores times a positive scale. Rows with another turn their scores before.
constexpr bool has_scale(Variant variant) {
  return variant == Variant::kPlain || variant == Variant::kAlibi;
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
/// `shows`: some key.
__device__ __forceinline__ float fixed_top(const Cap& cap, bool shows) {
  return shows ? __fadd_rn(cap.cap, -fmaxf(__fmaf_rn(cap.cap, 2.0f, -kCapRange), 0.0f)) : -INFINITY;
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
    const float top =
        fmaxf(state.top[h], kBiased ? __fadd_rn(max, -kWeightShift<T>)
                                    : logit_and<kVariant>(-kWeightShift<T>, max, state.scale[h], cap));
    const float base = top == -INFINITY ? 0.0f : top;
    const float add = kBiased ? __fadd_rn(bias[h], -base) : -base;
    factor[h] = ptx::exp2_approximate(__fadd_rn(state.top[h], -base));
    state.top[h] = top;
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int32_t i = 0; i < Count; i += 4) {
#pragma unroll
      for (int32_t j = 0; j < 2; ++j) {
        float& x = s[i + 2 * h + j];
        x = ptx::exp2_approximate(logit_and<kVariant>(add, x, state.scale[h], cap));
        sums[j] = __fadd_rn(sums[j], x);
      }
    }
    state.sum[h] = __fmaf_rn(state.sum[h], factor[h], __fadd_rn(sums[0], sums[1]));
  }
}

/// The same with a fixed top; `factor` is not used.
template <typename T, Variant kVariant, int32_t Count>
requires(has_fixed_top<T>(kVariant)) __device__ __forceinline__
    void take_in(RowState& state, const Cap& cap, const float (&)[2], float (&s)[Count], float (&)[2]) {
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    const float top = fixed_top(cap, true);
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int32_t i = 0; i < Count; i += 4) {
#pragma unroll
      for (int32_t j = 0; j < 2; ++j) {
        float& x = s[i + 2 * h + j];
        x = ptx::exp2_approximate(cap.logit_and(-top, x));
        sums[j] = __fadd_rn(sums[j], x);
      }
    }
    state.sum[h] = __fadd_rn(state.sum[h], __fadd_rn(sums[0], sums[1]));
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
