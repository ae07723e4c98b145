#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "core/instrumented_test_util.hpp"
#include "scheduler/plan_digest_test_util.hpp"
#include "scheduler/plan_test_util.hpp"

/// At the fixed-split levels, what a row's result is folded from depends neither on how the tile space was cut, nor on
/// the other requests of the batch.
namespace folio::inline v0::scheduler {
namespace {

using testing::Case;
using testing::fold_orders;
using testing::OwnedBatch;
using testing::random_case;

Case random_invariant_case(std::mt19937& random) {
  Case one = random_case(random);
  one.config.determinism = random() % 2 == 0 ? Determinism::kBatchInvariant : Determinism::kScheduleInvariant;
  return one;
}

TEST(Invariance, FoldOrder_AnyCuts_IsTheSame) {
  std::mt19937 random(31);
  PlanStorage storage;
  int combined = 0;
  for (int i = 0; i < (folio::testing::kInstrumented ? 150 : 3000); ++i) {
    Case one = random_invariant_case(random);
    one.config.num_workers = 1;
    const auto uncut = fold_orders(make_plan(one.config, one.batch.view(), storage));
    one.config.num_workers = 2 + static_cast<int32_t>(random() % 9);
    const PlanView plan = make_plan(one.config, one.batch.view(), storage);
    combined += plan.num_combine_tiles > 0 ? 1 : 0;
    ASSERT_EQ(fold_orders(plan), uncut) << "case " << i;
  }
  EXPECT_GT(combined, folio::testing::kInstrumented ? 25 : 500);
}

/// The batch with only one of its requests.
OwnedBatch alone(const OwnedBatch& batch, size_t request) {
  OwnedBatch one;
  one.q_len = {batch.q_len[request]};
  if (!batch.q_first_pos.empty()) one.q_first_pos = {batch.q_first_pos[request]};
  one.scope = batch.scope;
  if (!batch.tail_len.empty()) one.tail_len = {batch.tail_len[request]};
  if (!batch.kv_start.empty()) one.kv_start = {batch.kv_start[request]};
  if (!batch.causal.empty()) one.causal = {batch.causal[request]};
  if (!batch.spans.empty()) {
    const auto request_at = static_cast<std::ptrdiff_t>(request);
    const auto first = std::accumulate(batch.q_len.begin(), batch.q_len.begin() + request_at, std::ptrdiff_t{0});
    const auto spans = batch.spans.begin() + 2 * first;
    one.spans.assign(spans, spans + 2 * batch.q_len[request]);
  }
  for (const testing::OwnedSegment& segment : batch.segments) {
    one.segments.push_back(segment);
    one.segments.back().kv_len = {segment.kv_len[request]};
    if (!segment.first_pos.empty()) one.segments.back().first_pos = {segment.first_pos[request]};
  }
  return one;
}

TEST(Invariance, FoldOrder_AnyOtherRequests_IsTheSame) {
  std::mt19937 random(32);
  PlanStorage storage;
  int compared = 0;
  while (compared < (folio::testing::kInstrumented ? 100 : 2000)) {
    Case one = random_invariant_case(random);
    bool shared = false;
    for (const testing::OwnedSegment& segment : one.batch.segments) shared |= !segment.group_indptr.empty();
    if (shared) continue;
    const auto together = fold_orders(make_plan(one.config, one.batch.view(), storage));
    int32_t first_row = 0;
    for (size_t r = 0; r < one.batch.q_len.size(); ++r) {
      OwnedBatch single = alone(one.batch, r);
      for (const auto& [key, order] : fold_orders(make_plan(one.config, single.view(), storage))) {
        ASSERT_EQ(together.at({key.first, first_row + key.second}), order) << "request " << r;
      }
      first_row += one.batch.q_len[r] * (one.config.num_q_heads / one.config.num_kv_heads);
    }
    ++compared;
  }
}

std::string keys_in_order(std::string fold_order) {
  std::erase_if(fold_order, [](char c) { return c == '(' || c == ')'; });
  return fold_order;
}

TEST(Invariance, FixedSplits_AnyChunking_StandAtMultiples) {
  SchedulerConfig config;
  config.num_q_heads = config.num_kv_heads = 1;
  config.page_size = 4;
  config.tile = {.rows = 4, .kv_tokens = 4};
  config.determinism = Determinism::kScheduleInvariant;
  config.fixed_split_tokens = 16;
  config.num_workers = 3;
  PlanStorage storage;
  OwnedBatch chunk = testing::paged_batch({10}, {100});  // tokens 90 to 99 at once
  const auto chunked = fold_orders(make_plan(config, chunk.view(), storage));
  for (int32_t token = 90; token < 100; ++token) {  // and one after the other
    OwnedBatch decode = testing::paged_batch({1}, {token + 1});
    const std::string single = keys_in_order(fold_orders(make_plan(config, decode.view(), storage)).at({0, 0}));
    // The last work tile ends with the last token that any of its rows may see, so up to there the two are equal.
    const std::string shared = single.substr(0, single.rfind('-'));
    EXPECT_EQ(keys_in_order(chunked.at({0, token - 90})).substr(0, shared.size()), shared);
  }
}

}  // namespace
}  // namespace folio::inline v0::scheduler
