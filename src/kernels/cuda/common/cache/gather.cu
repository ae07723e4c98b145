#include "kernels/cuda/common/cache/move.cuh"
#include "kernels/cuda/common/cache/shape.hpp"
#include "kernels/cuda/common/kv_cache_views.cuh"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/common/tables/tables.cuh"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int64_t kGatherBlocks = 132 * 8;  // each finds its first row by adding up lengths, so there are not many

/// A row of the table and the first of its tokens, counted over all rows.
struct RowPlace {
  int32_t row;
  int64_t begin;
};

__device__ int64_t length_of(const GatherParams& params, int64_t row) {
  return row < params.num_rows ? max(0, params.kv_len[row]) : 0;
}

/// The row that token `wanted` belongs to; num_rows, and the sum of all lengths, where there is none.
__device__ RowPlace find_row(const GatherParams& params, int64_t wanted, int64_t* sums, RowPlace& found) {
  int64_t before = 0;
  const int32_t thread = threadIdx.x;
  for (int64_t first = 0; first < params.num_rows; first += kMoveThreads) {
    const int64_t length = length_of(params, first + thread);
    const BlockSum<kMoveThreads> sum(length, sums);
    if (before + sum.all > wanted) {
      const int64_t begin = before + sum.to - length;
      if (begin <= wanted && wanted < begin + length) found = {static_cast<int32_t>(first + thread), begin};
      __syncthreads();
      return found;
    }
    before += sum.all;
  }
  return {params.num_rows, before};
}

template <typename Move>
__global__ void __launch_bounds__(kMoveThreads, 4) gather_kernel(const __grid_constant__ GatherParams params) {
  const MoveHalf& half = params.move.halves[params.move.first_half + blockIdx.y];
  __shared__ MoveTile tile;
  __shared__ int64_t sums[kMoveThreads / 32 + 1];
  __shared__ RowPlace first_place;
  __shared__ RowPlace last_place;
  const int32_t thread = threadIdx.x;
  const int64_t tiles = (params.num_tokens + params.move.tile - 1) / params.move.tile;
  const int64_t per_block = (tiles + gridDim.x - 1) / gridDim.x * params.move.tile;
  const int64_t begin = int64_t{blockIdx.x} * per_block;
  const int64_t end = min(begin + per_block, params.num_tokens);
  if (begin >= end) return;
  RowPlace place = find_row(params, begin, sums, first_place);
  for (int64_t first = begin; first < end; first += params.move.tile) {
    const auto count = static_cast<int32_t>(min(int64_t{params.move.tile}, end - first));
    if (thread < count) {
      const int64_t token = first + thread;
      RowPlace mine = place;
      while (mine.row < params.num_rows && token >= mine.begin + length_of(params, mine.row)) {
        mine.begin += length_of(params, mine.row);
        ++mine.row;
      }
      const int64_t in_row = token - mine.begin;
      const int64_t page =
          mine.row < params.num_rows ? table_entry(params.table, mine.row, in_row / params.move.page_size) : -1;
      tile.request[thread] = mine.row;
      if (page >= 0 && page < params.num_pages) {
        place_token(half, tile, thread, page, in_row % params.move.page_size, 0, token);
      } else {
        tile.from[thread] = nullptr;
        report(params.move);
      }
      if (thread == count - 1) last_place = mine;
    }
    __syncthreads();
    place = last_place;
    move_tile<Move>(half, tile, count);
    __syncthreads();
  }
  if (end != params.num_tokens) return;
  while (place.row < params.num_rows && place.begin + length_of(params, place.row) <= params.num_tokens) {
    place.begin += length_of(params, place.row);
    ++place.row;
  }
  if (thread == 0 && place.row < params.num_rows) report(params.move);  // more tokens than the tensors have
}

}  // namespace

void enqueue(const GatherParams& given, Stream stream) {
  if (given.num_tokens == 0) return;
  GatherParams params = given;
  set_shape(params.move, params.num_tokens);
  for_halves(params.move, [&](auto type, int32_t first, int32_t count) {
    params.move.first_half = first;
    const dim3 grid(grid_for(params.num_tokens, params.move.tile, kGatherBlocks), static_cast<uint32_t>(count));
    gather_kernel<typename decltype(type)::Move><<<grid, kMoveThreads, 0, native(stream)>>>(params);
    check_launch("the gather of pages");
  });
}

}  // namespace folio::inline v0::kernels::cuda
