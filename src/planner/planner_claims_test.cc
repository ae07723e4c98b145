#include <gtest/gtest.h>

#include <random>

#include "core/instrumented_for_test.hpp"
#include "planner/plan_check.hpp"
#include "planner/plan_digest.hpp"
#include "planner/plan_image.hpp"

/// Plans whose items workers claim one after the other.
namespace folio::inline v0::planner {
namespace {

using testing::Case;
using testing::check_plan;
using testing::fold_orders;
using testing::OwnedBatch;
using testing::paged_batch;
using testing::serialise;

constexpr int kRandomCases = folio::testing::random_cases(6000);

Case random_claimed_case(std::mt19937& random) {
  Case one = testing::random_case(random);
  one.config.tile.schedule = Schedule::kClaimed;
  one.config.least_claim_tokens = 1 + static_cast<int32_t>(random() % 12);
  one.config.item_cost = static_cast<int32_t>(random() % 20);
  return one;
}

TEST(ClaimedPlan, VisitsEveryVisiblePairOnceInRandomBatches) {
  std::mt19937 random(61);
  PlanStorage storage;
  int cut = 0;
  int followed = 0;
  for (int i = 0; i < kRandomCases; ++i) {
    Case one = random_claimed_case(random);
    const PlanView plan = make_plan(one.config, one.batch.view(), storage);
    ASSERT_EQ(check_plan(one.config, one.batch, plan), "") << "case " << i;
    bool shared = false;
    for (int32_t s = 0; s < plan.num_segments; ++s) shared |= plan.segments[s].shared;
    if (!shared) {
      ASSERT_LE(plan.num_partial_rows, max_partial_rows(one.config)) << "case " << i;
    }
    cut += !shared && plan.num_merges > 0 ? 1 : 0;
    followed += plan.num_items > plan.num_claims ? 1 : 0;
  }
  EXPECT_GT(cut, kRandomCases / 20);
  EXPECT_GT(followed, kRandomCases / 20);
}

}  // namespace
}  // namespace folio::inline v0::planner
