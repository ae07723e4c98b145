#pragma once

#include "planner/plan_storage.hpp"
#include "planner/work_line.hpp"

namespace folio::inline v0::planner {

/// Turns the cut line into items, partial rows and merges: completes `arrays.view`.
void emit_work(const PlannerConfig& config, const LineTotals& totals, PlanStorage::Arrays& arrays);

}  // namespace folio::inline v0::planner
