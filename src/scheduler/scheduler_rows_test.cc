#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "core/instrumented_test_util.hpp"
#include "folio/types/error.hpp"
#include "scheduler/plan_check_test_util.hpp"
#include "scheduler/plan_digest_test_util.hpp"
#include "scheduler/plan_image.hpp"
#include "scheduler/plan_test_util.hpp"

/// Plans of the decode pass, which take requests of few rows, and of the prefill pass.
namespace folio::inline v0::scheduler {
namespace {

using testing::Case;
using testing::check_plan;
using testing::OwnedBatch;

constexpr int kRandomBatches = folio::testing::random_cases(3000);

TEST(PlannedRows, Rows_TwoPlansOfABatch_TakeEveryRequestOnce) {
  std::mt19937 random(81);
  PlanStorage few_storage;
  PlanStorage many_storage;
  int both = 0;
  for (int i = 0; i < kRandomBatches; ++i) {
    Case one = testing::random_case(random);
    SchedulerConfig few = one.config;
    SchedulerConfig many = one.config;
    few.max_rows = static_cast<int32_t>(random() % 20);
    many.min_rows = few.max_rows + 1;
    if (i % 2 == 0) many.tile.schedule = Schedule::kDynamic;
    const PlanView of_few = make_plan(few, one.batch.view(), few_storage);
    const PlanView of_many = make_plan(many, one.batch.view(), many_storage);
    ASSERT_EQ(check_plan(few, one.batch, of_few), "") << "case " << i;
    ASSERT_EQ(check_plan(many, one.batch, of_many), "") << "case " << i;
    both += of_few.num_work_tiles > 0 && of_many.num_work_tiles > 0 ? 1 : 0;
  }
  EXPECT_GT(both, kRandomBatches / 20);
}

TEST(PlannedRows, Rows_SharedSegments_LongestRequestDecides) {
  OwnedBatch batch = testing::paged_batch({1, 3, 1}, {20, 30, 40});
  testing::OwnedSegment prefix;
  prefix.kv_len = {50};
  prefix.group_indptr = {0, 3};
  batch.segments.insert(batch.segments.begin(), prefix);
  SchedulerConfig config;
  config.num_q_heads = config.num_kv_heads = 1;
  config.page_size = 16;
  config.tile = {.rows = 16, .kv_tokens = 16};
  PlanStorage storage;
  config.max_rows = 2;
  EXPECT_EQ(make_plan(config, batch.view(), storage).num_work_tiles, 0);
  config.max_rows = 3;
  const PlanView plan = make_plan(config, batch.view(), storage);
  EXPECT_EQ(check_plan(config, batch, plan), "");
  EXPECT_GE(plan.num_work_tiles, 4);
}

TEST(PlannedRows, ImageSize_LeftOutRequests_CostNothing) {
  SchedulerConfig config;
  config.num_q_heads = 32;
  config.num_kv_heads = 8;
  config.page_size = 16;
  config.tile = {.rows = 16, .kv_tokens = 16, .schedule = Schedule::kDynamic};
  config.bounds = GraphBounds{
      .max_requests = 256, .max_tokens = 8192, .max_q_len = 8192, .max_kv_len = 131072, .max_shared_levels = 0};
  EXPECT_EQ(max_row_tiles(config, 256, 8192), 8192 / 4 + 256);
  config.max_rows = 16;
  EXPECT_EQ(max_row_tiles(config, 256, 8192), 256);
}

TEST(PlannedRows, Rows_EmptyInterval_IsRefused) {
  SchedulerConfig config;
  config.num_q_heads = config.num_kv_heads = 1;
  config.page_size = 16;
  config.tile = {.rows = 16, .kv_tokens = 16};
  config.min_rows = 5;
  config.max_rows = 4;
  OwnedBatch batch = testing::paged_batch({1}, {1});
  PlanStorage storage;
  EXPECT_THROW(make_plan(config, batch.view(), storage), Error);
}

}  // namespace
}  // namespace folio::inline v0::scheduler
