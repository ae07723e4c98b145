#include <gtest/gtest.h>

#include <random>

#include "core/allocation_test_util.hpp"
#include "scheduler/plan_test_util.hpp"

namespace folio::inline v0::scheduler {
namespace {

TEST(Allocation, MakePlan_WarmStorage_AllocatesNothing) {
  std::mt19937 random(5);
  std::vector<testing::Case> cases;
  for (int i = 0; i < 200; ++i) cases.push_back(testing::random_case(random));
  testing::Case decode = cases[0];
  decode.batch = testing::paged_batch(std::vector<int32_t>(256, 1), std::vector<int32_t>(256, 5000));
  decode.config.mask = MaskKind::kCausal;
  decode.config.num_q_heads = 32;
  decode.config.num_kv_heads = 8;
  decode.config.num_workers = 132;
  cases.push_back(decode);
  for (size_t i = cases.size(); i-- > 0;) {
    cases.push_back(cases[i]);
    cases.back().config.tile.schedule = Schedule::kDynamic;
    cases.back().config.min_split_tokens = 4;
  }
  std::vector<BatchView> batches;
  for (testing::Case& one : cases) batches.push_back(one.batch.view());

  PlanStorage storage;
  const int64_t before_cold = folio::testing::num_allocations();
  for (size_t i = 0; i < cases.size(); ++i) make_plan(cases[i].config, batches[i], storage);
  const int64_t before_warm = folio::testing::num_allocations();
  EXPECT_GT(before_warm, before_cold) << "allocations are not counted";
  for (size_t i = 0; i < cases.size(); ++i) make_plan(cases[i].config, batches[i], storage);
  EXPECT_EQ(folio::testing::num_allocations(), before_warm);
}

}  // namespace
}  // namespace folio::inline v0::scheduler
