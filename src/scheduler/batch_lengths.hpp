#pragma once

#include "scheduler/plan_storage.hpp"

namespace folio::inline v0::scheduler {

/// Checks the batch and copies its lengths into the storage: everything of `arrays.view` but work and combine tiles,
/// and `arrays.mask_bounds`. Throws Error(kInvalidArgument) naming the request and segment at fault.
void read_batch(const SchedulerConfig& config, const BatchView& batch, PlanStorage::Arrays& arrays);

}  // namespace folio::inline v0::scheduler
