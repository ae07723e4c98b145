#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <utility>

#include "core/instrumented_test_util.hpp"
#include "scheduler/plan_check_test_util.hpp"
#include "scheduler/plan_digest_test_util.hpp"
#include "scheduler/plan_test_util.hpp"

/// Dynamic schedules: workers claim work tiles one after the other.
namespace folio::inline v0::scheduler {
namespace {

using testing::Case;
using testing::check_plan;
using testing::fold_orders;
using testing::OwnedBatch;
using testing::paged_batch;
using testing::serialise;

constexpr int kDynamicCases = folio::testing::random_cases(6000);

Case random_dynamic_case(std::mt19937& random) {
  Case one = testing::random_case(random);
  one.config.tile.schedule = Schedule::kDynamic;
  one.config.min_split_tokens = 1 + static_cast<int32_t>(random() % 12);
  one.config.start_cost = static_cast<int32_t>(random() % 20);
  if (random() % 2 == 0) {
    one.config.tile.order = TileOrder::kLpt;
    one.config.l2_swizzle_tokens = static_cast<int64_t>(random() % 40);
  }
  return one;
}

bool has_shared(const PlanView& plan) {
  return std::any_of(plan.segments, plan.segments + plan.num_segments, [](const auto& s) { return s.shared; });
}

/// 32 query heads over 8 KV heads on 132 workers, pages of 16.
SchedulerConfig decode_config() {
  SchedulerConfig config;
  config.num_q_heads = 32;
  config.num_kv_heads = 8;
  config.page_size = 16;
  config.tile = {.rows = 16, .kv_tokens = 16, .schedule = Schedule::kDynamic};
  config.num_workers = 132;
  config.start_cost = 64;
  return config;
}

OwnedBatch decodes(int32_t requests, int32_t kv_len) {
  const auto count = static_cast<size_t>(requests);
  return paged_batch(std::vector<int32_t>(count, 1), std::vector<int32_t>(count, kv_len));
}

/// Number of dynamic tiles by their number of keys.
std::map<int32_t, int32_t> tile_sizes(const PlanView& plan) {
  std::map<int32_t, int32_t> sizes;
  for (int32_t i = 0; i < plan.num_dynamic_tiles; ++i) ++sizes[plan.work_tiles[i].kv_end - plan.work_tiles[i].kv_begin];
  return sizes;
}

TEST(DynamicScheduler, Coverage_RandomBatches_EveryVisiblePairOnce) {
  std::mt19937 random(61);
  PlanStorage storage;
  int cut = 0;
  int followed = 0;
  int shared = 0;
  for (int i = 0; i < kDynamicCases; ++i) {
    Case one = random_dynamic_case(random);
    const PlanView plan = make_plan(one.config, one.batch.view(), storage);
    ASSERT_EQ(check_plan(one.config, one.batch, plan), "") << "case " << i;
    followed += plan.num_work_tiles > plan.num_dynamic_tiles ? 1 : 0;
    if (has_shared(plan)) {
      ++shared;
      continue;
    }
    ASSERT_LE(plan.num_partial_rows, max_partial_rows(one.config)) << "case " << i;
    cut += plan.num_combine_tiles > 0 ? 1 : 0;
  }
  EXPECT_GT(cut, kDynamicCases / 20);
  EXPECT_GT(followed, kDynamicCases / 20);
  EXPECT_GT(shared, kDynamicCases / 4);
}

TEST(DynamicScheduler, Coverage_ServingSizes_EveryVisiblePairOnce) {
  OwnedBatch batch = paged_batch({1, 1, 70, 0, 1, 5, 33, 1}, {3000, 900, 1200, 0, 64, 6, 2500, 17});
  testing::OwnedSegment prefix;
  prefix.kv_len = {4000, 700};
  prefix.group_indptr = {0, 3, 8};
  OwnedBatch sharing = batch;
  sharing.segments.insert(sharing.segments.begin(), prefix);
  sharing.segments[1].first_pos = std::vector<int32_t>(8, 4000);
  PlanStorage storage;
  for (const Determinism level : {Determinism::kRunToRun, Determinism::kScheduleInvariant}) {
    for (const int32_t workers : {1, 7, 132}) {
      if (folio::testing::kInstrumented && workers == 1) continue;
      SchedulerConfig config = decode_config();
      config.num_q_heads = 8;
      config.num_kv_heads = 2;
      config.fixed_split_tokens = 256;
      config.num_workers = workers;
      config.determinism = level;
      config.window_left = workers == 7 ? 500 : -1;
      EXPECT_EQ(check_plan(config, batch, make_plan(config, batch.view(), storage)), "") << workers << " workers";
      EXPECT_EQ(check_plan(config, sharing, make_plan(config, sharing.view(), storage)), "") << workers << " workers";
    }
  }
}

TEST(DynamicScheduler, Plan_EqualInputs_IsEqual) {
  std::mt19937 random(62);
  PlanStorage used;
  for (int i = 0; i < 300; ++i) {
    Case one = random_dynamic_case(random);
    PlanStorage fresh;
    const std::vector<int64_t> first = serialise(make_plan(one.config, one.batch.view(), used));
    EXPECT_EQ(serialise(make_plan(one.config, one.batch.view(), fresh)), first);
  }
}

TEST(DynamicScheduler, FoldOrder_FixedSplits_EqualsTheStaticSchedules) {
  std::mt19937 random(63);
  PlanStorage storage;
  int combined = 0;
  const int cases = folio::testing::random_cases(2000);
  for (int i = 0; i < cases; ++i) {
    Case one = random_dynamic_case(random);
    one.config.determinism = i % 2 == 0 ? Determinism::kBatchInvariant : Determinism::kScheduleInvariant;
    const PlanView plan = make_plan(one.config, one.batch.view(), storage);
    combined += plan.num_combine_tiles > 0 ? 1 : 0;
    const auto dynamic = fold_orders(plan);
    one.config.tile.schedule = Schedule::kStatic;
    one.config.tile.order = TileOrder::kRequestOrder;
    ASSERT_EQ(fold_orders(make_plan(one.config, one.batch.view(), storage)), dynamic) << "case " << i;
  }
  EXPECT_GT(combined, cases / 5);
}

TEST(DynamicScheduler, KvSplits_ShortWork_OneEqualSplitPerWorker) {
  PlanStorage storage;
  const struct {
    int32_t requests;
    int32_t kv_len;
    std::map<int32_t, int32_t> sizes;
  } shapes[] = {{1, 4096, {{256, 128}}}, {8, 1024, {{512, 128}}}, {1, 8192, {{512, 128}}},
                {4, 2048, {{512, 128}}}, {1, 1024, {{256, 32}}},  // splits of less are not worth it
                {16, 256, {{256, 128}}},                          // whole
                {1, 200, {{200, 8}}}};
  for (const auto& shape : shapes) {
    OwnedBatch batch = decodes(shape.requests, shape.kv_len);
    const SchedulerConfig config = decode_config();
    const PlanView plan = make_plan(config, batch.view(), storage);
    EXPECT_EQ(tile_sizes(plan), shape.sizes) << shape.requests << " x " << shape.kv_len;
    EXPECT_EQ(check_plan(config, batch, plan), "");
  }
}

TEST(DynamicScheduler, KvSplits_ManyRequests_OnlyTheLastAreSplit) {
  PlanStorage storage;
  OwnedBatch batch = decodes(64, 4096);
  const SchedulerConfig config = decode_config();
  const PlanView plan = make_plan(config, batch.view(), storage);
  // Three split waves, of a half, a quarter and an eighth of the work, have splits of 4096 keys and more.
  for (int32_t i = 0; i < 48 * 8; ++i) {
    ASSERT_EQ(plan.work_tiles[i].kv_end - plan.work_tiles[i].kv_begin, 4096) << "dynamic tile " << i;
    ASSERT_EQ(plan.work_tiles[i].partial, -1);
  }
  EXPECT_EQ(plan.num_work_tiles, plan.num_dynamic_tiles);
  EXPECT_LE(plan.num_combine_tiles, 16 * 8);
  EXPECT_GE(tile_sizes(plan).begin()->first, 256);
}

TEST(DynamicScheduler, KvSplits_OneLongRequest_Shrink) {
  PlanStorage storage;
  OwnedBatch batch = decodes(1, 131072);
  const PlanView plan = make_plan(decode_config(), batch.view(), storage);
  int32_t previous = 131072;
  for (int32_t i = 0; i < plan.num_dynamic_tiles; i += 8) {
    const int32_t keys = plan.work_tiles[i].kv_end - plan.work_tiles[i].kv_begin;
    ASSERT_LE(keys, previous + 16) << "dynamic tile " << i;  // splits of one split wave differ by a tile
    previous = keys;
  }
  EXPECT_EQ(plan.num_combine_tiles, 8);
  // Half of the work in splits of up to five eighths of a worker's share.
  EXPECT_LE(plan.work_tiles[0].kv_end, 131072 * 8 / 132 * 5 / 8 + 16);
  EXPECT_LE(previous, 2 * 256);
}

TEST(DynamicScheduler, KvSplits_LongRequestAnywhere_IsSplit) {
  PlanStorage storage;
  for (const size_t place : {size_t{0}, size_t{40}, size_t{63}}) {
    OwnedBatch batch = decodes(64, 1024);
    batch.segments[0].kv_len[place] = 131072;
    const SchedulerConfig config = decode_config();
    const PlanView plan = make_plan(config, batch.view(), storage);
    const int64_t share = int64_t{131072 + 63 * 1024} * 8 / 132;
    EXPECT_LE(tile_sizes(plan).rbegin()->first, share * 5 / 8 + 64) << "at " << place;
    EXPECT_EQ(check_plan(config, batch, plan), "");
  }
}

TEST(DynamicScheduler, KvSplits_OneWorker_None) {
  PlanStorage storage;
  OwnedBatch batch = paged_batch({1, 1}, {100000, 50});
  for (const Determinism level : {Determinism::kRunToRun, Determinism::kScheduleInvariant}) {
    SchedulerConfig config = decode_config();
    config.num_workers = 1;
    config.determinism = level;
    const PlanView plan = make_plan(config, batch.view(), storage);
    EXPECT_EQ(plan.num_dynamic_tiles, 16);
    EXPECT_EQ(plan.num_combine_tiles, 0);
    EXPECT_EQ(plan.num_partial_rows, 0);
    EXPECT_EQ(max_partial_rows(config), 0);
  }
}

TEST(DynamicScheduler, FixedSplits_BeyondTheBudget_AreContinuations) {
  PlanStorage storage;
  SchedulerConfig config = decode_config();
  config.determinism = Determinism::kBatchInvariant;
  OwnedBatch batch = decodes(1, 131072);
  const PlanView plan = make_plan(config, batch.view(), storage);
  EXPECT_EQ(tile_sizes(plan), (std::map<int32_t, int32_t>{{2048, 64 * 8}}));
  EXPECT_EQ(plan.num_partial_rows, 64 * 8 * 4);

  // More splits than there may be partial rows: the first requests are split, the others stay whole.
  config.fixed_split_tokens = 16;
  batch = decodes(8, 32768);
  const PlanView beyond = make_plan(config, batch.view(), storage);
  EXPECT_LE(beyond.num_partial_rows, max_partial_rows(config));
  EXPECT_EQ(beyond.num_partial_rows, 2 * 2048 * 8 * 4);
  EXPECT_EQ(beyond.num_dynamic_tiles, (2 * 2048 + 6) * 8);
  EXPECT_EQ(beyond.num_work_tiles, 8 * 2048 * 8);
  EXPECT_EQ(check_plan(config, batch, beyond), "");
}

TEST(DynamicScheduler, Continuations_SeveralSegments_LieBehindTheDynamicTiles) {
  SchedulerConfig config = decode_config();
  config.num_q_heads = config.num_kv_heads = 2;
  config.num_workers = 4;
  OwnedBatch batch = paged_batch({1, 1}, {100, 90});
  batch.segments.push_back(batch.segments[0]);
  batch.segments[1].kv_len = {7, 5};
  batch.segments[1].first_pos = {100, 90};
  PlanStorage storage;
  const PlanView plan = make_plan(config, batch.view(), storage);
  ASSERT_EQ(plan.num_dynamic_tiles, 4);
  ASSERT_EQ(plan.num_work_tiles, 8);
  EXPECT_EQ(testing::describe(plan),
            "tile 0\n  request 0 head 0 rows 0-1 segment 0 row 0 keys 0-100 start\n"
            "  request 0 head 0 rows 0-1 segment 1 row 0 keys 0-7 finish -> out\n"
            "tile 1\n  request 0 head 1 rows 0-1 segment 0 row 0 keys 0-100 start\n"
            "  request 0 head 1 rows 0-1 segment 1 row 0 keys 0-7 finish -> out\n"
            "tile 2\n  request 1 head 0 rows 1-2 segment 0 row 1 keys 0-90 start\n"
            "  request 1 head 0 rows 1-2 segment 1 row 1 keys 0-5 finish -> out\n"
            "tile 3\n  request 1 head 1 rows 1-2 segment 0 row 1 keys 0-90 start\n"
            "  request 1 head 1 rows 1-2 segment 1 row 1 keys 0-5 finish -> out\n");
}

TEST(DynamicScheduler, PartialRows_WithBounds_AreFewer) {
  SchedulerConfig config = decode_config();
  config.tile.rows = 64;
  EXPECT_EQ(max_partial_rows(config), 16 * 132 * 64);
  config.bounds =
      GraphBounds{.max_requests = 8, .max_tokens = 8, .max_q_len = 1, .max_kv_len = 131072, .max_shared_levels = 0};
  EXPECT_EQ(max_partial_rows(config), 16 * 132 * 4);
}

}  // namespace
}  // namespace folio::inline v0::scheduler
