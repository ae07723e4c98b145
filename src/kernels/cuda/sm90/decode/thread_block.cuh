#pragma once

#include "kernels/cuda/sm90/decode/math_warp.cuh"
#include "kernels/cuda/sm90/decode/scheduler.cuh"
#include "ptx/control.cuh"

/// One CTA an SM: its last warp schedules, the others compute.
namespace folio::inline v0::kernels::cuda::sm90::decode {

/// Bytes of shared memory, with what it takes to begin at a multiple of 1024.
template <int32_t DimQk, int32_t DimV, Fp8 kFp8>
constexpr int32_t shared_bytes() {
  constexpr HeadDims kDims{DimQk, DimV, element_bytes(kFp8)};
  return 1024 + shared_layout(kDims).rest + static_cast<int32_t>(sizeof(SharedState<math_warps(kDims), stages(kDims)>));
}

/// What each thread does. `memory`: shared, from a multiple of 1024 on. `kRows`: most rows of an item.
template <typename T, int32_t DimQk, int32_t DimV, Fp8 kFp8, int32_t kRows>
__device__ __forceinline__ void run_thread_block(const DecodeParams& params, unsigned char* memory) {
  constexpr HeadDims kDims{DimQk, DimV, element_bytes(kFp8)};
  using State = SharedState<math_warps(kDims), stages(kDims)>;
  static_assert(shared_layout(kDims).rest % alignof(State) == 0);
  static_assert(DimQk % 16 == 0 && DimV % 16 == 0 && (kFp8 == Fp8::kNone || (DimQk % 64 == 0 && DimV % 64 == 0)));
  State& state = *reinterpret_cast<State*>(memory + shared_layout(kDims).rest);
  prefetch_table(params.attention, threads(kDims));
  touch_parameters(params.attention);
  if (threadIdx.x == 0) {
    for (int32_t i = 0; i < kEntries; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&state.full[i]), kLaneArrivals);
      ptx::mbarrier_init(ptx::shared_address(&state.empty[i]), math_threads(kDims));
    }
    for (int32_t i = 0; i < math_warps(kDims) * stages(kDims); ++i) {
      ptx::mbarrier_init(ptx::shared_address(&state.arrived[0][0] + i), kLaneArrivals);
    }
    ptx::mbarrier_init_fence();
  }
  if (threadIdx.x == 32) {
    for (int32_t i = 0; i < kMaxSegments; ++i) {
      if (params.box[i] == kSingles) continue;
      ptx::prefetch_tensormap(&params.maps[i].k);
      ptx::prefetch_tensormap(&params.maps[i].v);
    }
  }
  __syncthreads();
  // All before this runs under the end of the kernel before. The plan that the merge reads while it waits for this one
  // is there from here on.
  ptx::griddep_wait();
  ptx::griddep_launch_dependents();
  if (threadIdx.x >= math_threads(kDims)) {
    Scheduler<T, DimQk, DimV, kFp8, kRows>(params, memory, state).run();
  } else {
    MathWarp<T, DimQk, DimV, kFp8, kRows>(params, memory, state).run();
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
