#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/common/row_state.cuh"
#include "ptx/mma.cuh"

/// What the online softmax of several kernels has in common.
namespace folio::inline v0::kernels::cuda::sm90 {

/// p is 2^(logit - row_max + kPExponentBias): a row's largest p is 2^kPExponentBias. The bias keeps float16
/// probabilities of unimportant keys out of the subnormal numbers.
template <typename T>
constexpr float kPExponentBias = 0.0f;
template <>
inline constexpr float kPExponentBias<__half> = 6.0f;

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

}  // namespace folio::inline v0::kernels::cuda::sm90
