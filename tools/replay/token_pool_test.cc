#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "replay/report.hpp"
#include "replay/scene_test_util.hpp"
#include "replay/token_keeper.hpp"

namespace folio::replay {
namespace {

using ::testing::HasSubstr;

/// Sanitizers look for other mistakes than wrong sums: one size is enough for them.
std::vector<int32_t> page_sizes() {
  if (kInstrumented) return {3};
  return {1, 3, 8};
}

Scene scene_of(ServingBackend backend, int32_t page_size, int64_t requests = 11) {
  Scene scene = small_scene(requests);
  StackConfig& stack = scene.options.stack;
  stack.backend = backend;
  stack.head_dim_v = stack.head_dim_qk;  // the other backends have one size
  stack.page_size = scene.options.scheduler.page_size = page_size;
  stack.num_pages = scene.workload.pages_for_all(page_size);
  return scene;
}

class TokenPoolReplay : public ::testing::TestWithParam<int32_t> {
 protected:
  static Scene scene(int64_t requests = 11) { return scene_of(ServingBackend::kTokenPool, GetParam(), requests); }
};

TEST_P(TokenPoolReplay, GivesTheBitsOfTheOtherBackendsWhateverTheSchedule) {
  const ReplayResult served = replay(scene());
  EXPECT_EQ(served.backend, ServingBackend::kTokenPool);
  EXPECT_EQ(served.progress.finished, 11);
  EXPECT_GT(served.work.flops, 0.0);
  EXPECT_GT(served.work.kv_bytes_read, 0);
  const uint64_t digest = served.digest;
  for (const auto other : {ServingBackend::kNone, ServingBackend::kFlashInfer, ServingBackend::kFlashAttention})
    EXPECT_EQ(replay(scene_of(other, 8)).digest, digest) << to_string(other);

  Scene chunked = scene();
  chunked.options.scheduler.token_budget = 17;
  EXPECT_EQ(replay(chunked).digest, digest);

  Scene anew = scene();
  anew.options.prefix_reuse = false;
  const ReplayResult without_reuse = replay(anew);
  EXPECT_EQ(without_reuse.scheduler.hit_tokens, 0);
  EXPECT_EQ(without_reuse.digest, digest);

  Scene cramped = scene();
  cramped.options.clock.step_ms = 1e9;  // all at once
  cramped.options.stack.num_pages = (cramped.workload.longest() + 16 + GetParam() - 1) / GetParam();
  const ReplayResult preempted = replay(cramped);
  EXPECT_GT(preempted.scheduler.preemptions, 0);
  EXPECT_GT(preempted.evictions, 0);
  EXPECT_EQ(preempted.digest, digest);

  cramped.options.prefix_reuse = false;
  const ReplayResult recomputed = replay(cramped);
  EXPECT_GT(recomputed.checks.recomputed_rows, 0);
  EXPECT_EQ(recomputed.digest, digest);
}

/// One after the other, in a few at a time, and all at once: requests that are computed in the same step share too.
TEST_P(TokenPoolReplay, FindsWhatThePageManagerFinds) {
  for (const double step_ms : {1e-3, 100.0, 1e9}) {
    Scene own = scene();
    own.options.clock.step_ms = step_ms;
    Scene core = scene_of(ServingBackend::kNone, GetParam());
    core.options.clock.step_ms = step_ms;
    const ReplayResult pages = replay(core);
    EXPECT_GT(pages.scheduler.hit_tokens, 0);
    EXPECT_EQ(replay(own).scheduler.hit_tokens, pages.scheduler.hit_tokens) << step_ms;
  }
}

TEST_P(TokenPoolReplay, AgreesWithTheOracle) {
  for (const DType kv : {DType::kBFloat16, DType::kFloat8E4M3}) {
    for (const KvLayout layout : {KvLayout::kStridedNhd, KvLayout::kStridedHnd, KvLayout::kRecommended}) {
      for (const Determinism determinism : {Determinism::kRunToRun, Determinism::kBatchInvariant}) {
        Scene varied = scene(4);
        StackConfig& stack = varied.options.stack;
        stack.kv = kv;
        stack.layout = layout;
        stack.head_dim_v = 24;
        stack.window_left = 9;
        stack.full_every = 2;
        stack.logits_soft_cap = 5.0f;
        stack.determinism = determinism;
        varied.options.checks.rate = 0.2;
        EXPECT_GT(replay(varied).checks.rows, 100);
      }
    }
  }
}

TEST_P(TokenPoolReplay, LeavesNothingBehindWhenInterrupted) {
  const Scene interrupted = scene();
  std::atomic<bool> stop{false};
  const ReplayResult result = run_replay(context(), interrupted.workload, interrupted.options, stop,
                                         [&](const ReplayProgress& progress) { stop = progress.steps == 3; });
  EXPECT_TRUE(result.interrupted);
  EXPECT_EQ(result.leaked_pages, 0);
}

INSTANTIATE_TEST_SUITE_P(PageSizes, TokenPoolReplay, ::testing::ValuesIn(page_sizes()),
                         [](const auto& size) { return "pages_of_" + std::to_string(size.param); });

/// The whole excerpt, with a pool that keeps a fraction of it.
TEST(TokenPoolReplayHits, TheExcerptIsFoundAsThePageManagerFindsItAndGivesTheSameBits) {
  const auto result_of = [](ServingBackend backend, int64_t pages) {
    Scene scene = small_scene(0, 128);
    StackConfig& stack = scene.options.stack;
    stack.backend = backend;
    stack.num_layers = stack.num_kv_heads = 1;
    stack.num_q_heads = 2;
    stack.head_dim_v = stack.head_dim_qk;
    stack.page_size = scene.options.scheduler.page_size = 4;
    stack.num_pages = pages > 0 ? pages : scene.workload.pages_for_all(4);
    stack.max_tokens = scene.options.scheduler.token_budget = 512;
    return replay(scene);
  };
  for (const int64_t pages : {0, 600}) {
    if (kInstrumented && pages == 0) continue;
    const ReplayResult core = result_of(ServingBackend::kNone, pages);
    const ReplayResult pool = result_of(ServingBackend::kTokenPool, pages);
    EXPECT_EQ(pool.progress.finished, 300);
    EXPECT_GE(pool.scheduler.hit_tokens, core.scheduler.hit_tokens);
    EXPECT_EQ(pool.digest, core.digest);
    EXPECT_EQ(pages > 0, pool.evictions > 0);
    EXPECT_EQ(result_of(ServingBackend::kFlashInfer, pages).digest, pool.digest);
  }
}

TEST(TokenPoolReplayHits, SmallPagesFindMoreThanLargeOnes) {
  EXPECT_GT(replay(scene_of(ServingBackend::kTokenPool, 1)).scheduler.hit_tokens,
            replay(scene_of(ServingBackend::kNone, 16)).scheduler.hit_tokens);
}

Scene drafting_scene(int32_t page_size, int32_t tokens, int32_t topk) {
  Scene scene = scene_of(ServingBackend::kTokenPool, page_size);
  for (Request& request : scene.workload.requests) request.output_length += 12;
  scene.options.scheduler.drafts = {tokens, topk, 1};
  scene.options.stack.draft_topk = topk;
  scene.options.stack.num_pages = scene.workload.pages_for_all(page_size) + tokens;
  scene.options.checks.rate = 0.2;
  return scene;
}

/// Rows of accepted tokens have the bits that they have without drafts, also where drafts are cut off by preemptions.
TEST(TokenPoolReplayDrafts, ChainsGiveTheBitsOfPlainDecoding) {
  for (const int32_t page_size : page_sizes()) {
    Scene plain = drafting_scene(page_size, 4, 1);
    plain.options.scheduler.drafts = {};
    const ReplayResult decoded = replay(plain);
    for (const int32_t tokens : {2, 4, 7}) {
      if (kInstrumented && tokens != 4) continue;
      Scene drafting = drafting_scene(page_size, tokens, 1);
      const ReplayResult drafted = replay(drafting);
      EXPECT_EQ(drafted.digest, decoded.digest) << page_size << " " << tokens;
      EXPECT_GT(drafted.scheduler.accepted_drafts, 0);
      EXPECT_EQ(drafted.scheduler.computed_tokens, decoded.scheduler.computed_tokens);
      EXPECT_LT(drafted.progress.steps, decoded.progress.steps);
      drafting.options.clock.step_ms = 1e9;
      drafting.options.stack.num_pages = (drafting.workload.longest() + tokens + page_size - 1) / page_size + 2;
      const ReplayResult preempted = replay(drafting);
      EXPECT_GT(preempted.scheduler.preemptions, 0);
      EXPECT_EQ(preempted.digest, decoded.digest);
    }
  }
}

TEST(TokenPoolReplayDrafts, TreesAgreeWithTheOracle) {
  for (const int32_t topk : {2, 3}) {
    for (const int32_t window_left : {-1, 9}) {
      if (kInstrumented && (topk == 3) == (window_left < 0)) continue;
      Scene drafting = drafting_scene(1, 11, topk);
      drafting.options.stack.determinism = Determinism::kRunToRun;
      drafting.options.stack.window_left = window_left;
      drafting.options.checks.rate = 1.0;
      const ReplayResult drafted = replay(drafting);
      EXPECT_GT(drafted.scheduler.accepted_drafts, drafted.scheduler.verified_trees / 3);
      EXPECT_EQ(drafted.checks.digested_rows, drafting.workload.output_tokens() * 2);
      EXPECT_THAT(summary_text(drafted), HasSubstr("tokens a step and request"));
    }
  }
}

TEST(TokenPoolReplayRefusals, SayWhatIsOffered) {
  const auto refusal = [](const Scene& scene) -> std::string {
    try {
      run_replay(context(), scene.workload, scene.options, kNeverStop, [](const ReplayProgress&) {});
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
      return error.what();
    }
    return {};
  };
  Scene divided = scene_of(ServingBackend::kTokenPool, 8, 3);
  divided.options.stack.ranks = 2;
  EXPECT_THAT(refusal(divided), HasSubstr("--ranks is for --backend flashinfer and flash_attn"));
  Scene cascaded = scene_of(ServingBackend::kTokenPool, 8, 3);
  cascaded.options.stack.cascade = backends::CascadeMode::kAuto;
  EXPECT_THAT(refusal(cascaded), HasSubstr("--cascade auto is for the others"));
  Scene planned = scene_of(ServingBackend::kTokenPool, 8, 3);
  planned.options.stack.plan_only = true;
  EXPECT_THAT(refusal(planned), HasSubstr("--plan-only is for the others"));
  Scene elsewhere = scene_of(ServingBackend::kFlashInfer, 8, 3);
  elsewhere.options.scheduler.drafts.tokens = 4;
  EXPECT_THAT(refusal(elsewhere), HasSubstr("are for --backend token_pool"));
  Scene paged = drafting_scene(8, 4, 2);
  EXPECT_THAT(refusal(paged), HasSubstr("--draft-topk above 1 is for --page-size 1"));
}

/// What one request shows while its step is made, another takes over; what it had computed of it is not stored twice.
TEST(TokenKeeper, WhatAnotherShowedFirstReplacesARequestsOwnSlots) {
  Workload workload;
  workload.tokens_per_hash = 4;
  workload.requests.assign(2, Request{0.0, 9, 1, 1, {1, 2, 3}});
  TokenKeeper keeper(workload, {.num_pages = 12, .page_size = 2, .max_running = 2, .draft_tokens = 0, .reuse = true});
  const std::vector<uint64_t> chain = token_chain(workload, 0);
  const auto first = [&](size_t tokens) { return std::span(chain).first(tokens); };
  EXPECT_EQ(keeper.begin(0, first(8)), 0);
  ASSERT_TRUE(keeper.reserve(0, 5));
  EXPECT_EQ(keeper.begin(1, first(8)), 0);
  ASSERT_TRUE(keeper.reserve(1, 5));
  keeper.publish(0, first(5));
  EXPECT_EQ(keeper.stored_from(0), 0);
  EXPECT_EQ(keeper.held(), 6);
  keeper.publish(1, first(5));
  EXPECT_EQ(keeper.stored_from(1), 4);  // two whole pages; the fifth token is its own
  EXPECT_EQ(keeper.held(), 4);
  EXPECT_THAT(keeper.pages_of(1).first(2), ::testing::ElementsAreArray(keeper.pages_of(0).first(2)));
  EXPECT_NE(keeper.pages_of(1)[2], keeper.pages_of(0)[2]);
  const auto row = keeper.rows().row(keeper.row_of(1));
  EXPECT_EQ(row[3], keeper.pages_of(0)[1] * 2 + 1);
  keeper.release(0, first(5));
  keeper.release(1, first(5));
  EXPECT_EQ(keeper.held(), 0);
  EXPECT_EQ(keeper.cached(), 2);
  EXPECT_EQ(keeper.held_rows(), 0);
  keeper.drop_cache();
  EXPECT_EQ(keeper.cached(), 0);
}

/// All or nothing: nothing is evicted for what would not fit all the same.
TEST(TokenKeeper, RefusesWithoutEvicting) {
  Workload workload;
  workload.requests.assign(2, Request{0.0, 9, 1, 1, {}});
  TokenKeeper keeper(workload, {.num_pages = 9, .page_size = 1, .max_running = 2, .draft_tokens = 0, .reuse = true});
  const std::vector<uint64_t> chain = token_chain(workload, 0);
  keeper.begin(0, std::span(chain).first(8));
  ASSERT_TRUE(keeper.reserve(0, 5));
  keeper.publish(0, std::span(chain).first(5));
  keeper.release(0, std::span(chain).first(5));
  const std::vector<uint64_t> other = token_chain(workload, 1);
  keeper.begin(1, std::span(other).first(8));
  EXPECT_FALSE(keeper.reserve(1, 10));
  EXPECT_EQ(keeper.cached(), 5);
  EXPECT_EQ(keeper.evictions(), 0);
  EXPECT_TRUE(keeper.reserve(1, 7));
  EXPECT_EQ(keeper.evictions(), 3);  // no more than is needed
}

}  // namespace
}  // namespace folio::replay
