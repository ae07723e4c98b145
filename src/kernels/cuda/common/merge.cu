#include "kernels/cuda/common/merge.hpp"

#include <cuda_runtime.h>

#include "core/error.hpp"
#include "kernels/cuda/common/allow_shared_memory.hpp"
#include "kernels/cuda/common/launch_overlapping.hpp"
#include "kernels/cuda/common/merge_row.cuh"
#include "ptx/control.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kFoldThreads = 256;
constexpr int32_t kThreads = 128;
constexpr int32_t kWarps = kThreads / 32;

/// A share of a row's partial results, at the share's largest maximum.
template <int32_t Parts>
struct Share {
  float4 acc[Parts];
  float sum;
  float max;
};

/// What brings a state to a larger maximum; negative for what is empty and is not to be looked at.
__device__ __forceinline__ float weight_of(float max, float sum, float most) {
  if (is_empty(max, sum)) return -1.0f;
  return max == most ? 1.0f : exp2f(max - most);
}
__device__ __forceinline__ float4 add_weighted(const float4& acc, float weight, const float4& value) {
  return {fmaf(value.x, weight, acc.x), fmaf(value.y, weight, acc.y), fmaf(value.z, weight, acc.z),
          fmaf(value.w, weight, acc.w)};
}

/// Partial results that one warp reads at once, of rows of up to kMergePart components, and beyond which a row gets
/// more warps, if there are.
constexpr int32_t kWarpParts = 16;

/// What a warp's lanes tell each other of 32 partial results: in shared memory, as every lane needs every one.
struct Board {
  int32_t partial[32];
  float weight[32];
};

/// `count` partial results of a row, by a warp. Where they stand is known from the plan, so that maxima, sums and the
/// first values are asked for at once; `waited`: the kernels before this one are known to have ended.
template <int32_t Parts>
__device__ __forceinline__ Share<Parts> weigh_share(const AttentionParams& params, const int32_t* sources,
                                                    int32_t count, int32_t offset, int32_t lane, Board& board,
                                                    bool& waited) {
  constexpr int32_t kAhead = kWarpParts / Parts;
  const int32_t d = kMergeLaneDims * lane;
  const auto* const column = reinterpret_cast<const unsigned char*>(params.partial_acc + d);
  const auto stride = static_cast<uint32_t>(sizeof(float)) * static_cast<uint32_t>(params.head_dim_v);
  Share<Parts> share{};
  share.max = -INFINITY;
  for (int32_t first = 0; first < count; first += 32) {
    const int32_t n = min(count - first, 32);
    const int32_t partial = sources[first + min(lane, n - 1)] + offset;
    __syncwarp();
    board.partial[lane] = partial;
    __syncwarp();
    if (!waited) ptx::griddep_wait();
    waited = true;
    float lane_max = -INFINITY;
    float lane_sum = 0.0f;
    if (lane < n) {
      lane_max = params.partial_row_max[partial];
      lane_sum = params.partial_row_sum[partial];
    }
#pragma unroll 1
    for (int32_t s = 0; s < n; s += kAhead) {
      float4 values[kAhead][Parts] = {};
#pragma unroll
      for (int32_t i = 0; i < kAhead; ++i) {
        const auto* const from = column + uint64_t{static_cast<uint32_t>(board.partial[s + i])} * stride;
#pragma unroll
        for (int32_t h = 0; h < Parts; ++h) {
          const bool wanted = s + i < n && d + h * kMergePart < params.head_dim_v;
          ptx::ld_global_16_if(values[i][h], from + h * kMergePart * sizeof(float), wanted);
        }
      }
      if (s == 0) {
        float most = fmaxf(share.max, lane_max);
#pragma unroll
        for (int32_t step = 1; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(kMergeLanes, most, step));
        const float weight = weight_of(lane_max, lane_sum, most);
        board.weight[lane] = weight;
        const float before = share.max == most ? 1.0f : exp2f(share.max - most);
        share.max = most;
        float sum = weight < 0.0f ? 0.0f : lane_sum * weight;
#pragma unroll
        for (int32_t step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(kMergeLanes, sum, step);
        share.sum = fmaf(share.sum, before, sum);
#pragma unroll
        for (int32_t h = 0; h < Parts; ++h) share.acc[h] = add_weighted({}, before, share.acc[h]);
        __syncwarp();
      }
#pragma unroll
      for (int32_t i = 0; i < kAhead; ++i) {
        const float factor = board.weight[s + i];
        if (factor < 0.0f) continue;
#pragma unroll
        for (int32_t h = 0; h < Parts; ++h) share.acc[h] = add_weighted(share.acc[h], factor, values[i][h]);
      }
    }
  }
  return share;
}

/// A lane's components of a row, handed on in registers.
template <int32_t Parts>
struct RowValues {
  float4 four[Parts];
};

/// A row's components in any type, and its LSE. Called: one of its many ways is taken, and instructions that are jumped
/// over have to be fetched all the same.
template <int32_t Parts>
__device__ __noinline__ void write_any_row(const AttentionParams& params, int32_t token, int32_t q_head, int32_t lane,
                                           RowEnd end, RowValues<Parts> values) {
#pragma unroll
  for (int32_t h = 0; h < Parts; ++h) {
    const float4& four = values.four[h];
    const float parts[kMergeLaneDims] = {four.x, four.y, four.z, four.w};
    write_part(params, token, q_head, kMergeLaneDims * lane + h * kMergePart, parts, end);
  }
  if (lane == 0) write_lse(params, token, q_head, end);
}

/// The same of what most batches have: pairs of a 16-bit type and no LSE.
template <int32_t Parts>
__device__ __forceinline__ void write_row(const AttentionParams& params, int32_t token, int32_t q_head, int32_t lane,
                                          const RowEnd& end, const float4 (&acc)[Parts]) {
  const bool bfloat16 = params.out_dtype == DType::kBFloat16;
  const bool plain =
      params.out_pairs && (bfloat16 || params.out_dtype == DType::kFloat16) && params.lse.data == nullptr;
  if (!plain) {
    RowValues<Parts> values;
#pragma unroll
    for (int32_t h = 0; h < Parts; ++h) values.four[h] = acc[h];
    return write_any_row(params, token, q_head, lane, end, values);
  }
  auto* const to = static_cast<uint16_t*>(params.out) + token * params.out_token_stride +
                   q_head * params.out_head_stride + kMergeLaneDims * lane;
  const auto pair = [&](float x, float y) {
    x = row_value(end, x);
    y = row_value(end, y);
    return bfloat16 ? ptx::pack_two<__nv_bfloat16>(x, y) : ptx::pack_two<__half>(x, y);
  };
#pragma unroll
  for (int32_t h = 0; h < Parts; ++h) {
    if (kMergeLaneDims * lane + h * kMergePart >= params.head_dim_v) return;
    auto* const pairs = reinterpret_cast<uint32_t*>(to + h * kMergePart);
    pairs[0] = pair(acc[h].x, acc[h].y);
    pairs[1] = pair(acc[h].z, acc[h].w);
  }
}

/// Shares brought together.
template <int32_t Parts>
__device__ __forceinline__ Share<Parts> join_shares(const Share<Parts> (*shares)[32], int32_t count, int32_t lane) {
  Share<Parts> all{};
  all.max = -INFINITY;
  for (int32_t w = 0; w < count; ++w) all.max = fmaxf(all.max, shares[w][lane].max);
  for (int32_t w = 0; w < count; ++w) {
    const Share<Parts>& other = shares[w][lane];
    const float weight = weight_of(other.max, other.sum, all.max);
    if (weight < 0.0f) continue;
    all.sum = fmaf(other.sum, weight, all.sum);
#pragma unroll
    for (int32_t h = 0; h < Parts; ++h) all.acc[h] = add_weighted(all.acc[h], weight, other.acc[h]);
  }
  return all;
}

/// Warps that a row of `count` partial results gets, of the CTA's, which has `rows` rows: a power of two.
__device__ __forceinline__ int32_t warps_of_row(int32_t count, int32_t rows) {
  int32_t warps = 1;
  while (warps * kWarpParts < count && 2 * warps * rows <= kWarps) warps *= 2;
  return warps;
}

__device__ __forceinline__ int32_t ceil_div(int32_t a, int32_t b) {
  return (a + b - 1) / b;
}

/// Merges without the order of a fold: a row's bits depend on the plan, not on who is faster, but are not those of a
/// worker who computes its items one after the other. Where there are fewer merges than CTAs, a merge has as
/// many blocks as its rows need, the lowest numbers first: these are the ones that wait beside the kernel before, as
/// few registers allow.
template <int32_t Parts>
__global__ void __launch_bounds__(kThreads, 4) weigh_kernel(const __grid_constant__ AttentionParams params) {
  __shared__ Share<Parts> shares[kWarps][32];
  __shared__ Board boards[kWarps];
  ptx::griddep_launch_dependents();
  const scheduler::PlanView& plan = params.plan->view;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  const auto grid = static_cast<int32_t>(gridDim.x);
  const int32_t num_combine_tiles = plan.num_combine_tiles;
  const int32_t group_size = params.num_q_heads / params.num_kv_heads;
  const int32_t blocks = num_combine_tiles < grid ? grid / max(num_combine_tiles, 1) : 1;  // of a merge
  bool waited = false;
  for (auto place = static_cast<int32_t>(blockIdx.x); place < num_combine_tiles * blocks; place += grid) {
    const int32_t mine = place / num_combine_tiles;
    const scheduler::CombineTile item = plan.merges[place - mine * num_combine_tiles];
    const int32_t rows = item.row_end - item.row_begin;
    const int32_t count = item.source_end - item.source_begin;
    const int32_t of_merge = min(blocks, ceil_div(rows * warps_of_row(count, 1), kWarps));
    if (mine >= of_merge) continue;
    const int32_t row_begin = item.row_begin + rows * mine / of_merge;
    const int32_t row_end = item.row_begin + rows * (mine + 1) / of_merge;
    const int32_t warps = warps_of_row(count, row_end - row_begin);
    const int32_t share = warp % warps;
    const int32_t begin = count * share / warps;
    const int32_t end = count * (share + 1) / warps;
    const int32_t* const sources = plan.combine_sources + item.source_begin + begin;
    for (int32_t first = row_begin; first < row_end; first += kWarps / warps) {
      const int32_t row = first + warp / warps;
      const int32_t token = row / group_size;
      const int32_t q_head = item.kv_head * group_size + row % group_size;
      asm volatile("" ::"r"(token), "r"(q_head));  // divisions, while nothing else is to be done
      Share<Parts> state{};
      if (row < row_end) {
        state = weigh_share<Parts>(params, sources, end - begin, row - item.row_begin, lane, boards[warp], waited);
      }
      if (warps > 1) {
        shares[warp][lane] = state;
        __syncthreads();
        if (share == 0) state = join_shares<Parts>(shares + warp, warps, lane);
        __syncthreads();
      }
      if (share == 0 && row < row_end) {
        write_row(params, token, q_head, lane, end_row(params, q_head, state.max, state.sum), state.acc);
      }
    }
  }
  if (!waited) ptx::griddep_wait();  // by all: a graph's next kernel waits for this one alone
}

/// Folds partial results. A warp takes a row, its lanes the components.
template <int32_t Parts>
__global__ void __launch_bounds__(kFoldThreads) merge_kernel(const __grid_constant__ AttentionParams params) {
  ptx::griddep_launch_dependents();
  const scheduler::PlanView& plan = params.plan->view;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t num_combine_tiles =
      plan.num_combine_tiles;  // the plan was there before the kernel whose results are merged
  ptx::griddep_wait();         // by all: a graph's next kernel waits for this one alone
  for (int32_t m = blockIdx.x; m < num_combine_tiles; m += gridDim.x) {
    const scheduler::CombineTile item = plan.merges[m];
    merge_item<Parts>(params, plan, item, static_cast<int32_t>(threadIdx.x) / 32, kFoldThreads / 32, lane);
  }
}

template <auto Kernel, int32_t Threads>
cudaError_t launch_kernel(const AttentionParams& params, int32_t grid, Stream stream, bool overlaps) {
  // As much shared memory is set aside as for the kernel before, so that both fit an SM.
  const cudaError_t status = allow_shared_memory<Kernel>(0, true);
  if (status != cudaSuccess) return status;
  return launch_overlapping(Kernel, dim3(static_cast<unsigned>(grid)), Threads, 0, stream, overlaps, params);
}

}  // namespace

void launch_merge(const AttentionParams& params, int32_t num_workers, Stream stream, bool overlaps,
                  int32_t blocks_per_worker) {
  // Above kRunToRun a row's bits are those that a worker would have who computed its items one after the other; with
  // lists they are those that a kernel gives that merges itself.
  const bool folds = params.determinism > Determinism::kRunToRun || params.tile_counters == nullptr;
  auto launch = folds ? launch_kernel<merge_kernel<1>, kFoldThreads> : launch_kernel<weigh_kernel<1>, kThreads>;
  if (params.head_dim_v > kMergePart)
    launch = folds ? launch_kernel<merge_kernel<2>, kFoldThreads> : launch_kernel<weigh_kernel<2>, kThreads>;
  if (params.head_dim_v > 2 * kMergePart) {
    launch = folds ? launch_kernel<merge_kernel<4>, kFoldThreads> : launch_kernel<weigh_kernel<4>, kThreads>;
  }
  const cudaError_t status = launch(params, num_workers * (folds ? 1 : blocks_per_worker), stream, overlaps);
  if (status != cudaSuccess) {
    core::fail(ErrorCode::kDeviceError, "launching the merge of partial results: ", cudaGetErrorString(status));
  }
}

}  // namespace folio::inline v0::kernels::cuda
