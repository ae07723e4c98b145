#pragma once

#include "kernels/cuda/sm80/attention/rows.cuh"

/// Where rows go when their accumulation ends.
namespace folio::inline v0::kernels::cuda::sm80 {

/// Two neighbouring components of a row that ends here.
__device__ __forceinline__ void write_two(const AttentionParams& params, const RowPlace& row, int32_t d, float first,
                                          float second, const RowEnd& end) {
  const float a = end.empty ? 0.0f : first * end.factor / end.sum + 0.0f;
  const float b = end.empty ? 0.0f : second * end.factor / end.sum + 0.0f;
  const int64_t at = row.token * params.out_token_stride + row.q_head * params.out_head_stride + d;
  if (params.out_dtype == DType::kFloat32) {
    auto* const to = static_cast<float*>(params.out) + at;
    if (params.out_pairs) {
      *reinterpret_cast<float2*>(to) = float2{a, b};
    } else {
      to[0] = a;
      to[1] = b;
    }
    return;
  }
  if (is_fp8(params.out_dtype)) {
    write_out(params, row.token, row.q_head, d, first, end);
    write_out(params, row.token, row.q_head, d + 1, second, end);
    return;
  }
  const uint32_t both =
      params.out_dtype == DType::kFloat16 ? ptx::pack_two<__half>(a, b) : ptx::pack_two<__nv_bfloat16>(a, b);
  auto* const to = static_cast<uint16_t*>(params.out) + at;
  if (params.out_pairs) {
    *reinterpret_cast<uint32_t*>(to) = both;
  } else {
    to[0] = static_cast<uint16_t>(both);
    to[1] = static_cast<uint16_t>(both >> 16);
  }
}

/// One row's end, as far as a thread has it: either the output or a partial result.
class RowWriter {
 public:
  __device__ __forceinline__ RowWriter(const AttentionParams& params, const planner::WorkItem& item, int32_t row,
                                       float max, float sum, bool first_thread)
      : params_(params), place_(row_place(params, item, row)), partial_(item.partial < 0 ? -1 : item.partial + row) {
    if (partial_ >= 0) {
      if (!first_thread) return;
      params.partial_max[partial_] = max;
      params.partial_sum[partial_] = sum;
      return;
    }
    end_ = end_row(params, place_.q_head, max, sum);
    if (first_thread) write_lse(params, place_.token, place_.q_head, end_);
  }
  __device__ __forceinline__ void two(int32_t d, float first, float second) const {
    if (partial_ >= 0) {
      const int64_t at = int64_t{partial_} * params_.head_dim_v + d;
      *reinterpret_cast<float2*>(params_.partial_acc + at) = float2{first, second};
    } else {
      write_two(params_, place_, d, first, second, end_);
    }
  }

 private:
  const AttentionParams& params_;
  const RowPlace place_;
  const int32_t partial_;
  RowEnd end_{};
};

__device__ __forceinline__ bool is_scaled(const Scale& scale) {
  return scale.data != nullptr || scale.value != 1.0f;
}

}  // namespace folio::inline v0::kernels::cuda::sm80
