#pragma once

#include "kernels/cuda/sm90/prefill/native_loader.cuh"
#include "kernels/cuda/sm90/prefill/native_math_group.cuh"
#include "kernels/cuda/sm90/prefill/thread_block.cuh"

/// The kernel whose products take codes as they are: e4m3 queries, keys and values, rows that see ranges of keys.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

constexpr int32_t kNativeSharedBytes = shared_bytes<kNativeDims.qk, kNativeDims.v>();

/// See run_thread_block.
__device__ __forceinline__ void run_native_thread_block(const PrefillParams& params, unsigned char* memory) {
  SharedState& state = *reinterpret_cast<SharedState*>(memory + shared_layout(kNativeDims).rest);
  init_barriers(state, kMathWarps);
  if (threadIdx.x < kGroupThreads) {
    ptx::warpgroup_reg_dealloc<kLoadRegisters>();
    NativeLoader(params, memory, state).run();
  } else {
    ptx::warpgroup_reg_alloc<kMathRegisters>();
    NativeMathGroup(params, memory, state).run();
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
