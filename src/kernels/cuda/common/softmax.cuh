#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/cuda/attention_kernel.hpp"
#include "ptx/mma.cuh"

/// Arithmetic of the online softmax that CUDA kernels share: states of a row in base-2 units and how two become one.
namespace folio::inline v0::kernels::cuda {

constexpr float kLog2E = 1.44269504088896341f;
constexpr double kLn2 = 0.693147180559945309417;

/// No key was visible. The row sum decides too, so that NaN shows even where every logit was NaN.
__device__ inline bool is_empty(float max, float sum) {
  return max == -INFINITY && sum == 0.0f;
}

/// The factors that bring two states of a row to one row max.
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

/// Values or row sums of both states at one row max. All kernels fold with this function, bit for bit; the compiler
/// might contract each expression differently.
__device__ inline float fold(const Fold& factors, float mine, float other) {
  return fmaf(mine, factors.mine, __fmul_rn(other, factors.other));
}

/// Whether logits go through natural units, because they have a soft cap or an ALiBi bias.
__device__ __forceinline__ bool has_bias(const AttentionParams& params) {
  return params.soft_cap != 0.0f || params.alibi_slopes != nullptr;
}

/// cap * tanh(logit / cap) of natural logits, within a few units in the last place of the cap. `two_log2e_per_cap` is
/// 2 * kLog2E / cap.
__device__ __forceinline__ float soft_capped(float logit, float cap, float two_log2e_per_cap) {
  const float e = ptx::ex2_approx(__fmul_rn(logit, two_log2e_per_cap));
  return __fmul_rn(cap, __fmaf_rn(-2.0f, ptx::rcp_approx(__fadd_rn(e, 1.0f)), 1.0f));
}

}  // namespace folio::inline v0::kernels::cuda
