#pragma once

#include "kernels/cuda/common/mask.cuh"
#include "kernels/cuda/sm80/smem.cuh"

/// The mask bounds of a work tile's rows, and the mask of their logits.
namespace folio::inline v0::kernels::cuda::sm80 {

/// Binds rows to requests, positions and visible tokens, a thread a row, and reduces the ranges of all rows to
/// context.visible_range. All threads call; passes barriers.
template <int32_t Rows>
__device__ __forceinline__ void bind_rows(const AttentionParams& params, const scheduler::PlanView& plan,
                                          SharedStorage<Rows>& storage) {
  WorkTileContext& context = storage.context;
  const scheduler::WorkTile& work_tile = context.work_tile;
  const scheduler::SegmentLengths& lengths = plan.segments[work_tile.segment];
  const int32_t row = static_cast<int32_t>(threadIdx.x);
  VisibleRange visible_range{INT32_MAX, 0, 0, INT32_MAX};
  if (row < Rows) {
    int32_t begin = 0;
    int32_t end = 0;
    if (row < context.num_rows && work_tile.kv_begin < work_tile.kv_end) {
      const int32_t token = row_place(params, work_tile, row).token;
      int32_t request = work_tile.request;
      while (plan.cu_q[request + 1] <= token) ++request;
      const int32_t index = token - plan.cu_q[request];
      const int64_t position = int64_t{plan.q_first_pos[request]} + index;
      const scheduler::MaskBounds mask_bounds = scheduler::mask_bounds(params.mask, lengths.mask);
      const scheduler::TokenRange range = scheduler::visible_to_token(
          {lengths.first_pos[work_tile.kv_row], lengths.kv_len[work_tile.kv_row], lengths.shard}, mask_bounds,
          plan.visible_positions, token, position);
      begin = static_cast<int32_t>(range.begin < work_tile.kv_begin ? work_tile.kv_begin : range.begin);
      end = static_cast<int32_t>(range.end > work_tile.kv_end ? work_tile.kv_end : range.end);
      if (begin >= end) begin = end = 0;
      storage.position[row] = static_cast<int32_t>(position);
      storage.request[row] = request;
      storage.mask_begin[row] = INT32_MAX;
      if (context.custom) {
        const int32_t mask_begin = plan.mask_first_column[request] - lengths.key_offset[request];
        storage.mask_begin[row] = mask_begin;
        storage.mask_bit[row] =
            8 * plan.mask_byte_indptr[request] + int64_t{index} * plan.mask_columns[request] - mask_begin;
      }
      if (begin < end) {
        visible_range.any_begin = begin;
        visible_range.any_end = end;
      }
      visible_range.all_begin = begin;
      visible_range.all_end = end;
    }
    storage.visible_begin[row] = begin;
    storage.visible_end[row] = end;
  }
  constexpr uint32_t kAll = 0xffffffffu;
  visible_range.any_begin = __reduce_min_sync(kAll, visible_range.any_begin);
  visible_range.any_end = __reduce_max_sync(kAll, visible_range.any_end);
  visible_range.all_begin = __reduce_max_sync(kAll, visible_range.all_begin);
  visible_range.all_end = __reduce_min_sync(kAll, visible_range.all_end);
  if (threadIdx.x % 32 == 0) storage.visible_range[threadIdx.x / 32] = visible_range;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int32_t w = 1; w < kWarps; ++w) {
      const VisibleRange other = storage.visible_range[w];
      visible_range.any_begin = min(visible_range.any_begin, other.any_begin);
      visible_range.any_end = max(visible_range.any_end, other.any_end);
      visible_range.all_begin = max(visible_range.all_begin, other.all_begin);
      visible_range.all_end = min(visible_range.all_end, other.all_end);
    }
    context.visible_range = visible_range;
  }
  __syncthreads();
}

/// Logits of tokens that a row does not see become -infinity. A lane's rows are `first_row` and those 8, 16, ...
/// further; `first` is the token of its first column.
template <int32_t RowTiles, int32_t ColumnTiles, int32_t Rows>
__device__ __forceinline__ void apply_mask(const SharedStorage<Rows>& storage, int32_t first_row, int32_t first,
                                           float (&s)[RowTiles][ColumnTiles][4]) {
#pragma unroll
  for (int32_t m = 0; m < RowTiles; ++m) {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const int32_t row = first_row + 16 * m + 8 * h;
      const int32_t begin = storage.visible_begin[row] - first;
      const int32_t end = storage.visible_end[row] - first;
#pragma unroll
      for (int32_t n = 0; n < ColumnTiles; ++n) {
#pragma unroll
        for (int32_t j = 0; j < 2; ++j) {
          const int32_t column = 8 * n + j;
          if (column < begin || column >= end) s[m][n][2 * h + j] = -INFINITY;
        }
      }
    }
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm80
