#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/cuda/attention_kernel.hpp"

/// What the attention and the merge kernel share: sizes, element access, folding of states and the end of a row.
namespace folio::inline v0::kernels::cuda::plain {

constexpr int32_t kThreads = 256;
constexpr int32_t kWarps = kThreads / 32;
constexpr int32_t kRows = 16;    ///< most packed rows of an item
constexpr int32_t kTokens = 32;  ///< keys of a tile: one for each lane
constexpr int32_t kMaxHeadDim = 256;
constexpr int32_t kRowPadding = 2;  ///< elements between rows in shared memory, so that lanes meet different banks
constexpr float kLog2E = 1.44269504088896341f;
constexpr double kLn2 = 0.693147180559945309417;

__device__ inline float to_float(__half value) {
  return __half2float(value);
}
__device__ inline float to_float(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
__device__ inline float2 to_float2(__half2 value) {
  return __half22float2(value);
}
__device__ inline float2 to_float2(__nv_bfloat162 value) {
  return __bfloat1622float2(value);
}

template <typename T>
struct Pair;
template <>
struct Pair<__half> {
  using Type = __half2;
};
template <>
struct Pair<__nv_bfloat16> {
  using Type = __nv_bfloat162;
};

/// Nothing was seen: a NaN in a sum stays visible even where every logit was NaN.
__device__ inline bool is_empty(float max, float sum) {
  return max == -INFINITY && sum == 0.0f;
}

/// What both states are to be multiplied with when they are brought to one maximum.
struct Fold {
  float max;
  float mine;
  float other;
};
__device__ inline Fold fold_factors(float max, float sum, float other_max, float other_sum) {
  if (is_empty(other_max, other_sum)) return {max, 1.0f, 0.0f};
  if (is_empty(max, sum)) return {other_max, 0.0f, 1.0f};
  const float most = fmaxf(max, other_max);
  return {most, max == most ? 1.0f : exp2f(max - most), other_max == most ? 1.0f : exp2f(other_max - most)};
}

/// Both states' values or sums at one maximum. Workers and merges fold alike, bit for bit, which the compiler's own
/// choice of what to contract would not promise.
__device__ inline float fold(const Fold& factors, float mine, float other) {
  return fmaf(mine, factors.mine, __fmul_rn(other, factors.other));
}

/// How a row ends: the sink joins the denominator, the sum divides, the LSE is written by the caller's first thread.
struct RowEnd {
  float factor;
  float sum;
  float max;
  bool empty;
};
__device__ inline RowEnd end_row(const AttentionParams& params, int32_t q_head, float max, float sum) {
  RowEnd end{1.0f, sum, max, is_empty(max, sum)};
  if (params.sinks == nullptr) return end;
  const float sink = params.sinks[q_head] * kLog2E;
  if (sink == -INFINITY) return end;
  const float most = fmaxf(max, sink);
  end.factor = end.empty ? 0.0f : exp2f(max - most);
  end.sum = fmaf(end.empty ? 0.0f : sum, end.factor, exp2f(sink - most));
  end.max = most;
  end.empty = false;
  return end;
}

__device__ inline void write_lse(const AttentionParams& params, int32_t token, int32_t q_head, const RowEnd& end) {
  if (params.lse.data == nullptr) return;
  // In base 2 the maximum is large beside the logarithm; double keeps what base e would lose.
  const double lse2 = end.empty ? -INFINITY : static_cast<double>(end.max) + log2(static_cast<double>(end.sum));
  params.lse.data[token * params.lse.token_stride + q_head * params.lse.head_stride] =
      static_cast<float>(params.lse.base == LseBase::k2 ? lse2 : lse2 * kLn2);
}

__device__ inline void write_out(const AttentionParams& params, int32_t token, int32_t q_head, int32_t d, float acc,
                                 const RowEnd& end) {
  const float value = end.empty ? 0.0f : acc * end.factor / end.sum + 0.0f;
  const int64_t at = token * params.out_token_stride + q_head * params.out_head_stride + d;
  switch (params.out_dtype) {
    case DType::kFloat16: static_cast<__half*>(params.out)[at] = __float2half_rn(value); break;
    case DType::kBFloat16: static_cast<__nv_bfloat16*>(params.out)[at] = __float2bfloat16_rn(value); break;
    default: static_cast<float*>(params.out)[at] = value; break;
  }
}

}  // namespace folio::inline v0::kernels::cuda::plain
