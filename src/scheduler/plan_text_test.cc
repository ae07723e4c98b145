#include "scheduler/plan_test_util.hpp"

#include <gtest/gtest.h>

/// Whole plans of small batches, as text: what changes here changes what every kernel is given.
namespace folio::inline v0::scheduler {
namespace {

using testing::OwnedBatch;
using testing::OwnedSegment;
using testing::paged_batch;

SchedulerConfig small_config() {
  SchedulerConfig config;
  config.num_q_heads = 4;
  config.num_kv_heads = 2;
  config.page_size = 4;
  config.tile = {.rows = 4, .kv_tokens = 4};
  config.num_workers = 2;
  config.fixed_split_tokens = 8;
  return config;
}

std::string described(const SchedulerConfig& config, OwnedBatch batch) {
  PlanStorage storage;
  return testing::describe(make_plan(config, batch.view(), storage));
}

TEST(PlanText, EmptyPlan) {
  EXPECT_EQ(testing::describe(PlanView{}), "");
}

TEST(PlanText, RowTiles_CausalPrefill_EndAtTheDiagonal) {
  EXPECT_EQ(described(small_config(), paged_batch({4}, {6})), R"(worker 0
  request 0 head 0 rows 0-4 segment 0 row 0 keys 0-4 start finish -> out
  request 0 head 0 rows 4-8 segment 0 row 0 keys 0-6 start finish -> out
worker 1
  request 0 head 1 rows 0-4 segment 0 row 0 keys 0-4 start finish -> out
  request 0 head 1 rows 4-8 segment 0 row 0 keys 0-6 start finish -> out
)");
}

// 10 KV tiles for each of two workers: the long request's second head is cut after its second tile.
TEST(PlanText, KvSplits_UnequalDecodes_BalanceTheLoads) {
  EXPECT_EQ(described(small_config(), paged_batch({1, 1}, {30, 6})), R"(worker 0
  request 0 head 0 rows 0-2 segment 0 row 0 keys 0-30 start finish -> out
  request 0 head 1 rows 0-2 segment 0 row 0 keys 0-8 start finish -> partial 0
worker 1
  request 0 head 1 rows 0-2 segment 0 row 0 keys 8-30 start finish -> partial 2
  request 1 head 0 rows 2-4 segment 0 row 1 keys 0-6 start finish -> out
  request 1 head 1 rows 2-4 segment 0 row 1 keys 0-6 start finish -> out
combine request 0 head 1 rows 0-2 <- 0 2
)");
}

// After the cut every split is a partial result of its own, so that 0-8 + 8-16 + 16-24 + 24-30 is folded in this order.
TEST(PlanText, FixedSplits_AfterACut_ArePartialResultsEach) {
  SchedulerConfig config = small_config();
  config.determinism = Determinism::kBatchInvariant;
  config.num_q_heads = config.num_kv_heads = 1;
  EXPECT_EQ(described(config, paged_batch({1, 1}, {30, 6})), R"(worker 0
  request 0 head 0 rows 0-1 segment 0 row 0 keys 0-8 start fold
  request 0 head 0 rows 0-1 segment 0 row 0 keys 8-16 fold finish -> partial 0
worker 1
  request 0 head 0 rows 0-1 segment 0 row 0 keys 16-24 start fold finish -> partial 1
  request 0 head 0 rows 0-1 segment 0 row 0 keys 24-30 start fold finish -> partial 2
  request 1 head 0 rows 1-2 segment 0 row 1 keys 0-6 start fold finish -> out
combine request 0 head 0 rows 0-1 <- 0 1 2
)");
}

// Requests 0 and 1 share 8 keys, request 2 does not: it alone writes its output directly.
TEST(PlanText, SharedPrefix_SeveralRequests_IsReadOncePerRowTile) {
  SchedulerConfig config = small_config();
  config.num_q_heads = 2;
  config.num_kv_heads = 1;
  OwnedBatch batch = paged_batch({1, 1, 1}, {3, 5, 2});
  OwnedSegment prefix;
  prefix.kv_len = {8};
  prefix.group_indptr = {0, 2};
  batch.segments[0].first_pos = {8, 8, 0};
  batch.segments.insert(batch.segments.begin(), prefix);
  EXPECT_EQ(described(config, batch), R"(worker 0
  request 0 head 0 rows 0-4 segment 0 row 0 keys 0-8 start finish -> partial 0
  request 0 head 0 rows 0-2 segment 1 row 0 keys 0-3 start finish -> partial 4
worker 1
  request 1 head 0 rows 2-4 segment 1 row 1 keys 0-5 start finish -> partial 6
  request 2 head 0 rows 4-6 segment 1 row 2 keys 0-2 start finish -> out
combine request 0 head 0 rows 0-2 <- 0 4
combine request 1 head 0 rows 2-4 <- 2 6
)");
}

}  // namespace
}  // namespace folio::inline v0::scheduler
