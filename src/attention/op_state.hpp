#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "attention/gpu_backend.hpp"
#include "folio/attention.hpp"
#include "kernels/attention_kernel.hpp"
#include "scheduler/scheduler.hpp"

namespace folio::inline v0::detail {

/// What an AttentionOp is: immutable once `prepare` has made it.
struct OpState {
  Context context;
  AttentionConfig config;  ///< dtypes resolved
  PrepareOptions options;
  const kernels::AttentionKernel* kernel = nullptr;            ///< null on a GPU
  const kernels::cuda::AttentionKernel* gpu_kernel = nullptr;  ///< null on a CPU
  /// What runs the items that `scheduler` makes: `gpu_kernel`, or of a pair the kernel of many rows, or that of few
  /// where no request can have more.
  const kernels::cuda::AttentionKernel* gpu_launched = nullptr;
  bool fp8_mma = false;  ///< of `gpu_launched`
  scheduler::SchedulerConfig scheduler{};
  std::optional<scheduler::SchedulerConfig>
      few_rows{};             ///< of `gpu_kernel->few_rows`, where each kernel has some requests
  size_t scratch_stride = 0;  ///< bytes of one worker's scratch, rounded up to 256; 0 on a GPU
  const attention::GpuBackend* gpu() const noexcept;  ///< null on a CPU
};

/// The plan of the requests that go to the kernel of few rows.
struct FewRowsPlan {
  scheduler::PlanStorage storage;
  std::unique_ptr<attention::GpuPlanMemory> gpu;
  scheduler::PlanView view;
  int32_t most_item_rows = 0;  ///< no item has more packed rows
  std::unique_ptr<attention::GpuSideStream> stream;
};

struct PlanBufferState {
  std::shared_ptr<const OpState> op;
  scheduler::PlanStorage storage;
  std::unique_ptr<attention::GpuPlanMemory> gpu;  ///< null on a CPU
  /// What the host knows of the plan. Of one that was made on the device only the counts of requests and segments, and
  /// of each segment its source and rows.
  scheduler::PlanView view;
  int32_t most_item_rows = 0;                              ///< no item has more packed rows; of a GPU's plan
  std::unique_ptr<FewRowsPlan> few_rows;                   ///< null where one kernel takes all
  std::vector<scheduler::SegmentLengths> device_segments;  ///< what `view` then points to
  bool planned_on_device = false;
  int32_t num_tokens = 0;                            ///< rows of q and out, padding included
  uint64_t generation = 0;                           ///< counts calls of plan(), failed ones too
  bool planned = false;                              ///< the last call succeeded
  bool sealed = false;                               ///< a SealedPlan's; on a CPU `view` lies in its memory
  const attention::GpuSchedule* schedule = nullptr;  ///< sealed on a GPU: what kernels read
  std::span<const int32_t> sealed_into;              ///< the schedule's memory there
};

/// The state behind a plan. Throws kStalePlan.
const PlanBufferState& checked(const AttentionPlan& plan);

}  // namespace folio::inline v0::detail
