#pragma once

#include <string>

#include "planner/plan_fixtures.hpp"

/// What plans must be, checked by brute force against the definitions of segments, shards, masks and windows, without
/// the planner's arithmetic. Tests only.
namespace folio::inline v0::planner::testing {

/// Empty if the plan does what plan_view.hpp says for the batch, else what is wrong: coverage of (row, key) pairs,
/// items' and merges' structure, partial rows, bounds.
std::string check_plan(const PlannerConfig& config, const OwnedBatch& batch, const PlanView& plan);

}  // namespace folio::inline v0::planner::testing
