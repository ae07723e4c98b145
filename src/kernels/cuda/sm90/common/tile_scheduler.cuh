#pragma once

#include "kernels/cuda/attention_kernel.hpp"
#include "kernels/cuda/sm90/common/sm_partition.hpp"

namespace folio::inline v0::kernels::cuda::sm90 {

/// CTAs of the prefill pass, of two passes that share the GPU: those of the shortest step, one of 32 candidates a lane.
/// All lanes of a warp call it; both kernels get the same number. A call, since most launches do not come here and
/// would fetch the instructions.
__device__ FOLIO_CALLED inline int32_t prefill_ctas(const AttentionParams& params, const scheduler::PlanView& prefill,
                                                    const scheduler::PlanView& decode) {
  const int32_t workers = decode.num_workers;
  if (prefill.num_dynamic_tiles == 0) return 0;
  if (decode.num_dynamic_tiles == 0) return workers;
  const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
  const auto candidate = [workers](int32_t number) { return (workers * (number + 1) + 31) / 32; };
  const float time = step_time(prefill, params.prefill_cost, decode, params.decode_cost, candidate(lane));
  constexpr uint32_t kLanes = 31;  // in a positive float's last bits
  const uint32_t best = __reduce_min_sync(0xffffffffu, (__float_as_uint(time) & ~kLanes) | static_cast<uint32_t>(lane));
  return candidate(static_cast<int32_t>(best & kLanes));
}

/// Of the decode pass: CTAs that begin at once, with the work tile of their number. The others begin where the prefill
/// pass has ended, at different times, and claim all of theirs.
__device__ __forceinline__ int32_t first_decode_ctas(const AttentionParams& params) {
  const scheduler::PlanView& plan = params.plan->view;
  if (params.other_plan == nullptr) return plan.num_workers;
  return plan.num_workers - prefill_ctas(params, params.other_plan->view, plan);
}

/// Hands a persistent CTA its work tiles. The first `first_ctas` CTAs begin with the work tile of their number. All
/// other work tiles come from a counter in the plan's image that all CTAs share. All lanes of one warp call it.
/// `first_ctas` stays where it is and is read at every claim: registers are scarce.
class DynamicTileScheduler {
 public:
  __device__ __forceinline__ DynamicTileScheduler(const scheduler::PlanView& plan, uint32_t* counters,
                                                  const int32_t& first_ctas)
      : plan_(plan), counters_(counters), first_ctas_(first_ctas) {}

  /// Index of the first work tile of one of the first CTAs; -1 where there is none.
  __device__ __forceinline__ int32_t initial_work_tile() const {
    const auto tile = static_cast<int32_t>(blockIdx.x);
    return tile < plan_.num_dynamic_tiles ? tile : -1;
  }

  /// Index of the work tile after `tile`: its continuation, or the next one that no CTA has claimed; -1 at the end.
  __device__ __forceinline__ int32_t next_work_tile(const scheduler::WorkTile& tile) const {
    return (tile.flags & scheduler::kFinish) == 0 ? tile.partial : claim_work_tile();
  }

  /// Index of the next work tile that no CTA has claimed; -1 at the end.
  __device__ __forceinline__ int32_t claim_work_tile() const {
    uint32_t ticket = 0;
    if (threadIdx.x % 32 == 0) ticket = atomicAdd(counters_, 1u);
    const uint32_t next = static_cast<uint32_t>(first_ctas_) + __shfl_sync(0xffffffffu, ticket, 0);
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
  const int32_t& first_ctas_;
};

}  // namespace folio::inline v0::kernels::cuda::sm90
