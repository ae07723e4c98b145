#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "replay/phase_clock.hpp"

namespace folio::replay {

/// What is told of a step, or of neighbouring steps together.
struct StepPoint {
  int64_t step = 0;          ///< number of the first one, from 0
  int64_t steps = 1;         ///< how many
  double start_ms = 0.0;     ///< of the first one, on the simulated clock
  double end_ms = 0.0;       ///< of the last one
  PhaseTimes times;          ///< wall time, summed
  double decoding = 0.0;     ///< requests that generate: a mean over the steps
  double prefilling = 0.0;   ///< requests whose prompt is computed: a mean
  double waiting = 0.0;      ///< requests that have arrived and are not served: a mean
  int64_t query_tokens = 0;  ///< computed, summed
  int64_t kv_tokens = 0;     ///< keys of the steps' requests, their new tokens included, summed
  int64_t prefix_hits = 0;   ///< tokens that were found in the cache, summed
  int32_t pages_held = 0;    ///< by requests: the largest
  int32_t pages_cached = 0;  ///< kept for requests to come: the largest
};

/// A series of bounded length: where it is full, neighbours become one point, so that all points but the last are of
/// equally many steps.
class StepSeries {
 public:
  static constexpr size_t kMostPoints = 1024;

  explicit StepSeries(size_t most_points = kMostPoints);

  void add(const StepPoint& step);

  std::span<const StepPoint> points() const { return points_; }
  int64_t steps_per_point() const { return steps_per_point_; }

 private:
  size_t most_points_;
  int64_t steps_per_point_ = 1;
  std::vector<StepPoint> points_;
};

}  // namespace folio::replay
