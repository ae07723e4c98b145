#pragma once

#include <cuda_runtime.h>

#include <cstdint>

/// What kernels over lengths and page tables share: the status, page counts, scans over a CTA.
namespace folio::inline v0::kernels::cuda {

/// Notes that something that a kernel found was left out.
__device__ inline void report(int32_t* status) {
  if (status != nullptr) *status = 1;
}

/// Units that `length`, of at most INT_MAX, takes.
__device__ inline int64_t units_of(int64_t length, int32_t unit) {
  return (static_cast<uint32_t>(length) + static_cast<uint32_t>(unit) - 1) / static_cast<uint32_t>(unit);
}

/// A scan over a CTA of kThreads, a multiple of 32. `shared` has kThreads / 32 + 1 entries. All threads call; `shared`
/// may be written again only behind the next call's first barrier.
template <int32_t kThreads>
struct BlockSum {
  int64_t to;   ///< over the threads up to and including this one
  int64_t all;  ///< over all

  __device__ BlockSum(int64_t value, int64_t* shared) {
    constexpr int32_t kWarps = kThreads / 32;
    const int32_t lane = threadIdx.x % 32;
    const int32_t warp = threadIdx.x / 32;
    to = value;
#pragma unroll
    for (int32_t distance = 1; distance < 32; distance *= 2) {
      const int64_t before = __shfl_up_sync(0xffffffffu, to, distance);
      if (lane >= distance) to += before;
    }
    __syncthreads();  // what an earlier call left has been read
    if (lane == 31) shared[warp] = to;
    __syncthreads();
    all = 0;
#pragma unroll
    for (int32_t w = 0; w < kWarps; ++w) {
      const int64_t sum = shared[w];
      if (w < warp) to += sum;
      all += sum;
    }
  }
};

}  // namespace folio::inline v0::kernels::cuda
