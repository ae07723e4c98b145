#include "replay/step_series.hpp"

#include <algorithm>

namespace folio::replay {
namespace {

/// `point` and the steps after it.
void append(StepPoint& point, const StepPoint& next) {
  const auto weight = static_cast<double>(point.steps);
  const auto next_weight = static_cast<double>(next.steps);
  const auto mean = [&](double a, double b) { return (a * weight + b * next_weight) / (weight + next_weight); };
  point.decoding = mean(point.decoding, next.decoding);
  point.prefilling = mean(point.prefilling, next.prefilling);
  point.waiting = mean(point.waiting, next.waiting);
  point.steps += next.steps;
  point.end_ms = next.end_ms;
  for (size_t phase = 0; phase < kPhaseNames.size(); ++phase) point.times.seconds[phase] += next.times.seconds[phase];
  point.query_tokens += next.query_tokens;
  point.kv_tokens += next.kv_tokens;
  point.prefix_hits += next.prefix_hits;
  point.pages_held = std::max(point.pages_held, next.pages_held);
  point.pages_cached = std::max(point.pages_cached, next.pages_cached);
}

}  // namespace

StepSeries::StepSeries(size_t most_points) : most_points_(most_points) {
  points_.reserve(most_points);
}

void StepSeries::add(const StepPoint& step) {
  if (!points_.empty() && points_.back().steps < steps_per_point_) {
    append(points_.back(), step);
    return;
  }
  if (points_.size() == most_points_) {
    // The last point may stay alone: it is then filled up by the steps to come.
    size_t merged = 0;
    for (size_t i = 0; i < points_.size(); i += 2, ++merged) {
      points_[merged] = points_[i];
      if (i + 1 < points_.size()) append(points_[merged], points_[i + 1]);
    }
    points_.resize(merged);
    steps_per_point_ *= 2;
    add(step);
    return;
  }
  points_.push_back(step);
}

}  // namespace folio::replay
