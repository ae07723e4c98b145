#pragma once

#include "kernels/cuda/sm90/prefill/config.hpp"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"

/// The K and V pipelines between the producer warpgroup and the consumer warpgroups: stages of shared memory, with a
/// full and an empty barrier each.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

constexpr uint32_t kAllLanes = 0xffffffffu;

/// Arrivals of each producer thread at a full barrier: one of its own, one when its cp.async copies are complete. Every
/// lane arrives for itself: compute-sanitizer's racecheck and synccheck do not follow one lane that arrives for a warp
/// behind __syncwarp.
constexpr uint32_t kLaneArrivals = 2;
constexpr uint32_t kFullArrivals = kLaneArrivals * kWarpgroupThreads;

/// The K or the V pipeline: its barriers.
struct KvPipeline {
  uint64_t full[kMaxStages];   ///< phase n: the stage's tile number n is complete
  uint64_t empty[kMaxStages];  ///< phase n: the consumers have released it
};
/// From a stage's full barrier to its empty barrier.
constexpr uint32_t kToEmpty = 8 * kMaxStages;

/// Position in a pipeline: the next stage, and the parity of its phase.
template <int32_t Stages>
struct PipelineState {
  uint32_t stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == Stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void advance(int32_t tiles) {
    const uint32_t to = stage + static_cast<uint32_t>(tiles);
    stage = to % Stages;
    parity ^= to / Stages & 1;
  }
};

/// A stage that the producer fills.
struct PipelineStage {
  uint32_t index = 0;
  uint32_t tile = 0;    ///< address in shared memory
  uint32_t full = 0;    ///< barrier
  uint32_t parity = 0;  ///< of the empty barrier's phase that must end first
};

/// The next stage of the producer. Tiles of `bytes` begin at `tiles`.
template <int32_t Stages>
__device__ __forceinline__ PipelineStage next_stage(const KvPipeline& pipeline, PipelineState<Stages>& state,
                                                    uint32_t tiles, uint32_t bytes) {
  // The empty barrier of a stage never used counts as past the phase before its first.
  const PipelineStage stage{state.stage, tiles + state.stage * bytes,
                            ptx::shared_address(pipeline.full) + 8 * state.stage, state.parity ^ 1};
  state.advance();
  return stage;
}

/// Waits until the consumers have released the stage.
__device__ __forceinline__ void producer_acquire(const PipelineStage& stage) {
  ptx::mbarrier_wait_warp(stage.full + kToEmpty, stage.parity);
}
/// This thread has written to the stage with ordinary stores.
__device__ __forceinline__ void producer_commit(const PipelineStage& stage, uint32_t arrivals = kLaneArrivals) {
  ptx::fence_view_async_shared();
  ptx::mbarrier_arrive(stage.full, arrivals);
}
/// This thread has copied to the stage, by cp.async if `is_async`: it arrives when the copies are complete.
__device__ __forceinline__ void producer_commit_copies(const PipelineStage& stage, bool is_async) {
  if (!is_async) {
    producer_commit(stage);
    return;
  }
  ptx::cp_async_mbarrier_arrive(stage.full);
  ptx::mbarrier_arrive(stage.full);
}

/// Waits until the next stage of `pipeline`, the address of its barriers, is full. Returns its index.
template <int32_t Stages>
__device__ __forceinline__ uint32_t consumer_wait(uint32_t pipeline, PipelineState<Stages>& state) {
  const uint32_t stage = state.stage;
  ptx::mbarrier_wait_warp(pipeline + 8 * stage, state.parity);
  state.advance();
  return stage;
}
/// This warp no longer reads the stage. `Arrivals`: of a warp.
template <uint32_t Arrivals = 1>
__device__ __forceinline__ void consumer_release(uint32_t pipeline, uint32_t stage, int32_t lane) {
  if (lane == 0) ptx::mbarrier_arrive(pipeline + kToEmpty + 8 * stage, Arrivals);
}

/// Tells the compiler that all lanes hold the same state, so that it stays in uniform registers. The code between work
/// tiles makes it forget.
template <int32_t Stages>
__device__ __forceinline__ void make_uniform(PipelineState<Stages>& state) {
  state.stage = __shfl_sync(kAllLanes, state.stage, 0);
  state.parity = __shfl_sync(kAllLanes, state.parity, 0);
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
