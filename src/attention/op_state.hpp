#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "folio/attention.hpp"
#include "kernels/attention_kernel.hpp"
#include "planner/planner.hpp"

namespace folio::inline v0::detail {

/// What an AttentionOp is: immutable once `prepare` has made it.
struct OpState {
  Context context;
  AttentionConfig config;  ///< dtypes resolved
  PrepareOptions options;
  const kernels::AttentionKernel* kernel = nullptr;
  planner::PlannerConfig planner;
  size_t scratch_stride = 0;  ///< bytes of one worker's scratch, rounded up to 256
};

struct PlanBufferState {
  std::shared_ptr<const OpState> op;
  planner::PlanStorage storage;
  planner::PlanView view;
  int32_t num_tokens = 0;   ///< rows of q and out, padding included
  uint64_t generation = 0;  ///< counts calls of plan(), failed ones too
  bool planned = false;     ///< the last call succeeded
};

/// The state behind a plan. Throws kStalePlan.
const PlanBufferState& checked(const AttentionPlan& plan);

}  // namespace folio::inline v0::detail
