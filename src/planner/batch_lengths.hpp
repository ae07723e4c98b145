#pragma once

#include "planner/plan_storage.hpp"

namespace folio::inline v0::planner {

/// Checks the batch and copies its lengths into the storage: everything of `arrays.view` but work and merges, and
/// `arrays.sights`. Throws Error(kInvalidArgument) naming the request and segment at fault.
void read_batch(const PlannerConfig& config, const BatchView& batch, PlanStorage::Arrays& arrays);

}  // namespace folio::inline v0::planner
