#include "kernels/cuda/common/cache/move.cuh"
#include "kernels/cuda/common/cache/shape.hpp"
#include "kernels/cuda/common/launch.hpp"

namespace folio::inline v0::kernels::cuda {
namespace {

template <typename Move>
__global__ void __launch_bounds__(kMoveThreads, 4) write_kernel(const __grid_constant__ WriteParams params) {
  const MoveHalf& half = params.move.halves[params.move.first_half + blockIdx.y];
  __shared__ MoveTile tile;
  const int32_t thread = threadIdx.x;
  for (int64_t first = int64_t{blockIdx.x} * params.move.tile; first < params.num_slots;
       first += int64_t{gridDim.x} * params.move.tile) {
    const auto count = static_cast<int32_t>(min(int64_t{params.move.tile}, params.num_slots - first));
    if (thread < count) {
      const int64_t slot = params.slots[first + thread];
      tile.request[thread] = 0;
      if (slot >= 0 && slot < params.slot_limit) {
        place_token(half, tile, thread, 0, first + thread, slot / params.move.page_size, slot % params.move.page_size);
      } else {
        tile.from[thread] = nullptr;
        if (slot >= 0) report(params.move);
      }
    }
    __syncthreads();
    move_tile<Move>(half, tile, count);
    __syncthreads();
  }
}

}  // namespace

void enqueue(const WriteParams& given, Stream stream) {
  if (given.num_slots == 0) return;
  WriteParams params = given;
  set_shape(params.move, params.num_slots);
  for_halves(params.move, [&](auto type, int32_t first, int32_t count) {
    params.move.first_half = first;
    const dim3 grid(grid_for(params.num_slots, params.move.tile), static_cast<uint32_t>(count));
    write_kernel<typename decltype(type)::Move><<<grid, kMoveThreads, 0, native(stream)>>>(params);
    check_launch("the cache write");
  });
}

}  // namespace folio::inline v0::kernels::cuda
