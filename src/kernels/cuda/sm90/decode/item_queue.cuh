#pragma once

#include "kernels/cuda/attention_kernel.hpp"

namespace folio::inline v0::kernels::cuda::sm90 {

/// The items of a CTA, in order: those of its first claim, whose number is the block's, and of the claims that
/// it gets from the counter that all blocks share. By all lanes of the scheduler's warp.
class ItemQueue {
 public:
  __device__ __forceinline__ ItemQueue(const scheduler::PlanView& plan, uint32_t* counters)
      : plan_(plan), counters_(counters) {}

  /// Index of the first item, -1 where there is none.
  __device__ __forceinline__ int32_t first() const {
    const auto claim = static_cast<int32_t>(blockIdx.x);
    return claim < plan_.num_dynamic_tiles ? claim : -1;
  }

  /// Index of the item after `item`: of the same accumulation, or the next claim's.
  __device__ __forceinline__ int32_t next(const scheduler::WorkTile& item) const {
    if ((item.flags & scheduler::kFinish) == 0) return item.partial;
    uint32_t ticket = 0;
    if (threadIdx.x % 32 == 0) ticket = atomicAdd(counters_, 1u);
    const uint32_t claim = static_cast<uint32_t>(plan_.num_workers) + __shfl_sync(0xffffffffu, ticket, 0);
    return claim < static_cast<uint32_t>(plan_.num_dynamic_tiles) ? static_cast<int32_t>(claim) : -1;
  }

  /// By a block that has no more: the last one leaves the counters as it found them.
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
