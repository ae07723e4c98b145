#pragma once

#include "scheduler/plan_storage.hpp"
#include "scheduler/work_line.hpp"

namespace folio::inline v0::scheduler {

/// Partial rows that cutting may cost at kBatchInvariant and above, where a cut makes every later split of its output
/// tile a partial result.
int64_t fixed_split_budget(const SchedulerConfig& config);

/// Cuts the tile space into one split a worker: fills `arrays.cuts`.
void cut_tile_space(const SchedulerConfig& config, const TileSpace& space, PlanStorage::Arrays& arrays);

}  // namespace folio::inline v0::scheduler
