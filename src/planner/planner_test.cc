#include "planner/planner.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "planner/plan_check.hpp"

namespace folio::inline v0::planner {
namespace {

using testing::check_plan;
using testing::OwnedBatch;
using testing::paged_batch;
using testing::random_case;
using testing::worker_loads;

constexpr int kRandomCases = 6000;

TEST(MakePlan, VisitsEveryVisiblePairOnceInRandomBatches) {
  std::mt19937 random(20260101);
  PlanStorage storage;
  for (int i = 0; i < kRandomCases; ++i) {
    testing::Case one = random_case(random);
    const PlanView plan = make_plan(one.config, one.batch.view(), storage);
    ASSERT_EQ(check_plan(one.config, one.batch, plan), "") << "case " << i;
  }
}

}  // namespace
}  // namespace folio::inline v0::planner
