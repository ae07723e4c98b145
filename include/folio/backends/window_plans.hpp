#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "folio/attention.hpp"

namespace folio::inline v0::backends {

/// The plan for all layers of one window.
struct WindowPlan {
  int32_t window_left = -1;
  AttentionPlan plan;
};

/// Most different windows that the layers of one group may have.
inline constexpr size_t kMaxWindows = 32;

/// One for each window of a group's layers, in front.
using WindowPlans = std::array<std::optional<WindowPlan>, kMaxWindows>;

}  // namespace folio::inline v0::backends
