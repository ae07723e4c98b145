#include "scheduler/scheduler.hpp"

#include <gtest/gtest.h>

#include <random>

#include "core/instrumented_test_util.hpp"
#include "scheduler/plan_check_test_util.hpp"
#include "scheduler/plan_digest_test_util.hpp"

namespace folio::inline v0::scheduler {
namespace {

using testing::Case;
using testing::check_plan;
using testing::OwnedBatch;
using testing::OwnedSegment;
using testing::paged_batch;
using testing::random_case;
using testing::serialise;

constexpr int kRandomCases = folio::testing::kInstrumented ? 300 : 6000;

SchedulerConfig tiny_config() {
  SchedulerConfig config;
  config.num_q_heads = 2;
  config.num_kv_heads = 1;
  config.page_size = 4;
  config.tile = {.rows = 4, .kv_tokens = 4};
  config.num_workers = 2;
  config.fixed_split_tokens = 8;
  return config;
}

TEST(MakePlan, Coverage_RandomBatches_EveryVisiblePairOnce) {
  std::mt19937 random(20260101);
  PlanStorage storage;
  int with_merges = 0;
  int with_shared = 0;
  for (int i = 0; i < kRandomCases; ++i) {
    Case one = random_case(random);
    const PlanView plan = make_plan(one.config, one.batch.view(), storage);
    ASSERT_EQ(check_plan(one.config, one.batch, plan), "") << "case " << i;
    with_merges += plan.num_combine_tiles > 0 ? 1 : 0;
    for (int32_t s = 0; s < plan.num_segments; ++s) with_shared += plan.segments[s].shared ? 1 : 0;
  }
  EXPECT_GT(with_merges, kRandomCases / 4);
  EXPECT_GT(with_shared, kRandomCases / 4);
}

TEST(MakePlan, Coverage_ServingSizes_EveryVisiblePairOnce) {
  SchedulerConfig config;
  config.num_q_heads = 8;
  config.num_kv_heads = 2;
  config.page_size = 16;
  config.tile = {.rows = 16, .kv_tokens = 64};
  config.fixed_split_tokens = 256;
  OwnedBatch batch = paged_batch({1, 1, 70, 0, 1, 5, 33}, {3000, 900, 1200, 0, 64, 6, 2500});
  PlanStorage storage;
  for (const int32_t workers : {1, 7, 132}) {
    if (folio::testing::kInstrumented && workers == 1) continue;
    for (const Determinism level : {Determinism::kRunToRun, Determinism::kScheduleInvariant}) {
      for (const int32_t window : {-1, 500}) {
        config.num_workers = workers;
        config.determinism = level;
        config.window_left = window;
        EXPECT_EQ(check_plan(config, batch, make_plan(config, batch.view(), storage)), "") << workers << " workers";
      }
    }
  }
}

TEST(MakePlan, Plan_EqualInputs_IsEqual) {
  std::mt19937 random(7);
  PlanStorage used;
  for (int i = 0; i < 300; ++i) {
    Case one = random_case(random);
    PlanStorage fresh;
    const std::vector<int64_t> first = serialise(make_plan(one.config, one.batch.view(), used));
    EXPECT_EQ(serialise(make_plan(one.config, one.batch.view(), fresh)), first);
  }
}

TEST(MakePlan, PartialRows_RandomBatches_KeepToTheBound) {
  std::mt19937 random(11);
  PlanStorage storage;
  for (int i = 0; i < kRandomCases; ++i) {
    Case one = random_case(random);
    const BatchView batch = one.batch.view();
    GraphBounds bounds{
        .max_requests = batch.num_requests, .max_tokens = batch.num_tokens, .max_q_len = 100, .max_kv_len = 1000};
    for (const KvSegment& segment : batch.segments) bounds.max_shared_levels += segment.group_indptr != nullptr ? 1 : 0;
    one.config.bounds = bounds;
    EXPECT_LE(make_plan(one.config, batch, storage).num_partial_rows, max_partial_rows(one.config)) << "case " << i;
  }
}

TEST(MakePlan, QueryPositions_NotGiven_EndWithTheLastSegment) {
  OwnedBatch batch = paged_batch({3, 1, 5, 0}, {10, 4, 2, 0});
  batch.segments[0].first_pos = {0, 6, 0, 0};
  OwnedSegment shared;  // of the first request only
  shared.kv_len = {7};
  shared.first_pos = {20};
  shared.group_indptr = {0, 1};
  batch.segments.push_back(shared);
  PlanStorage storage;
  const PlanView plan = make_plan(tiny_config(), batch.view(), storage);
  EXPECT_EQ(std::vector<int32_t>(plan.q_first_pos, plan.q_first_pos + 4), (std::vector<int32_t>{24, 9, -3, 0}));

  batch.segments.erase(batch.segments.begin());  // now the others have no row anywhere
  const PlanView rest = make_plan(tiny_config(), batch.view(), storage);
  EXPECT_EQ(std::vector<int32_t>(rest.q_first_pos, rest.q_first_pos + 4), (std::vector<int32_t>{24, -1, -5, 0}));
}

TEST(MakePlan, FirstPos_LeftOut_FollowsTheSegmentBefore) {
  OwnedBatch batch = paged_batch({1, 1, 0, 2}, {8, 8, 0, 5});
  batch.segments[0].first_pos = {2, 2, 0, 0};
  OwnedSegment shared;  // of the first three requests, of which the third has no queries to disagree with
  shared.kv_len = {6};
  shared.group_indptr = {0, 3};
  batch.segments.push_back(shared);
  OwnedSegment own;
  own.kv_len = {1, 2, 0, 3};
  batch.segments.push_back(own);
  PlanStorage storage;
  const PlanView plan = make_plan(tiny_config(), batch.view(), storage);
  EXPECT_EQ(plan.segments[1].first_pos[0], 10);
  const int32_t* first_pos = plan.segments[2].first_pos;
  EXPECT_EQ(std::vector<int32_t>(first_pos, first_pos + 4), (std::vector<int32_t>{16, 16, 16, 5}));
  EXPECT_EQ(std::vector<int32_t>(plan.q_first_pos, plan.q_first_pos + 4), (std::vector<int32_t>{16, 17, 16, 6}));
}

TEST(MakePlan, Lengths_Changed_DoNotChangeThePlan) {
  OwnedBatch batch = paged_batch({1, 2}, {5, 9});
  batch.segments[0].first_pos = {3, 4};
  PlanStorage storage;
  const PlanView plan = make_plan(tiny_config(), batch.view(), storage);
  batch.segments[0].kv_len = {-1, -1};
  batch.segments[0].first_pos = {-1, -1};
  batch.q_len = {7, 7};
  EXPECT_EQ(plan.num_tokens, 3);
  EXPECT_EQ(plan.cu_q[2], 3);
  EXPECT_EQ(plan.segments[0].kv_len[1], 9);
  EXPECT_EQ(plan.segments[0].first_pos[1], 4);
  EXPECT_EQ(plan.segments[0].row_of_request, nullptr);
  EXPECT_EQ(plan.segments[0].key_offset, nullptr);
  EXPECT_EQ(plan.mask_columns, nullptr);
}

TEST(MakePlan, CustomMask_EveryScope_IsLaidOut) {
  SchedulerConfig config = tiny_config();
  config.mask = MaskKind::kCustom;
  OwnedBatch batch = paged_batch({3, 2}, {10, 4});
  batch.segments.push_back(batch.segments[0]);
  batch.segments[1].kv_len = {1, 5};
  PlanStorage storage;
  PlanView plan = make_plan(config, batch.view(), storage);
  EXPECT_EQ(plan.custom_mask_scope, CustomMaskScope::kAll);
  EXPECT_EQ(std::vector<int32_t>(plan.mask_columns, plan.mask_columns + 2), (std::vector<int32_t>{11, 9}));
  EXPECT_EQ(std::vector<int32_t>(plan.mask_first_column, plan.mask_first_column + 2), (std::vector<int32_t>{0, 0}));
  // 3 x 11 bits take 5 bytes, 2 x 9 bits take 3.
  EXPECT_EQ(std::vector<int64_t>(plan.mask_byte_indptr, plan.mask_byte_indptr + 3), (std::vector<int64_t>{0, 5, 8}));
  EXPECT_EQ(plan.segments[0].key_offset[0], 0);
  EXPECT_EQ(plan.segments[1].key_offset[0], 10);
  EXPECT_EQ(plan.segments[1].key_offset[1], 4);

  batch.scope = CustomMaskScope::kTail;
  batch.tail_len = {3, 0};
  plan = make_plan(config, batch.view(), storage);
  EXPECT_EQ(plan.custom_mask_scope, CustomMaskScope::kTail);
  EXPECT_EQ(std::vector<int32_t>(plan.mask_columns, plan.mask_columns + 2), (std::vector<int32_t>{3, 0}));
  EXPECT_EQ(std::vector<int32_t>(plan.mask_first_column, plan.mask_first_column + 2), (std::vector<int32_t>{8, 9}));
  EXPECT_EQ(std::vector<int64_t>(plan.mask_byte_indptr, plan.mask_byte_indptr + 3), (std::vector<int64_t>{0, 2, 2}));
}

TEST(MakePlan, Batch_Empty_IsPlanned) {
  PlanStorage storage;
  OwnedBatch none = paged_batch({}, {});
  EXPECT_EQ(make_plan(tiny_config(), none.view(), storage).num_work_tiles, 0);
  OwnedBatch padding = paged_batch({0, 0, 0}, {0, 5, 0});
  EXPECT_EQ(make_plan(tiny_config(), padding.view(), storage).num_work_tiles, 0);
  BatchView bare;
  const KvSegment segment;
  bare.segments = {&segment, 1};
  const PlanView plan = make_plan(tiny_config(), bare, storage);
  EXPECT_EQ(plan.cu_q[0], 0);
  EXPECT_EQ(plan.worker_indptr[plan.num_workers], 0);
}

TEST(MakePlan, Rows_WithoutVisibleKeys_GetAWorkTile) {
  PlanStorage storage;
  OwnedBatch batch = paged_batch({2, 1}, {0, 3});
  const PlanView plan = make_plan(tiny_config(), batch.view(), storage);
  ASSERT_EQ(plan.num_work_tiles, 2);
  EXPECT_EQ(plan.work_tiles[0].kv_begin, plan.work_tiles[0].kv_end);
  EXPECT_EQ(plan.work_tiles[0].row_end, 4);
  EXPECT_EQ(plan.work_tiles[0].flags, uint32_t{kStart | kFinish});
  EXPECT_EQ(plan.work_tiles[0].partial, -1);
}

TEST(MakePlan, Keys_OutsideTheWindow_AreSkipped) {
  SchedulerConfig config = tiny_config();
  config.num_workers = 1;
  config.window_left = 5;
  OwnedBatch batch = paged_batch({1}, {1000000});
  PlanStorage storage;
  PlanView plan = make_plan(config, batch.view(), storage);
  ASSERT_EQ(plan.num_work_tiles, 1);
  EXPECT_EQ(plan.work_tiles[0].kv_begin, 999994);  // the query stands at 999999
  EXPECT_EQ(plan.work_tiles[0].kv_end, 1000000);

  config.determinism = Determinism::kScheduleInvariant;  // from a tile of absolute position
  plan = make_plan(config, batch.view(), storage);
  ASSERT_EQ(plan.num_work_tiles, 1);
  EXPECT_EQ(plan.work_tiles[0].kv_begin, 999992);
}

}  // namespace
}  // namespace folio::inline v0::scheduler
