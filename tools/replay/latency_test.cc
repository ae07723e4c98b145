#include "replay/latency.hpp"

#include <gtest/gtest.h>

#include "replay/simulated_clock.hpp"

namespace folio::replay {
namespace {

Workload arriving(std::vector<Request> requests) {
  Workload workload;
  workload.requests = std::move(requests);
  return workload;
}

/// Schedules a workload without attention; a step takes what `seconds_of_step` says.
template <typename SecondsOfStep>
Latencies play(const Workload& workload, int32_t num_pages, const SchedulerOptions& options,
               const SecondsOfStep& seconds_of_step) {
  PageManager pages(num_pages, true);
  Scheduler scheduler(workload, pages, options);
  SimulatedClock clock({.kind = ClockKind::kMeasured});
  LatencyRecorder recorder(workload);
  std::vector<StepItem> items;
  for (int64_t step = 0; !scheduler.done();) {
    const auto made = scheduler.next_step(clock.now_ms());
    if (made.empty()) {
      clock.idle_until(scheduler.next_arrival_ms().value());
      continue;
    }
    items.assign(made.begin(), made.end());
    scheduler.finish_step();
    clock.step_done(seconds_of_step(step++));
    recorder.step_done(items, clock.now_ms());
  }
  return recorder.latencies();
}

TEST(Latency, OfOneRequest) {
  // Prompt 20 in chunks of 16 and 4, then 3 tokens after the first: steps of 1, 2, 3, 4, 5 seconds.
  const Workload workload = arriving({{500.0, 20, 4, 1, {}}});
  const Latencies latencies =
      play(workload, 100, {.token_budget = 16}, [](int64_t step) { return static_cast<double>(step + 1); });
  EXPECT_EQ(latencies.ttft.count, 1);
  EXPECT_FLOAT_EQ(static_cast<float>(latencies.ttft.percentiles.p50), 3.0f) << "both chunks; arrival is not 0";
  EXPECT_EQ(latencies.tbt.count, 3);
  EXPECT_EQ(latencies.tbt.percentiles.mean, 4.0);
  EXPECT_EQ(latencies.tbt.percentiles.max, 5.0);
  EXPECT_EQ(latencies.tpot.percentiles.p50, 4.0);
  EXPECT_EQ(latencies.e2e.percentiles.p50, 15.0);
  ASSERT_EQ(latencies.tbt.quantiles.size(), 101u);
  EXPECT_EQ(latencies.tbt.quantiles.front(), 3.0f);
  EXPECT_EQ(latencies.tbt.quantiles.back(), 5.0f);
}

TEST(Latency, WaitingCounts_FromTheArrival) {
  // One at a time: the second arrives during the first one's prompt and waits for its three tokens.
  const Workload workload = arriving({{0.0, 8, 3, 1, {}}, {250.0, 8, 1, 2, {}}});
  const Latencies latencies = play(workload, 100, {.token_budget = 16, .max_running = 1}, [](int64_t) { return 1.0; });
  EXPECT_EQ(latencies.ttft.count, 2);
  EXPECT_EQ(latencies.ttft.quantiles.front(), 1.0f);
  EXPECT_EQ(latencies.ttft.quantiles.back(), 3.75f) << "from 0.25 s to the end of the fourth step";
  EXPECT_EQ(latencies.tpot.count, 1) << "one token has no time between";
  EXPECT_EQ(latencies.e2e.count, 2);
}

TEST(Latency, Preemption_CountsOnce_AsAWait) {
  // Two requests that the pool holds only in the beginning: the second is preempted and computes its tokens again.
  const Workload workload = arriving({{0.0, 8, 12, 1, {}}, {0.0, 8, 12, 2, {}}});
  const Latencies latencies =
      play(workload, 6, {.token_budget = 64, .max_running = 2, .page_size = 4}, [](int64_t) { return 1.0; });
  EXPECT_EQ(latencies.ttft.count, 2);
  EXPECT_EQ(latencies.tbt.count, 22) << "12 tokens each";
  EXPECT_EQ(latencies.e2e.count, 2);
  EXPECT_GT(latencies.tbt.percentiles.max, 1.0) << "the wait of the one that was preempted";
  EXPECT_EQ(latencies.tbt.percentiles.p50, 1.0);
}

TEST(Latency, SeveralTokensOfAStep_AreOneGap) {
  const Workload workload = arriving({{0.0, 10, 6, 1, {}}});
  LatencyRecorder recorder(workload);
  const StepItem prompt{.request = 0, .first = 0, .count = 10},
      first{.request = 0, .first = 10, .count = 3, .drafted = true},
      second{.request = 0, .first = 13, .count = 2, .drafted = true};
  recorder.step_done(std::span(&prompt, 1), 1000.0);
  recorder.step_done(std::span(&first, 1), 3000.0);
  recorder.step_done(std::span(&second, 1), 6000.0);
  const Latencies latencies = recorder.latencies();
  EXPECT_EQ(latencies.tbt.count, 2);
  EXPECT_EQ(latencies.tpot.percentiles.p50, 1.0) << "five tokens after the first in five seconds";
  EXPECT_EQ(latencies.e2e.percentiles.p50, 6.0);
}

TEST(Latency, NothingYet_IsZeros) {
  const Workload workload = arriving({{0.0, 10, 2, 1, {}}});
  const Latencies latencies = LatencyRecorder(workload).latencies();
  EXPECT_EQ(latencies.ttft.count, 0);
  EXPECT_TRUE(latencies.ttft.quantiles.empty());
  EXPECT_EQ(latencies.ttft.percentiles.p99, 0.0);
}

TEST(Percentiles, NearestRank) {
  std::vector<float> values;
  for (int i = 100; i >= 1; --i) values.push_back(static_cast<float>(i));
  const Percentiles p = percentiles(values);
  EXPECT_EQ(p.p50, 50.0);
  EXPECT_EQ(p.p90, 90.0);
  EXPECT_EQ(p.p99, 99.0);
  EXPECT_EQ(p.max, 100.0);
  EXPECT_EQ(p.mean, 50.5);
  std::vector<float> one = {3.0f};
  EXPECT_EQ(percentiles(one).p99, 3.0);
}

}  // namespace
}  // namespace folio::replay
