#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "folio/types/float_convert.hpp"
#include "kernels/cuda/common/kv_cache_views.cuh"
#include "kernels/cuda/common/mask.cuh"
#include "kernels/cuda/common/softmax.cuh"

/// The end of a row: the sink, the division by the row sum, the LSE and the output.
namespace folio::inline v0::kernels::cuda {

/// How a row ends: the sink joins row_sum, `factor` is 1 / row_sum.
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
  // In base 2 the maximum is large beside the logarithm; double keeps what base e would lose. float16 kernels scale p
  // by a power of two, whose own logarithm log2 does not give exactly.
  int exponent = 0;
  const float fraction = 2.0f * frexpf(end.sum, &exponent);  // [1, 2)
  const double lse2 =
      end.empty ? -INFINITY : static_cast<double>(end.max) + (exponent - 1) + log2(static_cast<double>(fraction));
  params.lse.data[token * params.lse.token_stride + q_head * params.lse.head_stride] =
      static_cast<float>(params.lse.base == LseBase::k2 ? lse2 : lse2 * kLn2);
}

__device__ inline float row_value(const RowEnd& end, float acc) {
  return end.empty ? 0.0f : acc * end.factor + 0.0f;
}

/// Writes a component of a row, of any dtype but NVFP4.
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
