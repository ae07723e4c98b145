#include "replay/latency.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace folio::replay {
namespace {

constexpr int32_t kQuantiles = 100;

/// The smallest of the sorted values that is not below `share` of them.
float nearest_rank(const std::vector<float>& sorted, double share) {
  const auto n = static_cast<double>(sorted.size());
  return sorted[static_cast<size_t>(std::max(0.0, std::ceil(share * n) - 1.0))];
}

LatencyDistribution distribution_of(std::vector<float> seconds) {
  LatencyDistribution distribution;
  distribution.count = static_cast<int64_t>(seconds.size());
  distribution.percentiles = percentiles(seconds);
  if (seconds.empty()) return distribution;
  for (int32_t i = 0; i <= kQuantiles; ++i) {
    distribution.quantiles.push_back(nearest_rank(seconds, static_cast<double>(i) / kQuantiles));
  }
  return distribution;
}

float seconds_between(double from_ms, double to_ms) {
  return static_cast<float>((to_ms - from_ms) / 1e3);
}

}  // namespace

Percentiles percentiles(std::vector<float>& values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const double sum = std::accumulate(values.begin(), values.end(), 0.0);
  return {nearest_rank(values, 0.5), nearest_rank(values, 0.9), nearest_rank(values, 0.99), values.back(),
          sum / static_cast<double>(values.size())};
}

void LatencyRecorder::step_done(std::span<const StepItem> items, double now_ms) {
  for (const StepItem& item : items) {
    const Request& request = workload_.requests[static_cast<size_t>(item.request)];
    State& state = states_[static_cast<size_t>(item.request)];
    // The row of the prompt's last token gives the first generated one.
    const int32_t tokens = item.first + item.count - request.input_length + 1;
    if (tokens <= state.tokens) continue;  // a chunk of the prompt, or tokens that a preempted request had before
    if (state.tokens == 0) {
      ttft_.push_back(seconds_between(request.arrival_ms, now_ms));
      state.first_ms = now_ms;
    } else {
      tbt_.push_back(seconds_between(state.last_ms, now_ms));
    }
    state.tokens = tokens;
    state.last_ms = now_ms;
    if (tokens < request.output_length) continue;
    e2e_.push_back(seconds_between(request.arrival_ms, now_ms));
    if (tokens > 1) tpot_.push_back(seconds_between(state.first_ms, now_ms) / static_cast<float>(tokens - 1));
  }
}

Latencies LatencyRecorder::latencies() const {
  return {distribution_of(ttft_), distribution_of(tbt_), distribution_of(tpot_), distribution_of(e2e_)};
}

}  // namespace folio::replay
