// The model of how two passes share the SMs, against batches that were measured on an H200.
#include "kernels/cuda/sm90/common/sm_partition.hpp"

#include <gtest/gtest.h>

namespace folio::kernels::cuda::sm90 {
namespace {

constexpr int32_t kSms = 132;

constexpr PassCost kCost{.unit = 1.0f, .work_tile = 0.0f};

/// A plan whose work takes all SMs `microseconds`, at kCost.
scheduler::PlanView plan_of(double microseconds, int32_t tiles) {
  scheduler::PlanView plan;
  plan.num_workers = kSms;
  plan.num_dynamic_tiles = tiles;
  plan.work_cost = static_cast<int64_t>(microseconds * kSms * 1000.0);
  return plan;
}

/// The number of SMs with the shortest step.
int32_t best_ctas(const scheduler::PlanView& prefill, const scheduler::PlanView& decode,
                  const PassCost& prefill_cost = kCost) {
  const auto time = [&](int32_t ctas) { return step_time(prefill, prefill_cost, decode, kCost, ctas); };
  int32_t best = 1;
  for (int32_t ctas = 1; ctas <= kSms; ++ctas) {
    if (time(ctas) < time(best)) best = ctas;
  }
  return best;
}

TEST(SmPartition, MeasuredBatches) {
  // 4 prompts of 1024 beside 60 decodes of 4096: fastest with 48 to 56 SMs. 40: 5 % slower, 80: 6 %.
  const int32_t four_prompts = best_ctas(plan_of(90, 1024), plan_of(243, 512));
  EXPECT_GE(four_prompts, 44);
  EXPECT_LE(four_prompts, 60);
  // A prompt of 2048 beside 128 decodes of 4096: fastest with 24 to 40 SMs. 16: 11 % slower.
  const int32_t one_prompt = best_ctas(plan_of(65, 512), plan_of(510, 1024));
  EXPECT_GE(one_prompt, 20);
  EXPECT_LE(one_prompt, 44);
}

TEST(SmPartition, APrefillOfOneWaveKeepsItsWave) {
  // 512 tokens behind 8192: 128 equal work tiles. With fewer SMs some would compute two.
  EXPECT_GE(best_ctas(plan_of(130, 128), plan_of(65, 512)), 128);
}

TEST(SmPartition, ALongPrefillTakesNearlyAll) {
  EXPECT_GE(best_ctas(plan_of(750, 2048), plan_of(40, 256)), 110);
}

TEST(SmPartition, CostsOfUnitsAndOfWorkTilesAdd) {
  const scheduler::PlanView decode = plan_of(243, 512);
  const scheduler::PlanView prefill = plan_of(45, 1024);
  const PassCost twice{.unit = 2.0f, .work_tile = 0.0f};
  const PassCost tiles{.unit = 1.0f, .work_tile = 45.0f * 1000.0f * kSms / 1024};  // as much again
  EXPECT_FLOAT_EQ(step_time(plan_of(90, 1024), kCost, decode, kCost, 40), step_time(prefill, twice, decode, kCost, 40));
  EXPECT_FLOAT_EQ(step_time(prefill, tiles, decode, kCost, 40), step_time(prefill, twice, decode, kCost, 40));
  EXPECT_EQ(best_ctas(plan_of(90, 1024), decode), best_ctas(prefill, decode, tiles));
}

TEST(SmPartition, APrefillThatOutlastsTheDecodeIsTheStep) {
  const float time = step_time(plan_of(100, 1320), kCost, plan_of(10, 512), kCost, kSms / 2);
  EXPECT_FLOAT_EQ(time, kPrefillMargin * 200.0f * 1000.0f);
}

}  // namespace
}  // namespace folio::kernels::cuda::sm90
