#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "replay/output_file.hpp"
#include "replay/stopwatch.hpp"

namespace folio::replay {

/// Writes a timeline in Chrome's trace event format (chrome://tracing, Perfetto) as it happens: nothing is kept in
/// memory, and a file that was not closed can still be opened. Format: 'Trace Event Format', the JSON array form.
class TimelineWriter {
 public:
  /// The file outlives the writer, which leaves it to the caller to close.
  explicit TimelineWriter(OutputFile& file);
  ~TimelineWriter();

  /// A phase of `seconds` that ends now; layer -1 = none.
  void span(std::string_view name, int32_t layer, double seconds);

  /// The state between two steps, drawn as curves.
  void counters(int64_t running, int64_t waiting, int32_t pages_held, int32_t pages_cached);

  TimelineWriter(const TimelineWriter&) = delete;
  TimelineWriter& operator=(const TimelineWriter&) = delete;

 private:
  void write(const std::string& event);
  Stopwatch since_start_;
  OutputFile& file_;
  bool first_ = true;
};

}  // namespace folio::replay
