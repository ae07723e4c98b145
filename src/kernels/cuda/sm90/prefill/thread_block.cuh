#pragma once

#include "kernels/cuda/sm90/prefill/loader.cuh"
#include "kernels/cuda/sm90/prefill/math_group.cuh"
#include "ptx/warpgroup.cuh"

/// One thread block a multiprocessor: its first warpgroup loads, the others compute.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

/// Bytes of shared memory, with what it takes to begin at a multiple of 1024.
template <int32_t DimQk, int32_t DimV>
constexpr int32_t shared_bytes() {
  return 1024 + shared_layout({DimQk, DimV}).rest + static_cast<int32_t>(sizeof(SharedState));
}

/// What each thread does. `memory`: shared, from a multiple of 1024 on.
template <typename T, int32_t DimQk, int32_t DimV, bool General>
__device__ __forceinline__ void run_thread_block(const PrefillParams& params, unsigned char* memory) {
  static_assert(DimQk % 64 == 0 && DimV % 64 == 0 && DimQk >= DimV);
  SharedState& state = *reinterpret_cast<SharedState*>(memory + shared_layout({DimQk, DimV}).rest);
  static_assert(shared_layout({DimQk, DimV}).rest % alignof(SharedState) == 0);
  if (threadIdx.x == 0) {
    for (int32_t i = 0; i < kItems; ++i) {
      ptx::init_barrier(ptx::shared_address(&state.item_full[i]), kFullArrivals);
      ptx::init_barrier(ptx::shared_address(&state.item_empty[i]), kMathWarps * 32);
    }
    for (int32_t i = 0; i < kStages; ++i) {
      ptx::init_barrier(ptx::shared_address(&state.full[i]), kFullArrivals);
      ptx::init_barrier(ptx::shared_address(&state.empty[i]), kMathWarps);
    }
    ptx::init_barrier(ptx::shared_address(&state.landed), kFullArrivals);
    ptx::publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x < kGroupThreads) {
    ptx::give_up_registers<kLoadRegisters>();
    Loader<T, DimQk, DimV>(params, memory, state).run();
  } else {
    ptx::claim_registers<kMathRegisters>();
    MathGroup<T, DimQk, DimV, General>(params, memory, state).run();
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
