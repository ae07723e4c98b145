#include "kernels/cuda/common/cache/move.cuh"
#include "kernels/cuda/common/cache/shape.hpp"
#include "kernels/cuda/common/launch.hpp"

namespace folio::inline v0::kernels::cuda {
namespace {

template <typename Move>
__global__ void __launch_bounds__(kMoveThreads, 4) pages_kernel(const __grid_constant__ PagesParams params) {
  const MoveHalf& half = params.move.halves[params.move.first_half + blockIdx.y];
  __shared__ MoveTile tile;
  const int32_t thread = threadIdx.x;
  const int64_t num_tokens = params.num_pairs * params.move.page_size;
  for (int64_t first = int64_t{blockIdx.x} * params.move.tile; first < num_tokens;
       first += int64_t{gridDim.x} * params.move.tile) {
    const auto count = static_cast<int32_t>(min(int64_t{params.move.tile}, num_tokens - first));
    if (thread < count) {
      const int64_t pair = (first + thread) / params.move.page_size;
      const int64_t token = (first + thread) % params.move.page_size;
      const int64_t from = params.source[pair];
      const int64_t to = params.destination[pair];
      tile.request[thread] = 0;
      if (from >= 0 && from < params.from_pages && to >= 0 && to < params.to_pages) {
        place_token(half, tile, thread, from, token, to, token);
      } else {
        tile.from[thread] = nullptr;
        report(params.move);
      }
    }
    __syncthreads();
    move_tile<Move>(half, tile, count);
    __syncthreads();
  }
}

}  // namespace

void enqueue(const PagesParams& given, Stream stream) {
  if (given.num_pairs == 0) return;
  PagesParams params = given;
  const int64_t num_tokens = params.num_pairs * params.move.page_size;
  set_shape(params.move, num_tokens);
  for_halves(params.move, [&](auto type, int32_t first, int32_t count) {
    params.move.first_half = first;
    const dim3 grid(grid_for(num_tokens, params.move.tile), static_cast<uint32_t>(count));
    pages_kernel<typename decltype(type)::Move><<<grid, kMoveThreads, 0, native(stream)>>>(params);
    check_launch("the conversion of pages");
  });
}

}  // namespace folio::inline v0::kernels::cuda
