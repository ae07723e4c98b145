#pragma once

#include "kernels/cuda/sm90/mla/loader.cuh"
#include "kernels/cuda/sm90/mla/math_group.cuh"
#include "ptx/control.cuh"

/// One CTA an SM: its first warpgroup loads, the others compute.
namespace folio::inline v0::kernels::cuda::sm90::mla {

/// Bytes of shared memory, with what it takes to begin at a multiple of 1024.
constexpr int32_t kSharedBytes = 1024 + kRest + static_cast<int32_t>(sizeof(SharedState));
static_assert(kSharedBytes <= kSharedLimit && kRest % alignof(SharedState) == 0);

/// What each thread does. `memory`: shared, from a multiple of 1024 on.
template <typename T, bool General>
__device__ __forceinline__ void run_thread_block(const MlaParams& params, unsigned char* memory) {
  SharedState& state = *reinterpret_cast<SharedState*>(memory + kRest);
  if (threadIdx.x == 0) {
    for (int32_t i = 0; i < kItems; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&state.item_full[i]), kFullArrivals);
      ptx::mbarrier_init(ptx::shared_address(&state.item_empty[i]), kMathThreads);
    }
    ptx::mbarrier_init(ptx::shared_address(&state.queries_empty), kMathThreads);
    for (int32_t i = 0; i < kStages; ++i) {
      for (int32_t part = 0; part < kParts; ++part) {
        ptx::mbarrier_init(ptx::shared_address(&state.full[i][part]), kFullArrivals);
        ptx::mbarrier_init(ptx::shared_address(&state.empty[i][part]), part == kTail ? kMathThreads : kHalfArrivals);
      }
      ptx::mbarrier_init(ptx::shared_address(&state.landed[i]), kLandedArrivals);
    }
    for (int32_t i = 0; i < 2; ++i) {
      for (int32_t warp = 0; warp < kGroupWarps; ++warp) {
        ptx::mbarrier_init(ptx::shared_address(&state.told[i][warp]), 32);
        ptx::mbarrier_init(ptx::shared_address(&state.weighed[i][warp]), 32);
      }
    }
    for (uint64_t& summed : state.summed) ptx::mbarrier_init(ptx::shared_address(&summed), 2 * 32);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < kGroupThreads) {
    ptx::warpgroup_reg_dealloc<kLoadRegisters>();
    Loader<T>(params, memory, state).run();
  } else {
    ptx::warpgroup_reg_alloc<kMathRegisters>();
    MathGroup<T, General>(params, memory, state).run();
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
