#include "kernels/cuda/common/cache/move.cuh"
#include "kernels/cuda/common/cache/shape.hpp"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/common/tables/tables.cuh"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kMaxRows = 65535;            // of a grid
constexpr int64_t kRenumberBlocks = 132 * 16;  // in all, where every row has tokens

/// A row's pages, as far as it has columns for them.
__device__ int64_t pages_of(const RenumberParams& params, int64_t row) {
  if (row >= params.num_rows) return 0;
  const int64_t length = max(0, params.seq_lens[row]);
  return min((length + params.move.page_size - 1) / params.move.page_size, int64_t{params.columns});
}

/// A CTA a row: the new table.
__global__ void __launch_bounds__(kMoveThreads) number_kernel(const __grid_constant__ RenumberParams params) {
  __shared__ int64_t sums[kMoveThreads / 32 + 1];
  for (int64_t row = blockIdx.x; row < params.num_rows; row += gridDim.x) {
    int64_t before = 1;
    for (int64_t first = 0; first < row; first += kMoveThreads) {
      const int64_t other = first + threadIdx.x;
      before += BlockSum<kMoveThreads>(other < row ? pages_of(params, other) : 0, sums).all;
    }
    const int64_t pages = pages_of(params, row);
    const int32_t length = params.seq_lens[row];
    const bool fits = length >= 0 && length <= int64_t{params.columns} * params.move.page_size;
    if (threadIdx.x == 0 && !fits) report(params.move);
    for (int64_t column = threadIdx.x; column < params.columns; column += kMoveThreads) {
      const int64_t page = column < pages ? before + column : 0;
      const bool exists = page < params.to_pages;
      if (!exists) report(params.move);
      params.new_table[row * params.columns + column] = exists ? static_cast<int32_t>(page) : 0;
    }
  }
}

/// Column y of CTAs: row y's tokens; layer z: a half.
template <typename Move>
__global__ void __launch_bounds__(kMoveThreads, 4) renumber_kernel(const __grid_constant__ RenumberParams params) {
  const MoveHalf& half = params.move.halves[params.move.first_half + blockIdx.z];
  __shared__ MoveTile tile;
  const int32_t thread = threadIdx.x;
  for (int64_t row = blockIdx.y; row < params.num_rows; row += gridDim.y) {
    const int64_t most = int64_t{params.columns} * params.move.page_size;
    const int64_t num_tokens = min(int64_t{params.seq_lens[row]}, most);
    for (int64_t first = int64_t{blockIdx.x} * params.move.tile; first < num_tokens;
         first += int64_t{gridDim.x} * params.move.tile) {
      const auto count = static_cast<int32_t>(min(int64_t{params.move.tile}, num_tokens - first));
      if (thread < count) {
        const int64_t column = (first + thread) / params.move.page_size;
        const int64_t in_page = (first + thread) % params.move.page_size;
        const int64_t from = params.table[row * params.table_stride + column];
        const int64_t to = params.new_table[row * params.columns + column];
        tile.request[thread] = static_cast<int32_t>(row);
        tile.from[thread] = nullptr;
        if (from < 0 || from >= params.from_pages) {
          report(params.move);
        } else if (to > 0) {
          place_token(half, tile, thread, from, in_page, to, in_page);
        }
      }
      __syncthreads();
      move_tile<Move>(half, tile, count);
      __syncthreads();
    }
  }
}

}  // namespace

void enqueue(const RenumberParams& given, Stream stream) {
  if (given.num_rows == 0 || given.columns == 0) return;
  RenumberParams params = given;
  const int64_t row_tokens = int64_t{params.columns} * params.move.page_size;
  set_shape(params.move, params.num_rows * row_tokens);
  number_kernel<<<grid_for(params.num_rows, 1), kMoveThreads, 0, native(stream)>>>(params);
  check_launch("the numbering of pages");
  const auto rows = static_cast<uint32_t>(std::min(params.num_rows, kMaxRows));
  for_halves(params.move, [&](auto type, int32_t first, int32_t count) {
    params.move.first_half = first;
    const dim3 grid(grid_for(row_tokens, params.move.tile, std::max<int64_t>(kRenumberBlocks / rows, 1)), rows,
                    static_cast<uint32_t>(count));
    renumber_kernel<typename decltype(type)::Move><<<grid, kMoveThreads, 0, native(stream)>>>(params);
    check_launch("the conversion of pages in use");
  });
}

}  // namespace folio::inline v0::kernels::cuda
