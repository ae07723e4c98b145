#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "core/instrumented_test_util.hpp"
#include "scheduler/plan_check_test_util.hpp"
#include "scheduler/plan_test_util.hpp"

/// SchedulerConfig::heads_together: batches of few row tiles are split by their keys, for all KV heads at once.
namespace folio::inline v0::scheduler {
namespace {

using testing::Case;
using testing::check_plan;
using testing::OwnedBatch;
using testing::paged_batch;

SchedulerConfig decode_config(int32_t num_workers) {
  SchedulerConfig config;
  config.num_q_heads = 32;
  config.num_kv_heads = 8;
  config.page_size = 16;
  config.tile = {.rows = 64, .kv_tokens = 64, .schedule = Schedule::kDynamic, .order = TileOrder::kLpt};
  config.num_workers = num_workers;
  config.heads_together = 8;
  return config;
}

OwnedBatch decodes(size_t requests, int32_t kv_len) {
  return paged_batch(std::vector<int32_t>(requests, 1), std::vector<int32_t>(requests, kv_len));
}

TEST(HeadsTogether, OneLongRequest_EveryWorkerHasAShareOfItsKeysForAllHeads) {
  for (const int32_t workers : {2, 5, 16}) {
    const SchedulerConfig config = decode_config(workers);
    OwnedBatch batch = decodes(1, 65536);
    PlanStorage storage;
    const PlanView plan = make_plan(config, batch.view(), storage);
    EXPECT_EQ(check_plan(config, batch, plan), "");
    EXPECT_EQ(plan.claimed_heads, 8);
    ASSERT_EQ(plan.num_dynamic_tiles, 8 * workers);
    for (int32_t i = 0; i < plan.num_dynamic_tiles; ++i) {
      EXPECT_EQ(plan.work_tiles[i].kv_head, i % 8);
      EXPECT_EQ(plan.work_tiles[i].kv_begin, plan.work_tiles[i / 8 * 8].kv_begin);
    }
  }
}

TEST(HeadsTogether, UnevenWorkers_SplitsBecomeShorterAndShorter) {
  SchedulerConfig config = decode_config(16);
  config.uneven_workers = true;
  OwnedBatch batch = decodes(8, 16384);
  PlanStorage storage;
  const PlanView plan = make_plan(config, batch.view(), storage);
  EXPECT_EQ(check_plan(config, batch, plan), "");
  EXPECT_EQ(plan.claimed_heads, 8);
  const auto keys = [&](int32_t i) { return plan.work_tiles[i].kv_end - plan.work_tiles[i].kv_begin; };
  constexpr int32_t kShare = 8 * 16384 / 16;
  EXPECT_LE(keys(0), kShare * 3 / 4);                        // a slow worker's first claim
  EXPECT_LE(keys(plan.num_dynamic_tiles - 1), kShare / 16);  // what others may still wait for
  EXPECT_LE(plan.num_dynamic_tiles / 8, 16 * 8);
  // Of one long request, however few the workers.
  for (const int32_t workers : {2, 3, 5, 64}) {
    config.num_workers = workers;
    EXPECT_GT(make_plan(config, decodes(1, 262144).view(), storage).num_dynamic_tiles / 8, 3 * workers) << workers;
  }
  config.num_workers = 16;
  // Short batches stay one equal split a worker.
  EXPECT_EQ(make_plan(config, decodes(4, 2048).view(), storage).num_dynamic_tiles / 8, 16);
}

TEST(HeadsTogether, LongRequestAmongShortOnes_ItsKeysAreSplitForAllHeads) {
  SchedulerConfig config = decode_config(16);
  config.uneven_workers = true;
  std::vector<int32_t> lengths(64, 512);
  lengths[5] = 65536;
  OwnedBatch batch = paged_batch(std::vector<int32_t>(64, 1), lengths);
  PlanStorage storage;
  const PlanView plan = make_plan(config, batch.view(), storage);
  EXPECT_EQ(check_plan(config, batch, plan), "");
  EXPECT_EQ(plan.claimed_heads, 8);
  for (int32_t i = 0; i < 8; ++i) {
    EXPECT_EQ(plan.work_tiles[i].request, 5);
    EXPECT_EQ(plan.work_tiles[i].kv_head, i);
    EXPECT_EQ(plan.work_tiles[i].kv_end, plan.work_tiles[0].kv_end);
  }
}

TEST(HeadsTogether, BoundedRows_PartialRowsFitWhatTheOpSays) {
  SchedulerConfig config = decode_config(2);
  config.uneven_workers = true;
  config.bounds = GraphBounds{4, 4, 1, 65536, 0};  // a request has 4 rows a KV head
  PlanStorage storage;
  const PlanView plan = make_plan(config, decodes(1, 65536).view(), storage);
  EXPECT_EQ(plan.claimed_heads, 8);
  EXPECT_GT(plan.num_dynamic_tiles / 8, 4);
  EXPECT_GT(plan.num_partial_rows, 10 * 2 * 4);  // the budget's splits of one head's rows
  EXPECT_LE(plan.num_partial_rows, max_partial_rows(config));
}

TEST(HeadsTogether, OneHeadAtATime_HeadsAreDivided) {
  SchedulerConfig config = decode_config(16);
  config.heads_together = 1;
  PlanStorage storage;
  const PlanView plan = make_plan(config, decodes(1, 65536).view(), storage);
  EXPECT_EQ(plan.claimed_heads, 1);
  EXPECT_EQ(plan.num_dynamic_tiles, 16);
}

TEST(HeadsTogether, ManyRequests_NothingIsSplit) {
  const SchedulerConfig config = decode_config(16);
  PlanStorage storage;
  EXPECT_EQ(make_plan(config, decodes(8, 4096).view(), storage).claimed_heads, 8);
  for (const size_t requests : {16, 64}) {
    const PlanView plan = make_plan(config, decodes(requests, 4096).view(), storage);
    EXPECT_EQ(plan.claimed_heads, 1);
    EXPECT_EQ(plan.num_combine_tiles, 0);
  }
}

TEST(HeadsTogether, ManyRows_AsManyHeadsAsAWorkTileHolds) {
  const SchedulerConfig config = decode_config(16);
  PlanStorage storage;
  EXPECT_EQ(make_plan(config, paged_batch({8}, {65536}).view(), storage).claimed_heads, 2);    // 32 rows
  EXPECT_EQ(make_plan(config, paged_batch({300}, {65536}).view(), storage).claimed_heads, 1);  // 64
}

TEST(HeadsTogether, RandomBatches_AreCoveredWithinTheirMemory) {
  std::mt19937 random(77);
  PlanStorage storage;
  int together = 0;
  const int cases = folio::testing::random_cases(3000);
  for (int i = 0; i < cases; ++i) {
    Case one = testing::random_case(random);
    one.config.tile.schedule = Schedule::kDynamic;
    one.config.tile.order = TileOrder::kLpt;
    one.config.heads_together = 1 + static_cast<int32_t>(random() % 8);
    one.config.min_split_tokens = 1 + static_cast<int32_t>(random() % 12);
    const PlanView plan = make_plan(one.config, one.batch.view(), storage);
    ASSERT_EQ(check_plan(one.config, one.batch, plan), "") << "case " << i;
    const bool shared =
        std::any_of(plan.segments, plan.segments + plan.num_segments, [](const auto& s) { return s.shared; });
    if (!shared) {
      ASSERT_LE(plan.num_partial_rows, max_partial_rows(one.config)) << "case " << i;
    }
    together += plan.claimed_heads > 1 && plan.num_combine_tiles > 0 ? 1 : 0;
  }
  EXPECT_GT(together, cases / 100);
}

}  // namespace
}  // namespace folio::inline v0::scheduler
