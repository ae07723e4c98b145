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

/// Lazy rescaling (decision 0040): row_max stays as long as logits exceed it by no more than kRescaleThreshold. So
/// row_max need not be the maximum. A tile whose p have a lane's sum of at most kMaxTileSum needs no maximum: each p is
/// at most kMaxTileSum, and the maximum is less than kRescaleThreshold above row_max, however logits are rounded. p is
/// at most 2^(kPExponentBias + kRescaleThreshold), which float16 holds. Where all p of a lane in a tile, up to 32, are
/// as large as when row_max was new, their sum is still less than kMaxTileSum.
template <typename T>
constexpr float kRescaleThreshold = 12.0f;
template <>
inline constexpr float kRescaleThreshold<__half> = 8.0f;
template <typename T>
constexpr float kMaxTileSum = 0x1p11f;
template <>
inline constexpr float kMaxTileSum<__half> = 0x1p13f;

}  // namespace folio::inline v0::kernels::cuda::sm90
