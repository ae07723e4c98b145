#include "kernels/cuda/common/merge.hpp"

#include <cuda_runtime.h>

#include "core/error.hpp"
#include "kernels/cuda/common/row_state.cuh"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kWarps = kThreads / 32;
constexpr int32_t kLanePieces = 256 / 32;  ///< components of a lane, of the largest head dimension
constexpr int32_t kAhead = 8;              ///< partial results that are read at once

/// One row's fold. Lanes have the components; of up to 32 partial results at a time, a lane has one's maximum and sum,
/// and kAhead are under way at once: folded one after the other as they came, since the order makes the bits.
__device__ void merge_row(const AttentionParams& params, const planner::PlanView& plan, const planner::MergeItem& item,
                          int32_t row) {
  constexpr uint32_t kAll = 0xffffffffu;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  float acc[kLanePieces] = {};
  float max = -INFINITY;
  float sum = 0.0f;
  for (int32_t first = item.source_begin; first < item.source_end; first += 32) {
    const int32_t count = min(32, item.source_end - first);
    int64_t partial = 0;
    float own_max = -INFINITY;
    float own_sum = 0.0f;
    if (lane < count) {
      partial = int64_t{plan.merge_sources[first + lane]} + row - item.row_begin;
      own_max = params.partial_max[partial];
      own_sum = params.partial_sum[partial];
    }
    for (int32_t begin = 0; begin < count; begin += kAhead) {
      float values[kAhead][kLanePieces];
#pragma unroll
      for (int32_t s = 0; s < kAhead; ++s) {
        const int64_t from = __shfl_sync(kAll, partial, begin + s) * params.head_dim_v;
#pragma unroll
        for (int32_t i = 0; i < kLanePieces; ++i) {
          const int32_t d = i * 32 + lane;
          values[s][i] = begin + s < count && d < params.head_dim_v ? params.partial_acc[from + d] : 0.0f;
        }
      }
#pragma unroll
      for (int32_t s = 0; s < kAhead; ++s) {
        const float other_max = __shfl_sync(kAll, own_max, begin + s);
        const float other_sum = __shfl_sync(kAll, own_sum, begin + s);
        if (begin + s >= count) continue;
        const Fold f = fold_factors(max, sum, other_max, other_sum);
        sum = fold(f, sum, other_sum);
        max = f.max;
#pragma unroll
        for (int32_t i = 0; i < kLanePieces; ++i) acc[i] = fold(f, acc[i], values[s][i]);
      }
    }
  }
  const int32_t group_size = params.num_q_heads / params.num_kv_heads;
  const int32_t token = row / group_size;
  const int32_t q_head = item.kv_head * group_size + row % group_size;
  const RowEnd end = end_row(params, q_head, max, sum);
#pragma unroll
  for (int32_t i = 0; i < kLanePieces; ++i) {
    const int32_t d = i * 32 + lane;
    if (d < params.head_dim_v) write_out(params, token, q_head, d, acc[i], end);
  }
  if (lane == 0) write_lse(params, token, q_head, end);
}

/// Folds partial results. A warp takes a row.
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ AttentionParams params) {
  const planner::PlanView& plan = params.plan->view;
  const int32_t num_merges = plan.num_merges;
  for (int32_t m = blockIdx.x; m < num_merges; m += gridDim.x) {
    const planner::MergeItem item = plan.merges[m];
    for (int32_t row = item.row_begin + static_cast<int32_t>(threadIdx.x) / 32; row < item.row_end; row += kWarps) {
      merge_row(params, plan, item, row);
    }
  }
}

}  // namespace

void launch_merge(const AttentionParams& params, int32_t num_blocks, Stream stream) {
  merge_kernel<<<num_blocks, kThreads, 0, static_cast<cudaStream_t>(stream.handle)>>>(params);
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) {
    core::fail(ErrorCode::kDeviceError, "launching the merge of partial results: ", cudaGetErrorString(status));
  }
}

}  // namespace folio::inline v0::kernels::cuda
