#pragma once

#include <string>

#include "core/error.hpp"
#include "folio/log.hpp"

namespace folio::inline v0::attention {

/// Whether anybody listens to that level: one relaxed load.
bool is_logged(LogLevel level) noexcept;

/// Hands the line to the callback of the moment.
void write_log(LogLevel level, const std::string& line);

/// Builds the line only where somebody listens.
template <typename... Parts>
void log(LogLevel level, const Parts&... parts) {
  if (is_logged(level)) write_log(level, core::message(parts...));
}

}  // namespace folio::inline v0::attention
