#include "kernels/cuda/common/combine.hpp"

#include <cuda_runtime.h>

#include "core/error.hpp"
#include "kernels/cuda/common/combine_row.cuh"
#include "kernels/cuda/common/launch.hpp"
#include "ptx/control.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kInOrderThreads = 256;
constexpr int32_t kThreads = 128;
constexpr int32_t kWarps = kThreads / 32;

/// One warp's share of a row's partial results, at the share's row max.
template <int32_t Chunks>
struct Share {
  float4 acc[Chunks];
  float sum;
  float max;
};

/// What brings a state to a larger row max; negative for an empty one, which is skipped.
__device__ __forceinline__ float rescale_factor(float max, float sum, float new_max) {
  if (is_empty(max, sum)) return -1.0f;
  return max == new_max ? 1.0f : exp2f(max - new_max);
}
__device__ __forceinline__ float4 fma_four(const float4& acc, float factor, const float4& value) {
  return {fmaf(value.x, factor, acc.x), fmaf(value.y, factor, acc.y), fmaf(value.z, factor, acc.z),
          fmaf(value.w, factor, acc.w)};
}

/// Partial results that a warp reads at once, of rows of up to kCombineDims components. A row with more gets more
/// warps, if there are.
constexpr int32_t kSplitsOfWarp = 16;

/// What the lanes of a warp share about 32 partial results.
struct SplitTable {
  int32_t partial[32];
  float factor[32];
};

/// Reduces `count` partial results of a row, by a warp. The plan says where they lie, so row maxima, row sums and the
/// first values are requested at once. `waited`: griddep_wait has been called.
template <int32_t Chunks>
__device__ __forceinline__ Share<Chunks> reduce_share(const AttentionParams& params, const int32_t* sources,
                                                      int32_t count, int32_t offset, int32_t lane, SplitTable& table,
                                                      bool& waited) {
  constexpr int32_t kAhead = kSplitsOfWarp / Chunks;
  const int32_t d = kCombineLaneDims * lane;
  const auto* const column = reinterpret_cast<const unsigned char*>(params.partial_acc + d);
  const auto stride = static_cast<uint32_t>(sizeof(float)) * static_cast<uint32_t>(params.head_dim_v);
  Share<Chunks> share{};
  share.max = -INFINITY;
  for (int32_t first = 0; first < count; first += 32) {
    const int32_t n = min(count - first, 32);
    const int32_t partial = sources[first + min(lane, n - 1)] + offset;
    __syncwarp();
    table.partial[lane] = partial;
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
      float4 values[kAhead][Chunks] = {};
#pragma unroll
      for (int32_t i = 0; i < kAhead; ++i) {
        const auto* const from = column + uint64_t{static_cast<uint32_t>(table.partial[s + i])} * stride;
#pragma unroll
        for (int32_t h = 0; h < Chunks; ++h) {
          const bool wanted = s + i < n && d + h * kCombineDims < params.head_dim_v;
          ptx::ld_global_16_if(values[i][h], from + h * kCombineDims * sizeof(float), wanted);
        }
      }
      if (s == 0) {
        float new_max = fmaxf(share.max, lane_max);
#pragma unroll
        for (int32_t step = 1; step < 32; step *= 2)
          new_max = fmaxf(new_max, __shfl_xor_sync(kCombineLanes, new_max, step));
        const float factor = rescale_factor(lane_max, lane_sum, new_max);
        table.factor[lane] = factor;
        const float before = share.max == new_max ? 1.0f : exp2f(share.max - new_max);
        share.max = new_max;
        float sum = factor < 0.0f ? 0.0f : lane_sum * factor;
#pragma unroll
        for (int32_t step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(kCombineLanes, sum, step);
        share.sum = fmaf(share.sum, before, sum);
#pragma unroll
        for (int32_t h = 0; h < Chunks; ++h) share.acc[h] = fma_four({}, before, share.acc[h]);
        __syncwarp();
      }
#pragma unroll
      for (int32_t i = 0; i < kAhead; ++i) {
        const float factor = table.factor[s + i];
        if (factor < 0.0f) continue;
#pragma unroll
        for (int32_t h = 0; h < Chunks; ++h) share.acc[h] = fma_four(share.acc[h], factor, values[i][h]);
      }
    }
  }
  return share;
}

/// A lane's components of a row, passed in registers.
template <int32_t Chunks>
struct RowValues {
  float4 four[Chunks];
};

/// Writes a row of any dtype, and its LSE. A call, not inlined: one of its many paths is taken, and the instruction
/// cache would still fetch the others.
template <int32_t Chunks>
__device__ __noinline__ void write_any_row(const AttentionParams& params, int32_t token, int32_t q_head, int32_t lane,
                                           RowEnd end, RowValues<Chunks> values) {
#pragma unroll
  for (int32_t h = 0; h < Chunks; ++h) {
    const float4& four = values.four[h];
    const float parts[kCombineLaneDims] = {four.x, four.y, four.z, four.w};
    write_chunk(params, token, q_head, kCombineLaneDims * lane + h * kCombineDims, parts, end);
  }
  if (lane == 0) write_lse(params, token, q_head, end);
}

/// The same, with a short path for most batches: aligned pairs of a 16-bit type and no LSE.
template <int32_t Chunks>
__device__ __forceinline__ void write_row(const AttentionParams& params, int32_t token, int32_t q_head, int32_t lane,
                                          const RowEnd& end, const float4 (&acc)[Chunks]) {
  const bool bfloat16 = params.out_dtype == DType::kBFloat16;
  const bool plain =
      params.out_pairs && (bfloat16 || params.out_dtype == DType::kFloat16) && params.lse.data == nullptr;
  if (!plain) {
    RowValues<Chunks> values;
#pragma unroll
    for (int32_t h = 0; h < Chunks; ++h) values.four[h] = acc[h];
    return write_any_row(params, token, q_head, lane, end, values);
  }
  auto* const to = static_cast<uint16_t*>(params.out) + token * params.out_token_stride +
                   q_head * params.out_head_stride + kCombineLaneDims * lane;
  const auto pair = [&](float x, float y) {
    x = row_value(end, x);
    y = row_value(end, y);
    return bfloat16 ? ptx::pack_two<__nv_bfloat16>(x, y) : ptx::pack_two<__half>(x, y);
  };
#pragma unroll
  for (int32_t h = 0; h < Chunks; ++h) {
    if (kCombineLaneDims * lane + h * kCombineDims >= params.head_dim_v) return;
    auto* const pairs = reinterpret_cast<uint32_t*>(to + h * kCombineDims);
    pairs[0] = pair(acc[h].x, acc[h].y);
    pairs[1] = pair(acc[h].z, acc[h].w);
  }
}

/// Cross-warp reduction of shares.
template <int32_t Chunks>
__device__ __forceinline__ Share<Chunks> reduce_shares(const Share<Chunks> (*shares)[32], int32_t count, int32_t lane) {
  Share<Chunks> all{};
  all.max = -INFINITY;
  for (int32_t w = 0; w < count; ++w) all.max = fmaxf(all.max, shares[w][lane].max);
  for (int32_t w = 0; w < count; ++w) {
    const Share<Chunks>& other = shares[w][lane];
    const float factor = rescale_factor(other.max, other.sum, all.max);
    if (factor < 0.0f) continue;
    all.sum = fmaf(other.sum, factor, all.sum);
#pragma unroll
    for (int32_t h = 0; h < Chunks; ++h) all.acc[h] = fma_four(all.acc[h], factor, other.acc[h]);
  }
  return all;
}

/// Warps for each row of `count` partial results, in a CTA that has `rows` rows: a power of two.
__device__ __forceinline__ int32_t warps_per_row(int32_t count, int32_t rows) {
  int32_t warps = 1;
  while (warps * kSplitsOfWarp < count && 2 * warps * rows <= kWarps) warps *= 2;
  return warps;
}

__device__ __forceinline__ int32_t ceil_div(int32_t a, int32_t b) {
  return (a + b - 1) / b;
}

/// The combine tiles of a pass; kBoth: behind them those of the other pass.
template <bool kBoth>
class CombineTiles {
 public:
  __device__ __forceinline__ explicit CombineTiles(const AttentionParams& params)
      : params_(params), plan_(params.plan->view), count_(plan_.num_combine_tiles) {
    if constexpr (kBoth) count_ += params.other_plan->view.num_combine_tiles;
  }
  __device__ __forceinline__ int32_t count() const { return count_; }
  __device__ __forceinline__ PlannedCombineTile at(int32_t index) const {
    if constexpr (kBoth) {
      const int32_t own = plan_.num_combine_tiles;
      const scheduler::PlanView& other = params_.other_plan->view;
      if (index >= own) {
        return {other.combine_tiles[index - own], other.combine_sources, static_cast<int32_t>(params_.other_partials)};
      }
    }
    return {plan_.combine_tiles[index], plan_.combine_sources};
  }

 private:
  const AttentionParams& params_;
  const scheduler::PlanView& plan_;
  int32_t count_;
};

/// Split-KV combine without an order of folding: a row's bits depend on the plan alone, but differ from those of a CTA
/// that computes the work tiles one after the other. With fewer output tiles than CTAs, each gets as many CTAs as its
/// rows need, the lowest numbers first: few registers let these wait beside the kernel before (PDL).
template <int32_t Chunks, bool kBoth>
__global__ void __launch_bounds__(kThreads, 4) combine_kernel(const __grid_constant__ AttentionParams params) {
  __shared__ Share<Chunks> shares[kWarps][32];
  __shared__ SplitTable tables[kWarps];
  ptx::griddep_launch_dependents();
  const CombineTiles<kBoth> tiles(params);
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  const auto grid = static_cast<int32_t>(gridDim.x);
  const int32_t num_combine_tiles = tiles.count();
  const int32_t group_size = params.num_q_heads / params.num_kv_heads;
  const int32_t blocks = num_combine_tiles < grid ? grid / max(num_combine_tiles, 1) : 1;  // CTAs of an output tile
  bool waited = false;
  for (auto place = static_cast<int32_t>(blockIdx.x); place < num_combine_tiles * blocks; place += grid) {
    const int32_t mine = place / num_combine_tiles;
    const PlannedCombineTile planned = tiles.at(place - mine * num_combine_tiles);
    const scheduler::CombineTile& tile = planned.tile;
    const int32_t rows = tile.row_end - tile.row_begin;
    const int32_t count = tile.source_end - tile.source_begin;
    const int32_t of_tile = min(blocks, ceil_div(rows * warps_per_row(count, 1), kWarps));
    if (mine >= of_tile) continue;
    const int32_t row_begin = tile.row_begin + rows * mine / of_tile;
    const int32_t row_end = tile.row_begin + rows * (mine + 1) / of_tile;
    const int32_t warps = warps_per_row(count, row_end - row_begin);
    const int32_t share = warp % warps;
    const int32_t begin = count * share / warps;
    const int32_t end = count * (share + 1) / warps;
    const int32_t* const sources = planned.sources + tile.source_begin + begin;
    for (int32_t first = row_begin; first < row_end; first += kWarps / warps) {
      const int32_t row = first + warp / warps;
      const int32_t token = row / group_size;
      const int32_t q_head = tile.kv_head * group_size + row % group_size;
      asm volatile("" ::"r"(token), "r"(q_head));  // divisions here, while loads are in flight
      Share<Chunks> state{};
      if (row < row_end) {
        state = reduce_share<Chunks>(params, sources, end - begin, planned.first_partial + row - tile.row_begin, lane,
                                     tables[warp], waited);
      }
      if (warps > 1) {
        shares[warp][lane] = state;
        __syncthreads();
        if (share == 0) state = reduce_shares<Chunks>(shares + warp, warps, lane);
        __syncthreads();
      }
      if (share == 0 && row < row_end) {
        write_row(params, token, q_head, lane, end_row(params, q_head, state.max, state.sum), state.acc);
      }
    }
  }
  if (!waited) ptx::griddep_wait();  // by every thread: the next kernel of a graph waits for this one alone
}

/// Split-KV combine that folds in the order of the splits. A warp takes a row, its lanes the components.
template <int32_t Chunks, bool kBoth>
__global__ void __launch_bounds__(kInOrderThreads)
    combine_in_order_kernel(const __grid_constant__ AttentionParams params) {
  ptx::griddep_launch_dependents();
  const CombineTiles<kBoth> tiles(params);  // plans were written before the attention kernel began
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  ptx::griddep_wait();  // by every thread: the next kernel of a graph waits for this one alone
  for (int32_t m = blockIdx.x; m < tiles.count(); m += gridDim.x) {
    run_combine<Chunks>(params, tiles.at(m), static_cast<int32_t>(threadIdx.x) / 32, kInOrderThreads / 32, lane);
  }
}

template <auto Kernel, int32_t Threads>
cudaError_t launch_kernel(const AttentionParams& params, int32_t grid, Stream stream, bool overlaps) {
  // The same carve-out as the kernel before, so that both fit an SM.
  const cudaError_t status = allow_shared_memory<Kernel>(0, true);
  if (status != cudaSuccess) return status;
  return launch_overlapping(Kernel, dim3(static_cast<unsigned>(grid)), Threads, 0, stream, overlaps, params);
}

using Launch = cudaError_t (*)(const AttentionParams& params, int32_t grid, Stream stream, bool overlaps);

template <bool kBoth, int32_t Chunks>
Launch choose_order(bool in_order) {
  return in_order ? Launch{launch_kernel<combine_in_order_kernel<Chunks, kBoth>, kInOrderThreads>}
                  : Launch{launch_kernel<combine_kernel<Chunks, kBoth>, kThreads>};
}
template <bool kBoth>
Launch choose_kernel(int32_t head_dim_v, bool in_order) {
  if (head_dim_v > 2 * kCombineDims) return choose_order<kBoth, 4>(in_order);
  return head_dim_v > kCombineDims ? choose_order<kBoth, 2>(in_order) : choose_order<kBoth, 1>(in_order);
}

}  // namespace

void launch_combine(const AttentionParams& params, int32_t num_workers, Stream stream, bool overlaps,
                    int32_t blocks_per_worker) {
  // In order above kRunToRun: a row's bits are those of a CTA that computes its work tiles one after the other. With
  // the static scheduler too: they are those of a kernel that combines itself.
  const bool in_order = params.determinism > Determinism::kRunToRun || params.tile_counters == nullptr;
  const auto launch = params.other_plan == nullptr ? choose_kernel<false>(params.head_dim_v, in_order)
                                                   : choose_kernel<true>(params.head_dim_v, in_order);
  const cudaError_t status = launch(params, num_workers * (in_order ? 1 : blocks_per_worker), stream, overlaps);
  if (status != cudaSuccess) {
    core::fail(ErrorCode::kDeviceError, "launching the split-KV combine: ", cudaGetErrorString(status));
  }
}

}  // namespace folio::inline v0::kernels::cuda
