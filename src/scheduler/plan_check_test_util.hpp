#pragma once

#include <string>

#include "scheduler/plan_test_util.hpp"

/// What plans must be, checked by brute force against the definitions of segments, shards, masks and windows, without
/// the scheduler's arithmetic. Tests only.
namespace folio::inline v0::scheduler::testing {

/// Empty if the plan does what plan_view.hpp says for the batch, else what is wrong: coverage of (row, key) pairs,
/// work tiles' and combine tiles' structure, partial rows, bounds.
std::string check_plan(const SchedulerConfig& config, const OwnedBatch& batch, const PlanView& plan);

}  // namespace folio::inline v0::scheduler::testing
