#pragma once

#include "scheduler/plan_storage.hpp"
#include "scheduler/scheduler.hpp"

namespace folio::inline v0::scheduler {

/// Merges of the row tiles that shared segments contribute to: per stretch of a request's rows with the same
/// contributors. Appends to `arrays.merges` and `arrays.combine_sources`; needs `arrays.parts` and
/// `arrays.chain_parts`.
void merge_shared(const SchedulerConfig& config, PlanStorage::Arrays& arrays);

}  // namespace folio::inline v0::scheduler
