#include "kernels/cuda/common/merge.hpp"

#include <cuda_runtime.h>

#include "core/error.hpp"
#include "kernels/cuda/common/row_state.cuh"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kWarps = kThreads / 32;
constexpr int32_t kMaxHeadDim = 256;

/// Folds partial results. A warp takes a row, its lanes the components.
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ AttentionParams params) {
  const planner::PlanView& plan = params.plan->view;
  const int32_t group_size = params.num_q_heads / params.num_kv_heads;
  const int32_t lane = threadIdx.x % 32;
  for (int32_t m = blockIdx.x; m < plan.num_merges; m += gridDim.x) {
    const planner::MergeItem item = plan.merges[m];
    for (int32_t row = item.row_begin + static_cast<int32_t>(threadIdx.x) / 32; row < item.row_end; row += kWarps) {
      float acc[kMaxHeadDim / 32] = {};
      float max = -INFINITY;
      float sum = 0.0f;
      for (int32_t s = item.source_begin; s < item.source_end; ++s) {
        const int64_t partial = int64_t{plan.merge_sources[s]} + row - item.row_begin;
        const float other_sum = params.partial_sum[partial];
        const Fold f = fold_factors(max, sum, params.partial_max[partial], other_sum);
        sum = fold(f, sum, other_sum);
        max = f.max;
#pragma unroll
        for (int32_t i = 0; i < kMaxHeadDim / 32; ++i) {
          const int32_t d = i * 32 + lane;
          if (d >= params.head_dim_v) continue;
          acc[i] = fold(f, acc[i], params.partial_acc[partial * params.head_dim_v + d]);
        }
      }
      const int32_t token = row / group_size;
      const int32_t q_head = item.kv_head * group_size + row % group_size;
      const RowEnd end = end_row(params, q_head, max, sum);
#pragma unroll
      for (int32_t i = 0; i < kMaxHeadDim / 32; ++i) {
        const int32_t d = i * 32 + lane;
        if (d < params.head_dim_v) write_out(params, token, q_head, d, acc[i], end);
      }
      if (lane == 0) write_lse(params, token, q_head, end);
    }
  }
}

}  // namespace

void launch_merge(const AttentionParams& params, int32_t num_workers, Stream stream) {
  merge_kernel<<<num_workers, kThreads, 0, static_cast<cudaStream_t>(stream.handle)>>>(params);
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) {
    core::fail(ErrorCode::kDeviceError, "launching the merge of partial results: ", cudaGetErrorString(status));
  }
}

}  // namespace folio::inline v0::kernels::cuda
