#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "replay/replay.hpp"

namespace folio::replay {

/// The summary for people: several lines, the last one ended.
std::string summary_text(const ReplayResult& result);

/// Everything in the summary and more, as an object; sizes in bytes, times in seconds, rates per second.
nlohmann::ordered_json summary_json(const ReplayResult& result);

/// One line of progress with the time that is left, without a line end.
std::string progress_line(const ReplayProgress& progress);

/// "none", "run-to-run", "batch-invariant", "schedule-invariant".
std::string_view to_string(Determinism determinism);

}  // namespace folio::replay
