#pragma once

#include <algorithm>
#include <chrono>
#include <string_view>
#include <thread>

#include "replay/stopwatch.hpp"

namespace folio::replay {

/// What the simulated clock goes by.
enum class ClockKind {
  kFixed,     ///< every step takes ClockOptions::step_ms: schedules are the same on every machine
  kMeasured,  ///< a step takes what was measured of it: latencies are those of an engine with these layers
  kWall       ///< wall time times a factor, idling until requests arrive
};

/// "fixed", "measured", "wall".
constexpr std::string_view to_string(ClockKind kind) {
  switch (kind) {
    case ClockKind::kFixed: return "fixed";
    case ClockKind::kMeasured: return "measured";
    case ClockKind::kWall: return "wall";
  }
  return "invalid";
}

struct ClockOptions {
  ClockKind kind = ClockKind::kFixed;
  double step_ms = 100.0;   ///< kFixed: simulated length of a step
  double time_scale = 1.0;  ///< kWall: simulated milliseconds per millisecond of wall time
};

/// The time at which requests arrive and tokens are there, from 0.
class SimulatedClock {
 public:
  explicit SimulatedClock(const ClockOptions& options) : options_(options) {}

  double now_ms() const {
    return options_.kind == ClockKind::kWall ? watch_.elapsed() * 1e3 * options_.time_scale : now_ms_;
  }

  /// A step has ended whose schedule, writes, plans and runs took so long. Inputs and checks are the replay's own.
  void step_done(double serving_seconds) {
    now_ms_ += options_.kind == ClockKind::kMeasured ? serving_seconds * 1e3 : options_.step_ms;
  }

  /// Nothing can be done before `arrival_ms`.
  void idle_until(double arrival_ms) {
    constexpr double kLongestNap = 0.05;  // seconds between the caller's looks at whether to stop
    now_ms_ = std::max(now_ms_, arrival_ms);
    if (options_.kind != ClockKind::kWall) return;
    const double seconds = (arrival_ms - now_ms()) / (1e3 * options_.time_scale);
    if (seconds > 0.0) std::this_thread::sleep_for(std::chrono::duration<double>(std::min(seconds, kLongestNap)));
  }

 private:
  ClockOptions options_;
  double now_ms_ = 0.0;
  Stopwatch watch_;
};

}  // namespace folio::replay
