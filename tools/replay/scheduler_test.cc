#include "replay/scheduler.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "folio/types/error.hpp"

namespace folio::replay {
namespace {

Workload workload_of(std::vector<std::pair<int32_t, int32_t>> lengths) {
  Workload workload;
  for (const auto& [input, output] : lengths) workload.requests.push_back({0.0, input, output, 0, {}});
  return workload;
}

Workload random_workload(unsigned seed, int32_t count) {
  std::mt19937 random(seed);
  Workload workload;
  workload.tokens_per_hash = 4;
  double now = 0.0;
  for (int32_t i = 0; i < count; ++i) {
    now += static_cast<double>(random() % 3) * 10.0;
    const auto input = static_cast<int32_t>(1 + random() % 60);
    Request request{now, input, static_cast<int32_t>(1 + random() % 10), i + 1, {}};
    // A few common beginnings, then the request's own.
    const uint64_t family = random() % 3;
    for (int32_t h = 0; h < (input + 3) / 4; ++h) {
      request.hash_ids.push_back(h < 6 ? family * 100 + static_cast<uint64_t>(h)
                                       : 1000 + static_cast<uint64_t>(i * 100 + h));
    }
    workload.requests.push_back(std::move(request));
  }
  return workload;
}

/// Plays a workload on a fake cache of token chains and checks, step by step, everything a scheduler owes.
struct Play {
  explicit Play(const Workload& workload, int32_t num_pages, bool reuse, const SchedulerOptions& options)
      : pages(num_pages, reuse), scheduler(workload, pages, options) {
    run(workload, options);
  }

  void run(const Workload& workload, const SchedulerOptions& options) {
    const auto slot_count = static_cast<size_t>(pages.num_pages()) * static_cast<size_t>(options.page_size);
    std::vector<uint64_t> cache(slot_count, 0);
    std::map<int32_t, int32_t> rows_seen;
    double now = 0.0;
    while (!scheduler.done() && !::testing::Test::HasFailure()) {
      const auto items = scheduler.next_step(now);
      if (items.empty()) {
        ASSERT_TRUE(scheduler.next_arrival_ms().has_value()) << "stuck";
        now = *scheduler.next_arrival_ms();
        continue;
      }
      ++steps;
      int32_t tokens = 0;
      for (const StepItem& item : items) {
        tokens += item.count;
        ASSERT_GT(item.count, 0);
        const auto chain = scheduler.chain_of(item.request);
        const auto table = scheduler.pages_of(item.request);
        for (int32_t p = item.first; p < item.first + item.count; ++p)
          cache[slot(table, p, options.page_size)] = chain[p];
      }
      ASSERT_LE(tokens, options.token_budget);
      ASSERT_LE(items.size(), static_cast<size_t>(options.max_running));
      for (const StepItem& item : items) {  // after all writes of the step, as in a real engine
        const auto chain = scheduler.chain_of(item.request);
        const auto table = scheduler.pages_of(item.request);
        for (int32_t p = 0; p < item.first + item.count; ++p) {
          ASSERT_EQ(cache[slot(table, p, options.page_size)], chain[p]) << "request " << item.request << " token " << p;
        }
        rows_seen[item.request] = std::max(rows_seen[item.request], item.first + item.count);
      }
      scheduler.finish_step();
      now += 10.0;
    }
    for (size_t r = 0; r < workload.requests.size(); ++r) {
      EXPECT_EQ(rows_seen[static_cast<int32_t>(r)], workload.requests[r].computed_length()) << r;
    }
    pages.drop_cache();
    EXPECT_EQ(pages.held(), 0);
  }
  static size_t slot(std::span<const int32_t> table, int32_t position, int32_t page_size) {
    return static_cast<size_t>(table[static_cast<size_t>(position / page_size)] * page_size + position % page_size);
  }
  PageManager pages;
  Scheduler scheduler;
  int64_t steps = 0;
};

TEST(Scheduler, ChunksAPromptByTheBudgetThenDecodesOneByOne) {
  const Workload workload = workload_of({{10, 3}});
  PageManager pages(8, true);
  Scheduler scheduler(workload, pages, {.token_budget = 4, .max_running = 2, .page_size = 4});
  std::vector<std::pair<int32_t, int32_t>> steps;
  while (!scheduler.done()) {
    const auto items = scheduler.next_step(0.0);
    ASSERT_EQ(items.size(), 1u);
    steps.emplace_back(items[0].first, items[0].count);
    scheduler.finish_step();
  }
  EXPECT_THAT(steps, ::testing::ElementsAre(std::pair(0, 4), std::pair(4, 4), std::pair(8, 2), std::pair(10, 1),
                                            std::pair(11, 1)));
}

TEST(Scheduler, MixesDecodesAndPrefillsInOneStep) {
  const Workload workload = workload_of({{3, 5}, {20, 1}});
  PageManager pages(16, true);
  Scheduler scheduler(workload, pages, {.token_budget = 8, .max_running = 4, .page_size = 4});
  auto items = scheduler.next_step(0.0);
  ASSERT_EQ(items.size(), 2u);
  EXPECT_EQ(items[0].count, 3);
  EXPECT_EQ(items[1].count, 5);
  scheduler.finish_step();
  items = scheduler.next_step(0.0);
  ASSERT_EQ(items.size(), 2u);
  EXPECT_EQ(items[0].count, 1);
  EXPECT_EQ(items[1].count, 7);
}

TEST(Scheduler, FollowsArrivals) {
  Workload workload = workload_of({{3, 1}, {3, 1}});
  workload.requests[1].arrival_ms = 50.0;
  PageManager pages(16, true);
  Scheduler scheduler(workload, pages, {});
  EXPECT_EQ(scheduler.next_step(0.0).size(), 1u);
  scheduler.finish_step();
  EXPECT_TRUE(scheduler.next_step(49.0).empty());
  EXPECT_EQ(scheduler.next_arrival_ms(), 50.0);
  EXPECT_EQ(scheduler.next_step(50.0).size(), 1u);
  EXPECT_EQ(scheduler.next_arrival_ms(), std::nullopt);
}

TEST(Scheduler, EvenAWholePromptInTheCacheComputesItsLastToken) {
  Workload workload = workload_of({{8, 1}, {8, 1}});
  workload.tokens_per_hash = 4;
  workload.requests[0].hash_ids = workload.requests[1].hash_ids = {1, 2};
  PageManager pages(16, true);
  Scheduler scheduler(workload, pages, {.token_budget = 64, .max_running = 1, .page_size = 4});
  scheduler.next_step(0.0);
  scheduler.finish_step();
  const auto items = scheduler.next_step(0.0);
  ASSERT_EQ(items.size(), 1u);
  EXPECT_EQ(items[0].first, 4);  // the second page holds the last token: it is computed anew, whole
  EXPECT_EQ(items[0].count, 4);
  EXPECT_EQ(scheduler.counters().hit_tokens, 4);
}

TEST(Scheduler, PreemptsTheLastAdmittedAndResumesIt) {
  const Workload workload = workload_of({{7, 10}, {7, 10}});  // 16 tokens each: 4 pages each
  const Play play(workload, 5, true, {.token_budget = 64, .max_running = 4, .page_size = 4});
  EXPECT_GT(play.scheduler.counters().preemptions, 0);
  EXPECT_EQ(play.scheduler.counters().finished, 2);
}

TEST(Scheduler, RefusesARequestThatNeverFits) {
  const Workload workload = workload_of({{40, 1}});
  PageManager pages(9, true);
  EXPECT_THROW(Scheduler(workload, pages, {.token_budget = 64, .max_running = 4, .page_size = 4}), Error);
}

TEST(Scheduler, RefusesAbsurdOptions) {
  const Workload workload = workload_of({{4, 1}});
  PageManager pages(9, true);
  EXPECT_THROW(Scheduler(workload, pages, {.token_budget = 0}), Error);
  EXPECT_THROW(Scheduler(workload, pages, {.max_running = 0}), Error);
}

TEST(Scheduler, AbandoningGivesEverythingBack) {
  const Workload workload = workload_of({{30, 10}, {30, 10}});
  PageManager pages(32, true);
  Scheduler scheduler(workload, pages, {.token_budget = 16, .max_running = 4, .page_size = 4});
  scheduler.next_step(0.0);
  scheduler.finish_step();
  EXPECT_GT(pages.held(), 0);
  scheduler.abandon();
  EXPECT_EQ(pages.held(), 0);
}

struct Setting {
  int32_t budget, max_running, num_pages;
  bool reuse;
};
class SchedulerPlay : public ::testing::TestWithParam<Setting> {};

TEST_P(SchedulerPlay, EveryTokenIsComputedOverTheRightCache) {
  const Setting setting = GetParam();
  for (unsigned seed = 0; seed < 5; ++seed) {
    const Workload workload = random_workload(seed, 60);
    const Play play(workload, setting.num_pages, setting.reuse,
                    {.token_budget = setting.budget, .max_running = setting.max_running, .page_size = 4});
    int64_t owed = 0;
    for (const Request& request : workload.requests) owed += request.computed_length();
    const SchedulerCounters& counters = play.scheduler.counters();
    if (counters.preemptions == 0) {
      EXPECT_EQ(counters.computed_tokens + counters.hit_tokens, owed);
    } else {
      EXPECT_GE(counters.computed_tokens + counters.hit_tokens, owed);
    }
    EXPECT_EQ(counters.first_admissions, 60);
    EXPECT_EQ(setting.reuse, counters.hit_tokens > 0);
    EXPECT_EQ(setting.num_pages<50, counters.preemptions> 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Settings, SchedulerPlay,
                         ::testing::Values(Setting{64, 8, 2000, true}, Setting{64, 8, 2000, false},
                                           Setting{7, 16, 2000, true}, Setting{64, 16, 30, true},
                                           Setting{64, 16, 30, false}, Setting{1, 1, 2000, true}));

}  // namespace
}  // namespace folio::replay
