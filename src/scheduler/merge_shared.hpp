#pragma once

#include "scheduler/plan_storage.hpp"
#include "scheduler/scheduler.hpp"

namespace folio::inline v0::scheduler {

/// Combines of the row tiles that shared segments contribute to: per stretch of a request's rows with the same
/// contributors. Appends to `arrays.combine_tiles` and `arrays.combine_sources`; needs `arrays.splits` and
/// `arrays.output_partials`.
void combine_shared(const SchedulerConfig& config, PlanStorage::Arrays& arrays);

}  // namespace folio::inline v0::scheduler
