#pragma once

#include "kernels/cuda/common/mask.cuh"
#include "kernels/cuda/sm90/common/softmax.cuh"
#include "kernels/cuda/sm90/decode/shared_state.cuh"

/// Scores of a tile's 16 tokens against columns of eight rows, as S^T = K Q^T leaves them: with g = lane / 4 and
/// t = lane % 4, a lane's four of column tile n belong to tokens g (two) and g + 8 and to rows 8n + 2t and 8n + 2t + 1.
/// Arithmetic is written out, so that a row's bits do not depend on how many columns there are.
namespace folio::inline v0::kernels::cuda::sm90::decode {

/// Weights are 2^(logit - top): their maximum is 2^kWeightShift, which keeps float16 weights of keys that matter little
/// above its subnormal numbers.
template <typename T>
constexpr float kWeightShift = 0.0f;
template <>
inline constexpr float kWeightShift<__half> = 12.0f;

/// How far a row's logits may grow beyond its `top`, in base-2 units, before that follows: sums are rescaled seldom,
/// and weights, up to 2^(kSlack + kWeightShift), stay in their type's range.
template <typename T>
constexpr float kSlack = 8.0f;
template <>
inline constexpr float kSlack<__half> = 3.0f;

/// Running state of a lane's rows. Sums are this lane's share until they are joined.
template <int32_t Columns>
struct RowState {
  float top[Columns][2];
  float sum[Columns][2];
  float scale[Columns][2];
};

/// One product as a logit in base-2 units, with what few batches have: soft cap, ALiBi, custom mask.
__device__ __forceinline__ float general_logit(const AttentionParams& params, const ItemContext& context, int32_t row,
                                               int32_t token, float product) {
  float x = __fmul_rn(product, context.scale[row]);
  if (has_bias(params)) {
    if (params.soft_cap != 0.0f) x = soft_capped(x, params.soft_cap, 2.0f * kLog2E / params.soft_cap);
    if (params.alibi_slopes != nullptr) {
      const int64_t key = context.first_pos + position_offset(context.shard, static_cast<uint32_t>(token));
      const int64_t apart = context.position[row] - key;
      x = __fadd_rn(x, -__fmul_rn(context.slope[row], static_cast<float>(apart < 0 ? -apart : apart)));
    }
    x = __fmul_rn(x, kLog2E);
  }
  return context.custom && !is_visible(params, context, row, token) ? -INFINITY : x;
}

/// All of a lane's products, one after the other in shared memory: a loop instead of as many copies of its body. There
/// is no local memory: its first touch takes 2 microseconds. `scratch`: the lane's floats, 32 apart.
template <int32_t Columns>
__device__ __forceinline__ void to_general_logits(const AttentionParams& params, const ItemContext& context,
                                                  int32_t first, int32_t lane, float* scratch, float (&s)[Columns][4]) {
#pragma unroll
  for (int32_t i = 0; i < Columns * 4; ++i) scratch[32 * i] = s[i / 4][i % 4];
#pragma unroll 1
  for (int32_t i = 0; i < Columns * 4; ++i) {
    scratch[32 * i] = general_logit(params, context, i / 4 * 8 + lane % 4 * 2 + i % 2, first + lane / 4 + i / 2 % 2 * 8,
                                    scratch[32 * i]);
  }
#pragma unroll
  for (int32_t i = 0; i < Columns * 4; ++i) s[i / 4][i % 4] = scratch[32 * i];
}

/// Logits of tokens that a lane's rows do not see become -infinity.
template <int32_t Columns>
__device__ __forceinline__ void mask_logits(const ItemContext& context, int32_t first, int32_t lane,
                                            float (&s)[Columns][4]) {
#pragma unroll
  for (int32_t n = 0; n < Columns; ++n) {
#pragma unroll
    for (int32_t j = 0; j < 2; ++j) {
      const int32_t row = 8 * n + lane % 4 * 2 + j;
      const int32_t begin = context.visible_begin[row] - first - lane / 4;
      const int32_t end = context.visible_end[row] - first - lane / 4;
      if (begin > 0 || end <= 0) s[n][j] = -INFINITY;
      if (begin > 8 || end <= 8) s[n][2 + j] = -INFINITY;
    }
  }
}

/// Logits become weights, the state takes them in. Maxima are exchanged between lanes only where one of the warp's
/// grows. Returns whether that happened: then `factor` is what the values accumulated so far are to be multiplied with.
template <typename T, int32_t Columns>
__device__ __forceinline__ bool to_weights(RowState<Columns>& state, float (&s)[Columns][4],
                                           float (&factor)[Columns][2]) {
  bool grows = false;
#pragma unroll
  for (int32_t n = 0; n < Columns; ++n) {
#pragma unroll
    for (int32_t j = 0; j < 2; ++j) {
      factor[n][j] = __fadd_rn(fmaxf(s[n][j], s[n][2 + j]), -kWeightShift<T>);  // the maximum, for now
      grows = grows || factor[n][j] > __fadd_rn(state.top[n][j], kSlack<T>);
    }
  }
  const bool any = __any_sync(kAllLanes, grows);
  if (any) {
#pragma unroll
    for (int32_t n = 0; n < Columns; ++n) {
#pragma unroll
      for (int32_t j = 0; j < 2; ++j) {
        float most = factor[n][j];
#pragma unroll
        for (int32_t step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, step));
        const float top = most > __fadd_rn(state.top[n][j], kSlack<T>) ? most : state.top[n][j];
        const float base = top == -INFINITY ? 0.0f : top;
        factor[n][j] = ptx::ex2_approx(__fadd_rn(state.top[n][j], -base));
        state.top[n][j] = top;
        state.sum[n][j] = __fmul_rn(state.sum[n][j], factor[n][j]);
      }
    }
  }
#pragma unroll
  for (int32_t n = 0; n < Columns; ++n) {
#pragma unroll
    for (int32_t j = 0; j < 2; ++j) {
      const float base = state.top[n][j] == -INFINITY ? 0.0f : state.top[n][j];
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) {
        float& x = s[n][2 * h + j];
        x = ptx::ex2_approx(__fadd_rn(x, -base));
        state.sum[n][j] = __fadd_rn(state.sum[n][j], x);
      }
    }
  }
  return any;
}

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
