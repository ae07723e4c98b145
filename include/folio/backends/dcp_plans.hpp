#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "folio/backends/window_plans.hpp"
#include "folio/distributed/dcp_attention.hpp"

namespace folio::inline v0::backends {

/// The plan for all layers of one window under decode context parallelism.
struct DcpWindowPlan {
  int32_t window_left = -1;
  distributed::DcpAttention* attention = nullptr;  ///< the builder's
  distributed::DcpPlan plan;
};

/// One for each window of a group's layers, in front; none without decode context parallelism.
using DcpWindowPlans = std::array<std::optional<DcpWindowPlan>, kMaxWindows>;

}  // namespace folio::inline v0::backends
