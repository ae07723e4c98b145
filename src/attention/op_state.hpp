#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "attention/gpu_backend.hpp"
#include "folio/attention.hpp"
#include "folio/context.hpp"
#include "kernels/attention_kernel.hpp"
#include "platform/thread_pool.hpp"
#include "scheduler/scheduler.hpp"

/// The states behind the public handles: contexts, ops and plans.
namespace folio::inline v0 {
namespace detail {

/// What a Context stands for. Immutable once made; the pool it owns, if any, is thread-safe.
struct ContextState {
  Device device;
  Executor executor;           ///< the engine's, or that of `pool`; a GPU has none
  std::string force_kernel;    ///< empty: none
  bool allow_fp8_mma = false;  ///< of every op
  bool validate_tables = false;
  std::unique_ptr<platform::ThreadPool> pool;        ///< null with an engine's executor
  std::shared_ptr<const attention::GpuBackend> gpu;  ///< null on a CPU
};

/// One kernel of an op and the scheduler of its work tiles. Most ops have one pass. cuda-sm90 has two: the prefill
/// pass, which is launched first, and the decode pass. Each plans the same batch and takes the requests whose packed
/// rows are within its scheduler's min_rows and max_rows.
struct Pass {
  const kernels::AttentionKernel* cpu_kernel = nullptr;        ///< null on a GPU
  const kernels::cuda::AttentionKernel* gpu_kernel = nullptr;  ///< null on a CPU
  scheduler::SchedulerConfig scheduler{};
  bool fp8_mma = false;
};

/// What an AttentionOp is: immutable once `prepare` has made it.
struct OpState {
  Context context;
  AttentionConfig config;  ///< dtypes resolved
  PrepareOptions options;
  const char* kernel_name = nullptr;  ///< of the kernel that `prepare` chose, whatever its passes are
  std::vector<Pass> passes{};         ///< in the order of their launches: one, or up to kMaxPasses on a GPU
  size_t scratch_stride = 0;          ///< bytes of one worker's scratch, rounded up to 256; 0 on a GPU
  const attention::GpuBackend* gpu() const noexcept;  ///< null on a CPU
};

/// The plan of one pass.
struct PassPlan {
  scheduler::PlanStorage storage{};
  scheduler::PlanView view{};                       ///< what the host knows of it
  std::unique_ptr<attention::GpuPlanMemory> gpu{};  ///< null on a CPU
  int32_t most_tile_rows = 0;                       ///< on a GPU: no work tile has more packed rows
  /// Where the pass is planned on the device; null of the first pass and of sealed plans.
  std::unique_ptr<attention::GpuSideStream> side{};
};

struct PlanBufferState {
  std::shared_ptr<const OpState> op;
  std::vector<PassPlan> passes;                            ///< of each of the op's passes
  std::vector<scheduler::SegmentLengths> device_segments;  ///< planned on the device: what `view().segments` points to
  bool planned_on_device = false;
  int32_t num_tokens = 0;                            ///< rows of q and out, padding included
  uint64_t generation = 0;                           ///< counts calls of plan(), failed ones too
  bool planned = false;                              ///< the last call succeeded
  bool sealed = false;                               ///< a SealedPlan's; on a CPU the views lie in its memory
  const attention::GpuSchedule* schedule = nullptr;  ///< sealed on a GPU: what kernels read
  std::span<const int32_t> sealed_into;              ///< the schedule's memory there

  /// The first pass's plan, which knows the batch's requests and segments. If it was made on the device, the host knows
  /// only their numbers, and of each segment its source and rows.
  const scheduler::PlanView& view() const { return passes.front().view; }
};

/// The state behind a plan. Throws kStalePlan.
const PlanBufferState& checked(const AttentionPlan& plan);

}  // namespace detail

namespace attention {

/// Whether a run of the plan may be in a graph that is replayed with later plans of its buffer, from the device's
/// lengths or the host's: what such a run enqueues may not depend on this one plan.
bool may_be_captured(const detail::PlanBufferState& plan);

/// Whether a run launches this pass on a GPU: it has work tiles, or may have some in a graph's replay. Where no pass
/// has, the first is launched.
bool is_launched(const detail::PlanBufferState& plan, size_t pass);

/// Where a GPU has the cu_q of what was last planned into the buffer, ascending whatever the caller's is.
const int32_t* cu_q_on_device(const detail::PlanBufferState& plan);

/// Partial rows of a plan, or of one of its passes; of a plan that may be captured, the most that its op's plans can
/// have. The workspace holds the passes' rows one after the other.
int64_t partial_rows(const detail::PlanBufferState& plan);
int64_t partial_rows(const detail::PlanBufferState& plan, size_t pass);

/// A CPU has no streams. Throws kInvalidArgument for one other than the default.
void check_stream(const detail::OpState& op, Stream stream);

}  // namespace attention
}  // namespace folio::inline v0
