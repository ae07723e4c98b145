#pragma once

#include <type_traits>

#include "kernels/cuda/sm90/prefill/code_loader.cuh"
#include "kernels/cuda/sm90/prefill/math_group.cuh"
#include "ptx/control.cuh"

/// One CTA an SM: its first warpgroup loads, the others compute.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

/// Bytes of shared memory, with what it takes to begin at a multiple of 1024.
template <int32_t DimQk, int32_t DimV>
constexpr int32_t shared_bytes() {
  return 1024 + shared_layout({DimQk, DimV}).rest + static_cast<int32_t>(sizeof(SharedState));
}

/// By all threads, before anything else. `keys_emptied`: arrivals that give a tile of keys back.
__device__ __forceinline__ void init_barriers(SharedState& state, uint32_t keys_emptied) {
  if (threadIdx.x == 0) {
    for (int32_t i = 0; i < kItems; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&state.item_full[i]), kFullArrivals);
      ptx::mbarrier_init(ptx::shared_address(&state.item_empty[i]), kMathWarps * 32);
    }
    for (int32_t i = 0; i < kMaxStages; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&state.keys.full[i]), kFullArrivals);
      ptx::mbarrier_init(ptx::shared_address(&state.keys.empty[i]), keys_emptied);
      ptx::mbarrier_init(ptx::shared_address(&state.values.full[i]), kFullArrivals);
      ptx::mbarrier_init(ptx::shared_address(&state.values.empty[i]), kMathWarps);
    }
    ptx::mbarrier_init(ptx::shared_address(&state.landed), kFullArrivals);
    for (int32_t i = 0; i < 2 * kMaxStages * kGroupWarps; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&state.codes_landed[0][0][0]) + 8 * i, 1);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
}

/// What each thread does. `memory`: shared, from a multiple of 1024 on. `kFp8`: those that keys and values are; of
/// kNone, they are of type T, as products take them.
template <typename T, int32_t DimQk, int32_t DimV, Variant kVariant, Fp8 kFp8 = Fp8::kNone>
__device__ __forceinline__ void run_thread_block(const PrefillParams& params, unsigned char* memory) {
  static_assert(DimQk % 32 == 0 && DimV % 32 == 0 && DimQk >= DimV && stages({DimQk, DimV}) <= kMaxStages);
  SharedState& state = *reinterpret_cast<SharedState*>(memory + shared_layout({DimQk, DimV}).rest);
  static_assert(shared_layout({DimQk, DimV}).rest % alignof(SharedState) == 0);
  init_barriers(state, kVariant == Variant::kAny ? kMathWarps * 32 : kMathWarps);  // see release_keys
  if (threadIdx.x < kGroupThreads) {
    ptx::warpgroup_reg_dealloc<kFp8 == Fp8::kNone ? kLoadRegisters : kCodeLoadRegisters>();
    if constexpr (kFp8 == Fp8::kNone) {
      Loader<T, DimQk, DimV, kVariant>(params, memory, state).run();
    } else {
      static_assert(std::is_same_v<T, __half> && DimQk == kCodeDim && DimV == kCodeDim);
      CodeLoader<kFp8, kVariant>(params, memory, state).run();
    }
  } else {
    ptx::warpgroup_reg_alloc<kFp8 == Fp8::kNone ? kMathRegisters : kCodeMathRegisters>();
    MathGroup<T, DimQk, DimV, kVariant>(params, memory, state).run();
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
