#include "scheduler/static_scheduler.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "scheduler/plan_digest_test_util.hpp"
#include "scheduler/plan_test_util.hpp"

/// How evenly work is divided, and that nothing is split without need.
namespace folio::inline v0::scheduler {
namespace {

using testing::OwnedBatch;
using testing::paged_batch;
using testing::worker_loads;

// 10 split granules of 1 over 4 workers: ideal cuts at 2.5, 5 and 7.5. The output tile is [0, 10).
constexpr TileSpace kTenGranules{.total = 10, .granularity = 1, .num_workers = 4};
static_assert(ideal_cut(kTenGranules, 1) == 2 && ideal_cut(kTenGranules, 2) == 5 && ideal_cut(kTenGranules, 3) == 7);
static_assert(choose_cut(kTenGranules, 1, {}, {.output_begin = 0, .output_end = 10, .below = 2, .above = 3}).position ==
              2);
// An output tile that ends less than a split granule away is not split.
static_assert(choose_cut(kTenGranules, 1, {}, {.output_begin = 0, .output_end = 3, .below = 2, .above = 3}).position ==
              3);
// ... unless the previous cut stands so that a worker would get less than a split granule below the mean.
static_assert(choose_cut({.total = 32, .granularity = 10, .num_workers = 4}, 2, {.position = 15, .deviation = 28},
                         {.output_begin = 6, .output_end = 40, .below = 16, .above = 26})
                  .position == 16);
// Indivisible output tiles are not split at all.
static_assert(choose_cut(kTenGranules, 1, {},
                         {.output_begin = 0, .output_end = 10, .below = 2, .above = 3, .divisible = false})
                  .position == 0);
static_assert(choose_cut(kTenGranules, 3, {},
                         {.output_begin = 0, .output_end = 10, .below = 7, .above = 8, .divisible = false})
                  .position == 10);

SchedulerConfig serving_config(int32_t num_workers) {
  SchedulerConfig config;
  config.num_q_heads = 32;
  config.num_kv_heads = 8;
  config.page_size = 16;
  config.tile = {.rows = 16, .kv_tokens = 64};
  config.num_workers = num_workers;
  return config;
}

int64_t spread(const std::vector<int64_t>& loads) {
  const auto [least, max] = std::minmax_element(loads.begin(), loads.end());
  return *max - *least;
}

/// Whether every load is less than `granularity` away from the mean.
bool near_mean(const std::vector<int64_t>& loads, int64_t granularity) {
  const auto workers = static_cast<int64_t>(loads.size());
  const int64_t total = std::accumulate(loads.begin(), loads.end(), int64_t{0});
  return std::all_of(loads.begin(), loads.end(),
                     [=](int64_t load) { return std::abs(load * workers - total) < granularity * workers; });
}

int64_t tile_cost(const SchedulerConfig& config, int32_t rows) {
  return config.tile_cost + int64_t{rows} * config.row_cost;
}

TEST(StaticScheduler, Loads_OneLongRequest_AreEven) {
  std::vector<int32_t> kv_len(61, 1024);
  kv_len[17] = 128 * 1024;
  OwnedBatch batch = paged_batch(std::vector<int32_t>(61, 1), kv_len);
  PlanStorage storage;
  for (const int32_t workers : {1, 2, 3, 7, 16, 64, 108, 132, 500, 5000}) {
    const SchedulerConfig config = serving_config(workers);
    const PlanView plan = make_plan(config, batch.view(), storage);
    EXPECT_LE(spread(worker_loads(config, plan)), tile_cost(config, 4)) << workers << " workers";
  }
}

TEST(StaticScheduler, Loads_EqualTiles_DifferByAtMostOne) {
  std::mt19937 random(3);
  PlanStorage storage;
  for (int i = 0; i < 400; ++i) {
    std::vector<int32_t> kv_len;
    for (auto left = 1 + random() % 60; left > 0; --left) {
      kv_len.push_back(static_cast<int32_t>(random() % (random() % 8 == 0 ? 100000 : 2000)));
    }
    OwnedBatch batch = paged_batch(std::vector<int32_t>(kv_len.size(), 1), kv_len);
    const SchedulerConfig config = serving_config(1 + static_cast<int32_t>(random() % 150));
    const PlanView plan = make_plan(config, batch.view(), storage);
    ASSERT_LE(spread(worker_loads(config, plan)), tile_cost(config, 4)) << "case " << i;
    ASSERT_LE(plan.num_partial_rows, max_partial_rows(config));
  }
}

TEST(StaticScheduler, Loads_UnequalTiles_StayWithinAGranuleOfTheMean) {
  std::mt19937 random(4);
  PlanStorage storage;
  for (int i = 0; i < 400; ++i) {
    std::vector<int32_t> q_len;
    std::vector<int32_t> kv_len;
    for (auto left = 1 + random() % 40; left > 0; --left) {
      q_len.push_back(static_cast<int32_t>(random() % 3 == 0 ? 1 + random() % 300 : 1));
      kv_len.push_back(q_len.back() + static_cast<int32_t>(random() % (random() % 8 == 0 ? 100000 : 2000)));
    }
    OwnedBatch batch = paged_batch(q_len, kv_len);
    SchedulerConfig config = serving_config(1 + static_cast<int32_t>(random() % 150));
    config.row_cost = 1 + static_cast<int32_t>(random() % 20);
    const PlanView plan = make_plan(config, batch.view(), storage);
    ASSERT_TRUE(near_mean(worker_loads(config, plan), tile_cost(config, 16))) << "case " << i;
    ASSERT_LE(plan.num_partial_rows, max_partial_rows(config));
  }
}

TEST(StaticScheduler, Loads_SharedSegments_AreEven) {
  OwnedBatch batch = paged_batch(std::vector<int32_t>(64, 1), std::vector<int32_t>(64, 300));
  testing::OwnedSegment prefix;
  prefix.kv_len = {100000, 70000};
  prefix.group_indptr = {0, 40, 64};
  batch.segments.insert(batch.segments.begin(), prefix);
  batch.segments[1].first_pos = std::vector<int32_t>(64, 100000);
  PlanStorage storage;
  for (const int32_t workers : {2, 13, 132}) {
    const SchedulerConfig config = serving_config(workers);
    EXPECT_TRUE(near_mean(worker_loads(config, make_plan(config, batch.view(), storage)), tile_cost(config, 16)));
  }
}

TEST(StaticScheduler, Granularity_BatchInvariant_IsOneFixedSplit) {
  PlanStorage storage;
  std::vector<int32_t> kv_len(61, 1024);
  kv_len[17] = 128 * 1024;
  OwnedBatch batch = paged_batch(std::vector<int32_t>(61, 1), kv_len);
  for (const int32_t workers : {1, 2, 3, 16, 64, 132}) {
    SchedulerConfig config = serving_config(workers);
    config.determinism = Determinism::kBatchInvariant;
    const PlanView plan = make_plan(config, batch.view(), storage);
    EXPECT_TRUE(near_mean(worker_loads(config, plan), 2048 / 64 * tile_cost(config, 4))) << workers << " workers";
    EXPECT_LE(plan.num_partial_rows, max_partial_rows(config));
  }
}

TEST(StaticScheduler, PartialRows_FixedSplits_StayWithinTheBudget) {
  PlanStorage storage;
  SchedulerConfig config = serving_config(64);
  config.determinism = Determinism::kScheduleInvariant;
  config.fixed_split_tokens = 64;  // 16384 splits a head: more partial results than the budget has rows
  OwnedBatch batch = paged_batch({1}, {1 << 20});
  const PlanView plan = make_plan(config, batch.view(), storage);
  EXPECT_LE(plan.num_partial_rows, max_partial_rows(config));
  EXPECT_EQ(plan.num_work_tiles, 8 * 16384);
}

TEST(StaticScheduler, Cuts_EvenWork_SplitNothing) {
  PlanStorage storage;
  for (const Determinism level : {Determinism::kRunToRun, Determinism::kScheduleInvariant}) {
    for (const int32_t workers : {1, 2, 4, 8, 64, 128}) {
      SchedulerConfig config = serving_config(workers);
      config.determinism = level;
      OwnedBatch batch = paged_batch(std::vector<int32_t>(16, 1), std::vector<int32_t>(16, 8192));
      const PlanView plan = make_plan(config, batch.view(), storage);
      EXPECT_EQ(plan.num_partial_rows, 0) << workers << " workers";
      EXPECT_EQ(plan.num_combine_tiles, 0);
      EXPECT_EQ(spread(worker_loads(config, plan)), 0);
    }
  }
}

TEST(StaticScheduler, Cuts_NearAnOutputTilesEnd_MoveThere) {
  SchedulerConfig config = serving_config(3);
  config.num_q_heads = config.num_kv_heads = 1;
  PlanStorage storage;
  // 7 tiles over 3 workers: cuts at 2.33 and 4.67 would split; 3, 2, 2 is as even.
  OwnedBatch batch = paged_batch({1, 1, 1}, {3 * 64, 2 * 64, 2 * 64});
  const PlanView plan = make_plan(config, batch.view(), storage);
  EXPECT_EQ(plan.num_work_tiles, 3);
  EXPECT_EQ(plan.num_partial_rows, 0);
}

/// What a plan costs the busiest worker, compared with the mean. Every output tile or KV split begins and ends once.
double makespan_over_mean(const SchedulerConfig& config, const PlanView& plan, int64_t start_row_cost) {
  std::vector<int64_t> loads = worker_loads(config, plan);
  for (int32_t w = 0; w < plan.num_workers; ++w) {
    for (int32_t i = plan.worker_indptr[w]; i < plan.worker_indptr[w + 1]; ++i) {
      const WorkTile& work_tile = plan.work_tiles[i];
      if ((work_tile.flags & kStart) != 0)
        loads[static_cast<size_t>(w)] += (work_tile.row_end - work_tile.row_begin) * start_row_cost;
    }
  }
  const int64_t total = std::accumulate(loads.begin(), loads.end(), int64_t{0});
  return static_cast<double>(*std::max_element(loads.begin(), loads.end())) * plan.num_workers /
         static_cast<double>(total);
}

/// Causal prefill: one to all KV tiles are visible to a row tile, so that some workers have dozens of short output
/// tiles and others a few long ones.
TEST(StaticScheduler, Loads_WithStartCosts_EvenOutShortAndLongOutputTiles) {
  SchedulerConfig config = serving_config(264);
  config.tile = {.rows = 128, .kv_tokens = 64};
  config.tile_cost = 96;
  constexpr int32_t kStartRowCost = 4;
  PlanStorage storage;
  for (const int32_t tokens : {4096, 8192}) {
    OwnedBatch batch = paged_batch({tokens}, {tokens});
    config.start_row_cost = 0;
    EXPECT_GT(makespan_over_mean(config, make_plan(config, batch.view(), storage), kStartRowCost), 1.1) << tokens;
    config.start_row_cost = kStartRowCost;
    EXPECT_LT(makespan_over_mean(config, make_plan(config, batch.view(), storage), kStartRowCost), 1.04) << tokens;
  }
}

TEST(StaticScheduler, Loads_WithStartCosts_StayWithinAGranuleOfTheMean) {
  std::mt19937 random(5);
  PlanStorage storage;
  for (int i = 0; i < 200; ++i) {
    std::vector<int32_t> q_len;
    std::vector<int32_t> kv_len;
    for (auto left = 1 + random() % 20; left > 0; --left) {
      q_len.push_back(static_cast<int32_t>(random() % 3 == 0 ? 1 + random() % 300 : 1));
      kv_len.push_back(q_len.back() + static_cast<int32_t>(random() % (random() % 8 == 0 ? 30000 : 2000)));
    }
    OwnedBatch batch = paged_batch(q_len, kv_len);
    SchedulerConfig config = serving_config(1 + static_cast<int32_t>(random() % 150));
    config.start_row_cost = 1 + static_cast<int32_t>(random() % 20);
    const PlanView plan = make_plan(config, batch.view(), storage);
    std::vector<int64_t> loads = worker_loads(config, plan);
    for (int32_t w = 0; w < plan.num_workers; ++w) {
      for (int32_t work_tile = plan.worker_indptr[w]; work_tile < plan.worker_indptr[w + 1]; ++work_tile) {
        const WorkTile& first = plan.work_tiles[work_tile];
        // One segment, so an output tile begins where its keys do: causal ranges begin at 0.
        if (first.kv_begin != 0) continue;
        loads[static_cast<size_t>(w)] += int64_t{first.row_end - first.row_begin} * config.start_row_cost;
      }
    }
    ASSERT_TRUE(near_mean(loads, tile_cost(config, 16) + int64_t{16} * config.start_row_cost)) << "case " << i;
    ASSERT_LE(plan.num_partial_rows, max_partial_rows(config));
  }
}

TEST(StaticScheduler, Workers_MoreThanTiles_StayIdle) {
  SchedulerConfig config = serving_config(100);
  PlanStorage storage;
  OwnedBatch batch = paged_batch({1, 1}, {64, 64});
  const PlanView plan = make_plan(config, batch.view(), storage);
  EXPECT_EQ(plan.num_work_tiles, 16);
  EXPECT_EQ(plan.num_partial_rows, 0);
  EXPECT_LE(spread(worker_loads(config, plan)), tile_cost(config, 4));
}

}  // namespace
}  // namespace folio::inline v0::scheduler
