#include "kernels/cuda/common/merge.hpp"

#include <cuda_runtime.h>

#include "core/error.hpp"
#include "kernels/cuda/common/nvfp4_row.cuh"
#include "kernels/cuda/common/row_state.cuh"
#include "ptx/grid_dependency.cuh"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kWarps = kThreads / 32;
constexpr int32_t kLaneDims = 4;           ///< neighbouring components of a lane
constexpr int32_t kPart = 32 * kLaneDims;  ///< components of a warp; rows of up to four times as many
/// Partial results whose values are read at once, for rows of so many parts: registers.
template <int32_t Parts>
constexpr int32_t kAheadOf = Parts > 2 ? 4 : 8;
constexpr uint32_t kAll = 0xffffffffu;

__device__ __forceinline__ float4 fold_four(const Fold& f, const float4& mine, const float4& other) {
  return {fold(f, mine.x, other.x), fold(f, mine.y, other.y), fold(f, mine.z, other.z), fold(f, mine.w, other.w)};
}

/// Four components of a partial result; zeros beyond the row's end.
__device__ __forceinline__ float4 load_four(const AttentionParams& params, int32_t partial, int32_t d, bool valid) {
  if (!valid || d >= params.head_dim_v) return {0.0f, 0.0f, 0.0f, 0.0f};
  return *reinterpret_cast<const float4*>(params.partial_acc + int64_t{partial} * params.head_dim_v + d);
}

/// A lane's share of the components from `d` on.
__device__ __forceinline__ void write_part(const AttentionParams& params, int32_t token, int32_t q_head, int32_t d,
                                           const float (&acc)[kLaneDims], const RowEnd& end) {
  if (d >= params.head_dim_v) return;
  if (params.out_dtype != DType::kFloat4E2M1x2) {
#pragma unroll
    for (int32_t i = 0; i < kLaneDims; ++i) {
      if (d + i < params.head_dim_v) write_out(params, token, q_head, d + i, acc[i], end);
    }
    return;
  }
  float values[kLaneDims];
#pragma unroll
  for (int32_t i = 0; i < kLaneDims; ++i) values[i] = row_value(end, acc[i]);
  store_nvfp4(params, token, q_head, d, values);
}

/// A row's partial results folded in their order by a warp. What is read does not wait for what is folded: maxima and
/// sums of 32 are read by the lanes at once, values of kAhead.
template <int32_t Parts>
__device__ __forceinline__ void merge_row(const AttentionParams& params, const planner::PlanView& plan,
                                          const planner::MergeItem& item, int32_t row, int32_t lane) {
  constexpr int32_t kAhead = kAheadOf<Parts>;
  const int32_t group_size = params.num_q_heads / params.num_kv_heads;
  const int32_t d = kLaneDims * lane;
  float4 acc[Parts] = {};
  float max = -INFINITY;
  float sum = 0.0f;
  for (int32_t first = item.source_begin; first < item.source_end; first += 32) {
    const int32_t count = min(item.source_end - first, 32);
    int32_t partial = 0;
    float lane_max = 0.0f;
    float lane_sum = 0.0f;
    if (lane < count) {
      partial = plan.merge_sources[first + lane] + row - item.row_begin;
      lane_max = params.partial_max[partial];
      lane_sum = params.partial_sum[partial];
    }
    for (int32_t s = 0; s < count; s += kAhead) {
      float4 values[kAhead][Parts];
#pragma unroll
      for (int32_t i = 0; i < kAhead; ++i) {
        const int32_t source = __shfl_sync(kAll, partial, (s + i) % 32);
#pragma unroll
        for (int32_t h = 0; h < Parts; ++h) {
          values[i][h] = load_four(params, source, d + h * kPart, s + i < count);
        }
      }
#pragma unroll
      for (int32_t i = 0; i < kAhead; ++i) {
        const float other_max = __shfl_sync(kAll, lane_max, (s + i) % 32);
        const float other_sum = __shfl_sync(kAll, lane_sum, (s + i) % 32);
        if (s + i >= count) break;
        const Fold f = fold_factors(max, sum, other_max, other_sum);
        sum = fold(f, sum, other_sum);
        max = f.max;
#pragma unroll
        for (int32_t h = 0; h < Parts; ++h) acc[h] = fold_four(f, acc[h], values[i][h]);
      }
    }
  }
  const int32_t token = row / group_size;
  const int32_t q_head = item.kv_head * group_size + row % group_size;
  const RowEnd end = end_row(params, q_head, max, sum);
#pragma unroll
  for (int32_t h = 0; h < Parts; ++h) {
    const float parts[kLaneDims] = {acc[h].x, acc[h].y, acc[h].z, acc[h].w};
    write_part(params, token, q_head, d + h * kPart, parts, end);
  }
  if (lane == 0) write_lse(params, token, q_head, end);
}

/// The same, brought to the largest maximum at once: `team` warps take neighbouring shares of a row's partial results,
/// the shares are added in their order. Bits depend on the number of partial results, not on who is faster; but they
/// are not those of a fold, which workers that go on with a row do.
template <int32_t Parts>
struct Share {
  float4 acc[Parts];
  float sum;
  float max;
};
template <int32_t Parts>
__device__ __forceinline__ Share<Parts> weigh_share(const AttentionParams& params, const planner::PlanView& plan,
                                                    const planner::MergeItem& item, int32_t row, int32_t lane,
                                                    int32_t member, int32_t team) {
  constexpr int32_t kAhead = kAheadOf<Parts>;
  const int32_t total = item.source_end - item.source_begin;
  const int32_t begin = item.source_begin + total * member / team;
  const int32_t end = item.source_begin + total * (member + 1) / team;
  const int32_t offset = row - item.row_begin;
  const int32_t d = kLaneDims * lane;
  Share<Parts> share{};
  share.max = -INFINITY;
  for (int32_t i = item.source_begin + lane; i < item.source_end; i += 32) {
    share.max = fmaxf(share.max, params.partial_max[plan.merge_sources[i] + offset]);
  }
#pragma unroll
  for (int32_t step = 1; step < 32; step *= 2) share.max = fmaxf(share.max, __shfl_xor_sync(kAll, share.max, step));
  for (int32_t first = begin; first < end; first += 32) {
    const int32_t count = min(end - first, 32);
    int32_t partial = 0;
    float lane_sum = 0.0f;
    float weight = -1.0f;  // of what is empty
    if (lane < count) {
      partial = plan.merge_sources[first + lane] + offset;
      const float lane_max = params.partial_max[partial];
      lane_sum = params.partial_sum[partial];
      if (!is_empty(lane_max, lane_sum)) weight = lane_max == share.max ? 1.0f : exp2f(lane_max - share.max);
    }
    for (int32_t s = 0; s < count; s += kAhead) {
      float4 values[kAhead][Parts];
#pragma unroll
      for (int32_t i = 0; i < kAhead; ++i) {
        const int32_t source = __shfl_sync(kAll, partial, (s + i) % 32);
#pragma unroll
        for (int32_t h = 0; h < Parts; ++h) {
          values[i][h] = load_four(params, source, d + h * kPart, s + i < count);
        }
      }
#pragma unroll
      for (int32_t i = 0; i < kAhead; ++i) {
        const float factor = __shfl_sync(kAll, weight, (s + i) % 32);
        const float other = __shfl_sync(kAll, lane_sum, (s + i) % 32);
        if (s + i >= count || factor < 0.0f) continue;
        share.sum = fmaf(other, factor, share.sum);
#pragma unroll
        for (int32_t h = 0; h < Parts; ++h) {
          float4& acc = share.acc[h];
          const float4& value = values[i][h];
          acc = {fmaf(value.x, factor, acc.x), fmaf(value.y, factor, acc.y), fmaf(value.z, factor, acc.z),
                 fmaf(value.w, factor, acc.w)};
        }
      }
    }
  }
  return share;
}

template <int32_t Parts>
__device__ __forceinline__ void end_merged_row(const AttentionParams& params, const planner::MergeItem& item,
                                               int32_t row, int32_t lane, int32_t first_part, int32_t last_part,
                                               const Share<Parts>& share) {
  const int32_t group_size = params.num_q_heads / params.num_kv_heads;
  const int32_t token = row / group_size;
  const int32_t q_head = item.kv_head * group_size + row % group_size;
  const RowEnd end = end_row(params, q_head, share.max, share.sum);
#pragma unroll
  for (int32_t h = 0; h < Parts; ++h) {
    if (h < first_part || h >= last_part) continue;
    const float parts[kLaneDims] = {share.acc[h].x, share.acc[h].y, share.acc[h].z, share.acc[h].w};
    write_part(params, token, q_head, kLaneDims * lane + h * kPart, parts, end);
  }
  if (lane == 0 && first_part == 0) write_lse(params, token, q_head, end);
}

constexpr int32_t kTeam = 4;        ///< warps of a thread block, all of them for one row that has many partial results
constexpr int32_t kManyParts = 10;  ///< more than these are many

/// Merges without the order of a fold. Thread blocks (m, y) take rows y, y + gridDim.y, ... of merge m.
template <int32_t Parts>
__global__ void __launch_bounds__(32 * kTeam) weigh_kernel(const __grid_constant__ AttentionParams params) {
  __shared__ Share<Parts> shares[kTeam][32];
  const planner::PlanView& plan = params.plan->view;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t num_merges = plan.num_merges;
  ptx::wait_for_kernels_before();
  for (int32_t m = blockIdx.x; m < num_merges; m += gridDim.x) {
    const planner::MergeItem item = plan.merges[m];
    if (item.source_end - item.source_begin <= kManyParts) {
      for (int32_t row = item.row_begin + blockIdx.y * kTeam + warp; row < item.row_end; row += gridDim.y * kTeam) {
        end_merged_row<Parts>(params, item, row, lane, 0, Parts,
                              weigh_share<Parts>(params, plan, item, row, lane, 0, 1));
      }
      continue;
    }
    for (int32_t row = item.row_begin + blockIdx.y; row < item.row_end; row += gridDim.y) {
      shares[warp][lane] = weigh_share<Parts>(params, plan, item, row, lane, warp, kTeam);
      __syncthreads();
      if (warp < Parts) {
        Share<Parts> all = shares[0][lane];
#pragma unroll
        for (int32_t w = 1; w < kTeam; ++w) {
          const Share<Parts>& other = shares[w][lane];
          all.sum += other.sum;
#pragma unroll
          for (int32_t h = 0; h < Parts; ++h) {
            all.acc[h] = {all.acc[h].x + other.acc[h].x, all.acc[h].y + other.acc[h].y, all.acc[h].z + other.acc[h].z,
                          all.acc[h].w + other.acc[h].w};
          }
        }
        end_merged_row<Parts>(params, item, row, lane, warp, warp + 1, all);
      }
      __syncthreads();
    }
  }
}

/// Folds partial results. A warp takes a row, its lanes the components.
template <int32_t Parts>
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ AttentionParams params) {
  const planner::PlanView& plan = params.plan->view;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t num_merges = plan.num_merges;  // the plan was there before the kernel whose results are merged
  ptx::wait_for_kernels_before();              // by all: a graph's next kernel waits for this one alone
  for (int32_t m = blockIdx.x; m < num_merges; m += gridDim.x) {
    const planner::MergeItem item = plan.merges[m];
    for (int32_t row = item.row_begin + static_cast<int32_t>(threadIdx.x) / 32; row < item.row_end; row += kWarps) {
      merge_row<Parts>(params, plan, item, row, lane);
    }
  }
}

}  // namespace

void launch_merge(const AttentionParams& params, int32_t num_workers, Stream stream, bool overlaps) {
  // Above kRunToRun a row's bits are those that a worker would have who computed its items one after the other.
  const bool folds = params.determinism > Determinism::kRunToRun;
  auto* kernel = folds ? merge_kernel<1> : weigh_kernel<1>;
  if (params.head_dim_v > kPart) kernel = folds ? merge_kernel<2> : weigh_kernel<2>;
  if (params.head_dim_v > 2 * kPart) kernel = folds ? merge_kernel<4> : weigh_kernel<4>;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  const int32_t group_size = params.num_q_heads / params.num_kv_heads;
  config.gridDim = dim3(static_cast<unsigned>(num_workers), folds ? 1u : static_cast<unsigned>(min(group_size, 8)));
  config.blockDim = dim3(folds ? kThreads : 32 * kTeam);
  config.stream = static_cast<cudaStream_t>(stream.handle);
  config.attrs = &attribute;
  config.numAttrs = overlaps ? 1 : 0;
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, params);
  if (status != cudaSuccess) {
    core::fail(ErrorCode::kDeviceError, "launching the merge of partial results: ", cudaGetErrorString(status));
  }
}

}  // namespace folio::inline v0::kernels::cuda
