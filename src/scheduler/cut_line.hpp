#pragma once

#include "scheduler/plan_storage.hpp"
#include "scheduler/work_line.hpp"

namespace folio::inline v0::scheduler {

/// Partial rows that cutting may cost at kBatchInvariant and above, where a cut makes every later split of its chain a
/// partial result.
int64_t fixed_split_budget(const SchedulerConfig& config);

/// Cuts the line into one part a worker: fills `arrays.cuts`.
void cut_work_line(const SchedulerConfig& config, const WorkLine& line, PlanStorage::Arrays& arrays);

}  // namespace folio::inline v0::scheduler
