#pragma once

#include "scheduler/plan_storage.hpp"
#include "scheduler/work_line.hpp"

namespace folio::inline v0::scheduler {

/// What cutting may cost at most in a claimed plan: parts of chains that are cut, or at kBatchInvariant and above their
/// partial rows. Chains that come later in the line than it lasts are claimed whole.
int64_t claim_budget(const SchedulerConfig& config);

/// Cuts the line into claims (Schedule::kDynamic) and emits them, partial rows and merges: completes `arrays.view`.
void claim_work(const SchedulerConfig& config, const LineTotals& totals, PlanStorage::Arrays& arrays);

}  // namespace folio::inline v0::scheduler
