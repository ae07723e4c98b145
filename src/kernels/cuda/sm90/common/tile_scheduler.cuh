#pragma once

#include "kernels/cuda/attention_kernel.hpp"

namespace folio::inline v0::kernels::cuda::sm90 {

/// Hands a persistent CTA its work tiles. The first one has the CTA's number; the next ones come from a counter in the
/// plan's image that all CTAs share. All lanes of one warp call it.
class DynamicTileScheduler {
 public:
  __device__ __forceinline__ DynamicTileScheduler(const scheduler::PlanView& plan, uint32_t* counters)
      : plan_(plan), counters_(counters) {}

  /// Index of the CTA's first work tile; -1 where there is none.
  __device__ __forceinline__ int32_t initial_work_tile() const {
    const auto tile = static_cast<int32_t>(blockIdx.x);
    return tile < plan_.num_dynamic_tiles ? tile : -1;
  }

  /// Index of the work tile after `tile`: its continuation, or the next one that no CTA has claimed; -1 at the end.
  __device__ __forceinline__ int32_t next_work_tile(const scheduler::WorkTile& tile) const {
    if ((tile.flags & scheduler::kFinish) == 0) return tile.partial;
    uint32_t ticket = 0;
    if (threadIdx.x % 32 == 0) ticket = atomicAdd(counters_, 1u);
    const uint32_t next = static_cast<uint32_t>(plan_.num_workers) + __shfl_sync(0xffffffffu, ticket, 0);
    return next < static_cast<uint32_t>(plan_.num_dynamic_tiles) ? static_cast<int32_t>(next) : -1;
  }

  /// Called once by each CTA that has no more work. The last CTA resets the counters for the next launch.
  __device__ __forceinline__ void finish() const {
    if (threadIdx.x % 32 != 0) return;
    __threadfence();
    if (atomicAdd(counters_ + kTileCounterStride, 1u) != gridDim.x - 1) return;
    counters_[0] = 0;
    counters_[kTileCounterStride] = 0;
  }

 private:
  const scheduler::PlanView& plan_;
  uint32_t* const counters_;
};

}  // namespace folio::inline v0::kernels::cuda::sm90
