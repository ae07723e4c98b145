#pragma once

#include <chrono>

namespace folio::replay {

/// Measures wall time in laps.
class Stopwatch {
 public:
  /// Seconds since the last lap, or since construction.
  double lap() {
    const Clock::time_point now = Clock::now();
    const double seconds = std::chrono::duration<double>(now - last_).count();
    last_ = now;
    return seconds;
  }
  /// Seconds since the last lap, which goes on.
  double elapsed() const { return std::chrono::duration<double>(Clock::now() - last_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_ = Clock::now();
};

}  // namespace folio::replay
