#pragma once

#include <string>

#include "scheduler/plan_view.hpp"

namespace folio::inline v0::scheduler {

/// A plan as text, one line per work tile and combine tile, for tests and debugging:
///   worker 0
///     request 0 head 0 rows 0-4 segment 0 row 0 keys 0-64 start finish -> out
///   combine tile request 1 head 0 rows 4-8 <- 0 4
std::string describe(const PlanView& plan);

}  // namespace folio::inline v0::scheduler
