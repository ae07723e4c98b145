#pragma once

#include "planner/plan_storage.hpp"
#include "planner/planner.hpp"

namespace folio::inline v0::planner {

/// Merges of the row tiles that shared segments contribute to: per stretch of a request's rows with the same
/// contributors. Appends to `arrays.merges` and `arrays.merge_sources`; needs `arrays.parts` and `arrays.chain_parts`.
void merge_shared(const PlannerConfig& config, PlanStorage::Arrays& arrays);

}  // namespace folio::inline v0::planner
