#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "core/instrumented_test_util.hpp"
#include "scheduler/plan_check_test_util.hpp"
#include "scheduler/plan_digest_test_util.hpp"
#include "scheduler/plan_test_util.hpp"

/// SchedulerConfig::max_splits bounds the splits of an output tile, not the workers.
namespace folio::inline v0::scheduler {
namespace {

using testing::Case;
using testing::check_plan;
using testing::OwnedBatch;
using testing::paged_batch;
using testing::worker_loads;

SchedulerConfig decode_config(Schedule schedule, int32_t num_workers, int32_t max_splits) {
  SchedulerConfig config;
  config.num_q_heads = 32;
  config.num_kv_heads = 8;
  config.page_size = 16;
  config.tile = {.rows = 16, .kv_tokens = 64, .schedule = schedule};
  config.num_workers = num_workers;
  config.max_splits = max_splits;
  return config;
}

OwnedBatch decodes(size_t requests, int32_t kv_len) {
  return paged_batch(std::vector<int32_t>(requests, 1), std::vector<int32_t>(requests, kv_len));
}

int32_t most_splits(const PlanView& plan) {
  int32_t most = 1;
  for (int32_t i = 0; i < plan.num_combine_tiles; ++i) {
    most = std::max(most, plan.combine_tiles[i].source_end - plan.combine_tiles[i].source_begin);
  }
  return most;
}

bool has_shared(const PlanView& plan) {
  return std::any_of(plan.segments, plan.segments + plan.num_segments, [](const auto& s) { return s.shared; });
}

TEST(MaxSplits, RandomBatches_AreCoveredAndKeepToTheBound) {
  std::mt19937 random(71);
  PlanStorage storage;
  PlanStorage as_needed_storage;
  int bounded = 0;
  const int cases = folio::testing::random_cases(4000);
  for (int i = 0; i < cases; ++i) {
    Case one = testing::random_case(random);
    if (one.config.determinism >= Determinism::kBatchInvariant) continue;
    if (random() % 2 == 0) {
      one.config.tile.schedule = Schedule::kDynamic;
      one.config.min_split_tokens = 1 + static_cast<int32_t>(random() % 12);
      if (random() % 2 == 0) one.config.tile.order = TileOrder::kLpt;
    }
    const PlanView as_needed = make_plan(one.config, one.batch.view(), as_needed_storage);
    one.config.max_splits = 1 + static_cast<int32_t>(random() % 4);
    const PlanView plan = make_plan(one.config, one.batch.view(), storage);
    ASSERT_EQ(check_plan(one.config, one.batch, plan), "") << "case " << i;
    if (has_shared(plan)) continue;
    ASSERT_LE(most_splits(plan), one.config.max_splits) << "case " << i;
    bounded += most_splits(as_needed) > one.config.max_splits ? 1 : 0;
  }
  EXPECT_GT(bounded, cases / 50);
}

TEST(MaxSplits, ManyEqualRequests_KeepAllWorkersBusy) {
  PlanStorage storage;
  OwnedBatch batch = decodes(64, 4096);
  const SchedulerConfig lists = decode_config(Schedule::kStatic, 132, 32);
  const std::vector<int64_t> loads = worker_loads(lists, make_plan(lists, batch.view(), storage));
  EXPECT_EQ(loads.size(), 132u);
  EXPECT_LE(*std::ranges::max_element(loads) - *std::ranges::min_element(loads), lists.tile_cost + 4);

  SchedulerConfig as_needed = decode_config(Schedule::kDynamic, 132, 0);
  SchedulerConfig bounded = decode_config(Schedule::kDynamic, 132, 32);
  const std::vector<int64_t> needed = testing::serialise(make_plan(as_needed, batch.view(), storage));
  EXPECT_EQ(testing::serialise(make_plan(bounded, batch.view(), storage)), needed) << "no query had 32 splits";
}

TEST(MaxSplits, OneLongRequest_IsInThatManyEqualSplits) {
  PlanStorage storage;
  OwnedBatch batch = decodes(1, 64 * 1024);
  for (const Schedule schedule : {Schedule::kStatic, Schedule::kDynamic}) {
    const SchedulerConfig config = decode_config(schedule, 132, 5);
    const PlanView plan = make_plan(config, batch.view(), storage);
    EXPECT_LE(most_splits(plan), 5);
    int32_t longest = 0;
    for (int32_t i = 0; i < plan.num_work_tiles; ++i) {
      longest = std::max(longest, plan.work_tiles[i].kv_end - plan.work_tiles[i].kv_begin);
    }
    // A static plan's shares need not begin with a head, so they are a fourth of its keys.
    EXPECT_LE(longest, 64 * 1024 / (schedule == Schedule::kStatic ? 4 : 5) + 64);
  }
  const SchedulerConfig whole = decode_config(Schedule::kStatic, 132, 1);
  EXPECT_EQ(make_plan(whole, batch.view(), storage).num_combine_tiles, 0);
}

}  // namespace
}  // namespace folio::inline v0::scheduler
