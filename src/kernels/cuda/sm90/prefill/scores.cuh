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
inline constexpr float kWeightShift<__half> = 6.0f;

/// Running state of a lane's rows g and g + 8. Sums are this lane's share until they are joined.
struct RowState {
  float top[2];
  float sum[2];
  float scale[2];  ///< of scores, to logits in base-2 units; kPlain, kAlibi: positive
  float slope[2];  ///< ALiBi's, of logits; kAlibi: of scores
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
/// maximum less than kSlack above what the top was made of, however logits are rounded. Weights are 2^(kWeightShift +
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

/// Scores become weights, the state takes them in. `factor`: what the values accumulated so far are to be multiplied
/// with.
template <typename T, Variant kVariant, int32_t Count>
requires(!has_fixed_top<T>(kVariant)) __device__ __forceinline__
    void take_in(RowState& state, const Cap& cap, float (&s)[Count], float (&factor)[2]) {
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    float most[4] = {s[2 * h], s[2 * h + 1], s[2 * h + 4], s[2 * h + 5]};
#pragma unroll
    for (int32_t i = 8; i < Count; i += 4) {
      most[i / 2 % 4] = larger<kVariant>(most[i / 2 % 4], s[i + 2 * h]);
      most[i / 2 % 4 + 1] = larger<kVariant>(most[i / 2 % 4 + 1], s[i + 2 * h + 1]);
    }
    float max = larger<kVariant>(larger<kVariant>(most[0], most[1]), larger<kVariant>(most[2], most[3]));
    max = larger<kVariant>(max, __shfl_xor_sync(kAllLanes, max, 1));
    max = larger<kVariant>(max, __shfl_xor_sync(kAllLanes, max, 2));
    const float top =
        next_top<T, kVariant>(state.top[h], logit_and<kVariant>(-kWeightShift<T>, max, state.scale[h], cap));
    const float base = top == -INFINITY ? 0.0f : top;
    factor[h] = ptx::exp2_approximate(__fadd_rn(state.top[h], -base));
    state.top[h] = top;
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int32_t i = 0; i < Count; i += 4) {
#pragma unroll
      for (int32_t j = 0; j < 2; ++j) {
        float& x = s[i + 2 * h + j];
        x = ptx::exp2_approximate(logit_and<kVariant>(-base, x, state.scale[h], cap));
        sums[j] = __fadd_rn(sums[j], x);
      }
    }
    state.sum[h] = __fmaf_rn(state.sum[h], factor[h], __fadd_rn(sums[0], sums[1]));
  }
}

/// The same with a fixed top; `factor` is not used.
template <typename T, Variant kVariant, int32_t Count>
requires(has_fixed_top<T>(kVariant)) __device__ __forceinline__
    void take_in(RowState& state, const Cap& cap, float (&s)[Count], float (&)[2]) {
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
