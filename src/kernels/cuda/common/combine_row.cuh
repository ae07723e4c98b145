#pragma once

#include "kernels/cuda/common/epilogue.cuh"
#include "kernels/cuda/common/nvfp4.cuh"

/// Split-KV combine of a row by a warp, in the order of the splits: for the combine kernel and for kernels that combine
/// themselves, with the same bits. Partial results are read past L1, as other SMs may have written them while this
/// kernel ran.
namespace folio::inline v0::kernels::cuda {

constexpr int32_t kCombineLaneDims = 4;  ///< neighbouring components of a lane
constexpr int32_t kCombineDims =
    32 * kCombineLaneDims;  ///< components that a warp takes at once; a row has up to four times as many
/// Partial results whose values are read at once, by chunks of kCombineDims components: limited by registers.
template <int32_t Chunks>
constexpr int32_t kCombineAhead = Chunks > 2 ? 4 : 8;
constexpr uint32_t kCombineLanes = 0xffffffffu;

__device__ __forceinline__ float4 fold_four(const Fold& f, const float4& mine, const float4& other) {
  return {fold(f, mine.x, other.x), fold(f, mine.y, other.y), fold(f, mine.z, other.z), fold(f, mine.w, other.w)};
}

/// Four components of a partial result; zeros beyond the row's end.
__device__ __forceinline__ float4 load_four(const AttentionParams& params, int32_t partial, int32_t d, bool valid) {
  if (!valid || d >= params.head_dim_v) return {0.0f, 0.0f, 0.0f, 0.0f};
  return __ldcg(reinterpret_cast<const float4*>(params.partial_acc + int64_t{partial} * params.head_dim_v + d));
}

/// Writes a lane's components from `d` on.
__device__ __forceinline__ void write_chunk(const AttentionParams& params, int32_t token, int32_t q_head, int32_t d,
                                            const float (&acc)[kCombineLaneDims], const RowEnd& end) {
  if (d >= params.head_dim_v) return;
  if (params.out_dtype != DType::kFloat4E2M1x2) {
#pragma unroll
    for (int32_t i = 0; i < kCombineLaneDims; ++i) {
      if (d + i < params.head_dim_v) write_out(params, token, q_head, d + i, acc[i], end);
    }
    return;
  }
  float values[kCombineLaneDims];
#pragma unroll
  for (int32_t i = 0; i < kCombineLaneDims; ++i) values[i] = row_value(end, acc[i]);
  store_nvfp4(params, token, q_head, d, values);
}

/// The epilogue of a combined row. A call, not inlined: each output type has code of its own.
template <int32_t Chunks>
__device__ __noinline__ void finish_combined_row(const AttentionParams& params, const scheduler::CombineTile& tile,
                                                 int32_t row, int32_t lane, float max, float sum,
                                                 const float4 (&acc)[Chunks]) {
  const int32_t group_size = params.num_q_heads / params.num_kv_heads;
  const int32_t token = row / group_size;
  const int32_t q_head = tile.kv_head * group_size + row % group_size;
  const RowEnd end = end_row(params, q_head, max, sum);
#pragma unroll
  for (int32_t h = 0; h < Chunks; ++h) {
    const float parts[kCombineLaneDims] = {acc[h].x, acc[h].y, acc[h].z, acc[h].w};
    write_chunk(params, token, q_head, kCombineLaneDims * lane + h * kCombineDims, parts, end);
  }
  if (lane == 0) write_lse(params, token, q_head, end);
}

/// A combine tile with the sources of its plan.
struct PlannedCombineTile {
  scheduler::CombineTile tile;
  const int32_t* sources;     ///< PlanView::combine_sources
  int32_t first_partial = 0;  ///< the plan's first partial row

  /// The partial row of source `s`, at row `row` of the tile.
  __device__ __forceinline__ int32_t partial(int32_t s, int32_t row) const {
    return sources[s] + first_partial + row - tile.row_begin;
  }
};

/// Folds the partial results of a row. Reads do not wait for folds: row maxima and sums of 32 are read at once, values
/// of kAhead.
template <int32_t Chunks>
__device__ __forceinline__ void combine_row(const AttentionParams& params, const PlannedCombineTile& planned,
                                            int32_t row, int32_t lane) {
  const scheduler::CombineTile& tile = planned.tile;
  constexpr int32_t kAhead = kCombineAhead<Chunks>;
  const int32_t d = kCombineLaneDims * lane;
  float4 acc[Chunks] = {};
  float max = -INFINITY;
  float sum = 0.0f;
  for (int32_t first = tile.source_begin; first < tile.source_end; first += 32) {
    const int32_t count = min(tile.source_end - first, 32);
    int32_t partial = 0;
    float lane_max = 0.0f;
    float lane_sum = 0.0f;
    if (lane < count) {
      partial = planned.partial(first + lane, row);
      lane_max = __ldcg(params.partial_row_max + partial);
      lane_sum = __ldcg(params.partial_row_sum + partial);
    }
    for (int32_t s = 0; s < count; s += kAhead) {
      float4 values[kAhead][Chunks];
#pragma unroll
      for (int32_t i = 0; i < kAhead; ++i) {
        const int32_t source = __shfl_sync(kCombineLanes, partial, (s + i) % 32);
#pragma unroll
        for (int32_t h = 0; h < Chunks; ++h) {
          values[i][h] = load_four(params, source, d + h * kCombineDims, s + i < count);
        }
      }
#pragma unroll
      for (int32_t i = 0; i < kAhead; ++i) {
        const float other_max = __shfl_sync(kCombineLanes, lane_max, (s + i) % 32);
        const float other_sum = __shfl_sync(kCombineLanes, lane_sum, (s + i) % 32);
        if (s + i >= count) break;
        const Fold f = fold_factors(max, sum, other_max, other_sum);
        sum = fold(f, sum, other_sum);
        max = f.max;
#pragma unroll
        for (int32_t h = 0; h < Chunks; ++h) acc[h] = fold_four(f, acc[h], values[i][h]);
      }
    }
  }
  finish_combined_row(params, tile, row, lane, max, sum, acc);
}

/// The same for rows `row`, `row + step`, ... at once: for output tiles of many rows, which have few splits. Same bits.
template <int32_t Chunks>
__device__ __forceinline__ void combine_rows(const AttentionParams& params, const PlannedCombineTile& planned,
                                             int32_t row, int32_t step, int32_t lane) {
  const scheduler::CombineTile& tile = planned.tile;
  constexpr int32_t kRows = 4 / Chunks;
  const int32_t d = kCombineLaneDims * lane;
  float4 acc[kRows][Chunks] = {};
  float max[kRows];
  float sum[kRows];
#pragma unroll
  for (int32_t i = 0; i < kRows; ++i) {
    max[i] = -INFINITY;
    sum[i] = 0.0f;
  }
#pragma unroll 2
  for (int32_t s = tile.source_begin; s < tile.source_end; ++s) {
    const int32_t source = planned.partial(s, 0);
    float4 values[kRows][Chunks];
    float other_max[kRows];
    float other_sum[kRows];
#pragma unroll
    for (int32_t i = 0; i < kRows; ++i) {
      const int32_t r = min(row + i * step, tile.row_end - 1);
      other_max[i] = __ldcg(params.partial_row_max + source + r);
      other_sum[i] = __ldcg(params.partial_row_sum + source + r);
#pragma unroll
      for (int32_t h = 0; h < Chunks; ++h) values[i][h] = load_four(params, source + r, d + h * kCombineDims, true);
    }
#pragma unroll
    for (int32_t i = 0; i < kRows; ++i) {
      const Fold f = fold_factors(max[i], sum[i], other_max[i], other_sum[i]);
      sum[i] = fold(f, sum[i], other_sum[i]);
      max[i] = f.max;
#pragma unroll
      for (int32_t h = 0; h < Chunks; ++h) acc[i][h] = fold_four(f, acc[i][h], values[i][h]);
    }
  }
#pragma unroll
  for (int32_t i = 0; i < kRows; ++i) {
    if (row + i * step < tile.row_end) finish_combined_row(params, tile, row + i * step, lane, max[i], sum[i], acc[i]);
  }
}

/// Combines an output tile by `warps` warps, of which this is `warp`.
template <int32_t Chunks>
__device__ __forceinline__ void run_combine(const AttentionParams& params, const PlannedCombineTile& planned,
                                            int32_t warp, int32_t warps, int32_t lane) {
  const scheduler::CombineTile& tile = planned.tile;
  constexpr int32_t kRows = 4 / Chunks;
  constexpr int32_t kManyRows = 32;
  if (tile.row_end - tile.row_begin < kManyRows) {
    for (int32_t row = tile.row_begin + warp; row < tile.row_end; row += warps) {
      combine_row<Chunks>(params, planned, row, lane);
    }
    return;
  }
  for (int32_t row = tile.row_begin + warp; row < tile.row_end; row += kRows * warps) {
    combine_rows<Chunks>(params, planned, row, warps, lane);
  }
}

}  // namespace folio::inline v0::kernels::cuda
