#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "folio/types/float_convert.hpp"
#include "kernels/cuda/attention_kernel.hpp"
#include "kernels/cuda/common/scale.cuh"

/// What attention kernels share: places of tokens, folding of states and the end of a row.
namespace folio::inline v0::kernels::cuda {

constexpr float kLog2E = 1.44269504088896341f;
constexpr double kLn2 = 0.693147180559945309417;

/// Offset from the segment's first position of a local token; scheduler::shard_offset in 32 bits.
__device__ __forceinline__ uint32_t position_offset(const KvShard& shard, uint32_t token) {
  if (shard.world == 1) return token;
  const auto interleave = static_cast<uint32_t>(shard.interleave);
  const uint32_t stripe = token / interleave;
  return stripe * static_cast<uint32_t>(shard.world) * interleave + static_cast<uint32_t>(shard.rank) * interleave +
         (token - stripe * interleave);
}

/// A token's page and its place in it; ragged: page 0 and the token of the tensor.
struct Place {
  int64_t page = 0;
  int64_t in_page = 0;
  __device__ int64_t in(const KvStrides& strides, int32_t head) const {
    return page * strides.page + in_page * strides.token + head * strides.head;
  }
};
__device__ inline Place locate(const SegmentParams& segment, const scheduler::WorkTile& item, int32_t token) {
  if (!segment.paged) return {0, int64_t{segment.indptr[item.kv_row]} + token};
  const int32_t column = token / segment.page_size;
  const int64_t begin = segment.indptr != nullptr ? int64_t{segment.indptr[item.kv_row]}
                                                  : item.kv_row * segment.row_stride + segment.first_column;
  return {segment.indices[begin + column], token - column * segment.page_size};
}

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

/// How a row ends: the sink joins the denominator, the accumulated values are multiplied with `factor`, the LSE is
/// written by the caller's first thread.
struct RowEnd {
  float factor;
  float sum;
  float max;
  bool empty;
};
__device__ inline RowEnd end_row(const AttentionParams& params, int32_t q_head, float max, float sum) {
  RowEnd end{1.0f, sum, max, is_empty(max, sum)};
  const float sink = params.sinks == nullptr ? -INFINITY : params.sinks[q_head] * kLog2E;
  if (sink != -INFINITY) {
    const float most = fmaxf(max, sink);
    end.factor = end.empty ? 0.0f : exp2f(max - most);
    end.sum = fmaf(end.empty ? 0.0f : sum, end.factor, exp2f(sink - most));
    end.max = most;
    end.empty = false;
  }
  end.factor = end.empty ? 0.0f : end.factor / end.sum;
  return end;
}

__device__ inline void write_lse(const AttentionParams& params, int32_t token, int32_t q_head, const RowEnd& end) {
  if (params.lse.data == nullptr) return;
  // In base 2 the maximum is large beside the logarithm; double keeps what base e would lose.
  const double lse2 = end.empty ? -INFINITY : static_cast<double>(end.max) + log2(static_cast<double>(end.sum));
  params.lse.data[token * params.lse.token_stride + q_head * params.lse.head_stride] =
      static_cast<float>(params.lse.base == LseBase::k2 ? lse2 : lse2 * kLn2);
}

__device__ inline float row_value(const RowEnd& end, float acc) {
  return end.empty ? 0.0f : acc * end.factor + 0.0f;
}

/// A component of a row, of any type but NVFP4.
__device__ inline void write_out(const AttentionParams& params, int32_t token, int32_t q_head, int32_t d, float acc,
                                 const RowEnd& end) {
  const float value = row_value(end, acc);
  const int64_t at = token * params.out_token_stride + q_head * params.out_head_stride + d;
  switch (params.out_dtype) {
    case DType::kFloat16: static_cast<__half*>(params.out)[at] = __float2half_rn(value); break;
    case DType::kBFloat16: static_cast<__nv_bfloat16*>(params.out)[at] = __float2bfloat16_rn(value); break;
    case DType::kFloat8E4M3:
      static_cast<uint8_t*>(params.out)[at] = float_to_fp8_e4m3(value / scale_at(params.out_scale, 0, 0));
      break;
    case DType::kFloat8E5M2:
      static_cast<uint8_t*>(params.out)[at] = float_to_fp8_e5m2(value / scale_at(params.out_scale, 0, 0));
      break;
    default: static_cast<float*>(params.out)[at] = value; break;
  }
}

}  // namespace folio::inline v0::kernels::cuda
