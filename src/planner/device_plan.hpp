#pragma once

#include <cstdint>
#include <string>

#include "folio/types/attention.hpp"
#include "planner/plan_image.hpp"
#include "planner/planner.hpp"

/// Planning where the lengths are: the host's side. launch_plan (planner/cuda/plan_kernel.hpp) enqueues it.
namespace folio::inline v0::planner {

/// Why this batch of device lengths cannot be planned on the device; empty if it can. Looks at what the host knows:
/// the config, counts, addresses, segments. What only the device knows (lengths beyond the bounds) ends up in
/// PlanImageHeader::status. Throws Error(kInvalidArgument) for what is wrong anywhere, as make_plan does.
std::string device_plan_refusal(const PlannerConfig& config, const BatchView& batch);

}  // namespace folio::inline v0::planner
