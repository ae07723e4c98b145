#pragma once

#include "scheduler/plan_storage.hpp"
#include "scheduler/work_line.hpp"

namespace folio::inline v0::scheduler {

/// Turns the cut line into work tiles, partial rows and combine tiles: completes `arrays.view`.
void emit_tiles(const SchedulerConfig& config, const TileSpaceTotals& totals, PlanStorage::Arrays& arrays);

}  // namespace folio::inline v0::scheduler
