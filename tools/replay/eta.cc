#include "replay/eta.hpp"

#include <fmt/format.h>

#include <cmath>
#include <cstdint>

namespace folio::replay {

std::string eta(double share, double elapsed_seconds) {
  constexpr double kLongest = 1e8;  // seconds, three years: beyond it is no estimate
  if (elapsed_seconds < 1.0 || !(share > 0.0) || share >= 1.0) return {};
  const double left = elapsed_seconds * (1.0 - share) / share;
  if (!(left < kLongest)) return {};
  const auto seconds = static_cast<int64_t>(std::ceil(left));
  const int64_t hours = seconds / 3600, minutes = seconds / 60 % 60;
  if (hours > 0) return fmt::format(", ETA {}:{:02}:{:02}", hours, minutes, seconds % 60);
  return fmt::format(", ETA {}:{:02}", minutes, seconds % 60);
}

}  // namespace folio::replay
