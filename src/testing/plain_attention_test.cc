#include "testing/plain_attention.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace folio::verify {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kTight = 8 * 0x1p-24f;  // a few roundings of values near 1

/// One request, one head of one component, q = 1, keys `k`, values `v`, the query at the last key.
Problem tiny(std::vector<float> k, std::vector<float> v) {
  Problem problem;
  AttentionConfig& config = problem.config;
  config.num_q_heads = config.num_kv_heads = config.head_dim_qk = config.head_dim_v = 1;
  config.mask = MaskKind::kNone;
  problem.sm_scale = 1.0f;
  RequestModel& request = problem.requests.emplace_back();
  request.q_len = 1;
  request.q_first_pos = static_cast<int32_t>(k.size()) - 1;
  request.q = {1.0f};
  SegmentModel& segment = problem.segments.emplace_back();
  segment.row_of_request = {0};
  KvRowModel& row = segment.rows.emplace_back();
  row.kv_len = static_cast<int32_t>(k.size());
  row.k = std::move(k);
  row.v = std::move(v);
  return problem;
}

float out_of(const Problem& problem) {
  return plain_attention(problem).out[0];
}

TEST(PlainAttention, WeighsByTheExponential) {
  const Problem problem = tiny({0.0f, std::log(3.0f)}, {2.0f, 6.0f});  // weights 1 and 3
  const AttentionResult<float> result = plain_attention(problem);
  EXPECT_NEAR(result.out[0], 5.0f, 5.0f * kTight);
  EXPECT_NEAR(result.lse[0], std::log(4.0f), 2.0f * kTight);
  EXPECT_NEAR(result.weight[0], 5.0f, 5.0f * kTight);
}

TEST(PlainAttention, Sums_LongContext_DoNotDrift) {
  constexpr size_t kKeys = 200'000;
  const AttentionResult<float> result =
      plain_attention(tiny(std::vector<float>(kKeys, 0.0f), std::vector<float>(kKeys, 0.3f)));
  const double bound = double{0.3f} * (4 * 64 + 8) * 0x1p-24;  // four levels of 64 terms
  EXPECT_NEAR(result.out[0], 0.3f, bound);
  EXPECT_NEAR(result.weight[0], 0.3f, bound);
}

TEST(PlainAttention, TellsTheLargestOfEachStepOfALogit) {
  Problem problem = tiny({1.0f, -3.0f}, {2.0f, -6.0f});
  const AttentionResult<float> one_step = plain_attention(problem);
  EXPECT_NEAR(one_step.largest_steps, 3.0f, 3.0f * kTight);
  EXPECT_NEAR(one_step.largest_value, 6.0f, 6.0f * kTight);
}

TEST(PlainAttention, WindowLeftKeepsOneMoreThanItsWidth) {
  Problem problem = tiny({0.0f, 0.0f, 0.0f, 0.0f}, {1.0f, 2.0f, 4.0f, 8.0f});
  problem.config.window_left = 1;
  EXPECT_FLOAT_EQ(out_of(problem), 6.0f);
  problem.config.window_left = 0;
  EXPECT_FLOAT_EQ(out_of(problem), 8.0f);
}

TEST(PlainAttention, CausalAndTheRightWindowLookAtPositions) {
  Problem problem = tiny({0.0f, 0.0f, 0.0f, 0.0f}, {1.0f, 2.0f, 4.0f, 8.0f});
  problem.requests[0].q_first_pos = 1;
  problem.config.mask = MaskKind::kCausal;
  EXPECT_FLOAT_EQ(out_of(problem), 1.5f);
  problem.config.mask = MaskKind::kNone;
  problem.config.window_right = 1;
  EXPECT_FLOAT_EQ(out_of(problem), 7.0f / 3.0f);
  problem.segments[0].mask = SegmentMask::kAllVisible;
  EXPECT_FLOAT_EQ(out_of(problem), 15.0f / 4.0f);
}

TEST(PlainAttention, ShardsStandWhereTheirTokensDo) {
  Problem problem = tiny({0.0f, 0.0f, 0.0f}, {1.0f, 2.0f, 4.0f});
  problem.segments[0].shard = {2, 1, 2};  // positions 2, 3, 6
  problem.config.mask = MaskKind::kCausal;
  problem.requests[0].q_first_pos = 5;
  EXPECT_FLOAT_EQ(out_of(problem), 1.5f);
  problem.requests[0].q_first_pos = 6;
  EXPECT_FLOAT_EQ(out_of(problem), 7.0f / 3.0f);
}

TEST(PlainAttention, CapThenAlibi) {
  Problem problem = tiny({5.0f, 0.0f}, {1.0f, 0.0f});
  problem.logits_soft_cap = 2.0f;
  problem.alibi_slopes = {0.5f};
  const float logit = 2.0f * std::tanh(2.5f) - 0.5f;  // distance 1
  EXPECT_NEAR(out_of(problem), std::exp(logit) / (std::exp(logit) + 1.0f), kTight);
}

TEST(PlainAttention, ASinkCountsInTheDenominatorAndTheLse) {
  Problem problem = tiny({0.0f}, {4.0f});
  problem.sinks = {std::log(3.0f)};
  const AttentionResult<float> result = plain_attention(problem);
  EXPECT_NEAR(result.out[0], 1.0f, kTight);
  EXPECT_NEAR(result.lse[0], std::log(4.0f), 2.0f * kTight);
}

TEST(PlainAttention, RowsWithoutKeys) {
  Problem problem = tiny({0.0f}, {4.0f});
  problem.config.mask = MaskKind::kCausal;
  problem.requests[0].q_first_pos = -1;
  EXPECT_EQ(out_of(problem), 0.0f);
  EXPECT_EQ(plain_attention(problem).lse[0], -kInfinity);
  problem.sinks = {1.5f};
  EXPECT_EQ(out_of(problem), 0.0f);
  EXPECT_EQ(plain_attention(problem).lse[0], 1.5f);
  problem.sinks = {-kInfinity};
  EXPECT_EQ(out_of(problem), 0.0f);
  EXPECT_EQ(plain_attention(problem).lse[0], -kInfinity);
}

TEST(PlainAttention, CustomMasksCoverTheLastKeysAndReplaceCausal) {
  Problem problem = tiny({0.0f, 0.0f, 0.0f}, {1.0f, 2.0f, 4.0f});
  problem.config.mask = MaskKind::kCustom;
  problem.requests[0].q_first_pos = 0;
  problem.requests[0].mask_columns = 2;
  problem.requests[0].mask = {0, 1};
  EXPECT_FLOAT_EQ(out_of(problem), 2.5f);  // keys 0 and 2
}

TEST(PlainAttention, ScalesApplyOnceEach) {
  Problem problem = tiny({0.0f, 1.0f}, {1.0f, 2.0f});
  problem.segments[0].k_scale.values = {0.5f};
  problem.segments[0].v_scale.values = {3.0f};
  problem.q_scale.values = {4.0f};
  const float weight = std::exp(2.0f);
  EXPECT_NEAR(out_of(problem), 3.0f * (1.0f + 2.0f * weight) / (1.0f + weight), 6.0f * kTight);
}

}  // namespace
}  // namespace folio::verify
