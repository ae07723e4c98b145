#pragma once

#include "scheduler/plan_storage.hpp"
#include "scheduler/work_line.hpp"

namespace folio::inline v0::scheduler {

/// What cutting may cost at most in a dynamic schedule: splits of output tiles that are cut, or at kBatchInvariant and
/// above their partial rows. Output tiles that come later in the tile space than it lasts are claimed whole.
int64_t split_budget(const SchedulerConfig& config);

/// Cuts the tile space into claims (Schedule::kDynamic) and emits them, partial rows and combine tiles: completes
/// `arrays.view`.
void schedule_dynamic(const SchedulerConfig& config, const TileSpaceTotals& totals, PlanStorage::Arrays& arrays);

}  // namespace folio::inline v0::scheduler
