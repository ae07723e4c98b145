#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/common/epilogue.cuh"
#include "ptx/mma.cuh"

/// What the online softmax of several kernels has in common.
namespace folio::inline v0::kernels::cuda::sm90 {

/// p is 2^(logit - row_max + kPExponentBias): a row's largest p is 2^kPExponentBias. The bias keeps float16
/// probabilities of unimportant keys out of the subnormal numbers.
template <typename T>
constexpr float kPExponentBias = 0.0f;
template <>
inline constexpr float kPExponentBias<__half> = 6.0f;

}  // namespace folio::inline v0::kernels::cuda::sm90
