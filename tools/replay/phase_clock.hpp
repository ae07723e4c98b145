#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "replay/stopwatch.hpp"
#include "replay/timeline.hpp"

namespace folio::replay {

/// What a step's time goes into. Inputs and checks are the replay's own; an engine has the others.
enum class Phase : size_t { kSchedule, kInputs, kWrite, kPlan, kRun, kChecks };
inline constexpr std::array<std::string_view, 6> kPhaseNames = {"schedule", "inputs", "write", "plan", "run", "checks"};

/// Seconds by phase.
struct PhaseTimes {
  std::array<double, kPhaseNames.size()> seconds{};
  double operator[](Phase phase) const { return seconds[static_cast<size_t>(phase)]; }
  /// What an engine would have spent.
  double serving() const {
    return (*this)[Phase::kSchedule] + (*this)[Phase::kWrite] + (*this)[Phase::kPlan] + (*this)[Phase::kRun];
  }
};

/// Adds up the time of consecutive phases and, given a timeline, draws them.
class PhaseClock {
 public:
  explicit PhaseClock(TimelineWriter* timeline = nullptr) : timeline_(timeline) {}

  /// Starts anew: the time since the last phase belongs to none.
  void begin() { watch_.lap(); }

  /// The time since begin() or the last phase belongs to `phase` (of `layer`, or -1).
  void end(Phase phase, int32_t layer = -1) {
    const double seconds = watch_.lap();
    times_.seconds[static_cast<size_t>(phase)] += seconds;
    if (timeline_ != nullptr) timeline_->span(kPhaseNames[static_cast<size_t>(phase)], layer, seconds);
  }

  const PhaseTimes& times() const { return times_; }

 private:
  Stopwatch watch_;
  PhaseTimes times_;
  TimelineWriter* timeline_;
};

}  // namespace folio::replay
