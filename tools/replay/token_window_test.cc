#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "replay/report.hpp"
#include "replay/scene_test_util.hpp"
#include "replay/token_keeper.hpp"

namespace folio::replay {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Two layers, of which the first has the window, the second only with `all_layers`.
Scene windowed_scene(ServingBackend backend, int32_t page_size, bool all_layers = false) {
  Scene scene = small_scene();
  StackConfig& stack = scene.options.stack;
  stack.backend = backend;
  stack.head_dim_v = stack.head_dim_qk;
  stack.page_size = scene.options.scheduler.page_size = page_size;
  stack.num_pages = scene.workload.pages_for_all(page_size);
  stack.window_left = 9;
  stack.full_every = all_layers ? 0 : 2;
  stack.max_tokens = scene.options.scheduler.token_budget = 24;
  for (Request& request : scene.workload.requests) request.output_length += 20;
  return scene;
}

/// The smallest pool of windowed layers that the keeper takes.
int64_t least_window_pages(const Scene& scene) {
  const StackConfig& stack = scene.options.stack;
  const int32_t drafts = scene.options.scheduler.drafts.tokens;
  return (2 * (stack.window_left + scene.options.scheduler.token_budget) + drafts) / stack.page_size + 4;
}

class WindowedReplay : public ::testing::TestWithParam<int32_t> {};

/// What has left the window is given up and handed to others while requests run: outputs do not change.
TEST_P(WindowedReplay, GivesTheBitsOfTheOtherBackends) {
  for (const bool all_layers : {false, true}) {
    Scene scene = windowed_scene(ServingBackend::kTokenPool, GetParam(), all_layers);
    scene.options.checks.rate = 0.1;
    const ReplayResult served = replay(scene);
    EXPECT_GT(served.scheduler.hit_tokens, 0);
    EXPECT_GT(served.window.left, 0);
    EXPECT_LT(served.window.held, served.peak_pages_held);
    for (const auto other : {ServingBackend::kNone, ServingBackend::kFlashInfer, ServingBackend::kFlashAttention})
      EXPECT_EQ(replay(windowed_scene(other, 8, all_layers)).digest, served.digest) << to_string(other);

    scene.options.stack.window_pages = least_window_pages(scene);
    scene.options.clock.step_ms = 1e9;  // all at once
    const ReplayResult cramped = replay(scene);
    EXPECT_GT(cramped.window.evicted, 0);
    EXPECT_GT(cramped.scheduler.preemptions, 0);
    EXPECT_EQ(cramped.digest, served.digest);

    scene.options.prefix_reuse = false;
    const ReplayResult anew = replay(scene);
    EXPECT_EQ(anew.scheduler.hit_tokens, 0);
    EXPECT_EQ(anew.window.evicted, 0);
    EXPECT_GT(anew.window.left, served.window.left);
    EXPECT_EQ(anew.digest, served.digest);
  }
}

TEST_P(WindowedReplay, ServesDrafts) {
  const uint64_t decoded = replay(windowed_scene(ServingBackend::kTokenPool, GetParam())).digest;
  Scene drafting = windowed_scene(ServingBackend::kTokenPool, GetParam());
  drafting.options.scheduler.drafts = {4, 1, 1};
  drafting.options.stack.num_pages += 4;
  const ReplayResult drafted = replay(drafting);
  EXPECT_GT(drafted.scheduler.accepted_drafts, 0);
  EXPECT_GT(drafted.window.left, 0);
  EXPECT_EQ(drafted.digest, decoded);
  drafting.options.stack.window_pages = least_window_pages(drafting);
  drafting.options.clock.step_ms = 1e9;
  EXPECT_EQ(replay(drafting).digest, decoded);
}

INSTANTIATE_TEST_SUITE_P(PageSizes, WindowedReplay, ::testing::Values(1, 3, 8),
                         [](const auto& size) { return "pages_of_" + std::to_string(size.param); });

TEST(WindowedReplayTrees, AgreeWithTheOracle) {
  Scene drafting = windowed_scene(ServingBackend::kTokenPool, 1);
  drafting.options.scheduler.drafts = {7, 2, 1};
  drafting.options.stack.draft_topk = 2;
  drafting.options.stack.determinism = Determinism::kRunToRun;
  drafting.options.stack.num_pages += 7;
  drafting.options.stack.window_pages = least_window_pages(drafting);
  drafting.options.checks.rate = 1.0;
  const ReplayResult drafted = replay(drafting);
  EXPECT_GT(drafted.scheduler.accepted_drafts, 0);
  EXPECT_GT(drafted.checks.rows, 1000);
}

TEST(WindowedReplayReport, SaysWhatBothPoolsHeld) {
  const ReplayResult served = replay(windowed_scene(ServingBackend::kTokenPool, 8));
  EXPECT_THAT(summary_text(served), HasSubstr("given up before their request ended"));
  const auto json = summary_json(served)["window_pages"];
  EXPECT_EQ(json["total"], served.pages);
  EXPECT_EQ(json["peak_held"], served.window.held);
  EXPECT_EQ(json["tokens_given_up"], served.window.left);
}

TEST(WindowedReplayRefusals, SayWhatIsOffered) {
  const auto refusal = [](const Scene& scene) -> std::string {
    try {
      run_replay(context(), scene.workload, scene.options, kNeverStop, [](const ReplayProgress&) {});
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  };
  Scene small = windowed_scene(ServingBackend::kTokenPool, 8);
  small.options.stack.window_pages = 3;
  EXPECT_THAT(refusal(small), HasSubstr("need 12: enlarge it (--window-pages) or lower --token-budget"));
  Scene elsewhere = windowed_scene(ServingBackend::kFlashInfer, 8);
  elsewhere.options.stack.window_pages = 30;
  EXPECT_THAT(refusal(elsewhere), HasSubstr("--window-pages is for --backend token_pool"));
  Scene full = windowed_scene(ServingBackend::kTokenPool, 8);
  full.options.stack.window_left = -1;
  full.options.stack.window_pages = 30;
  EXPECT_THAT(refusal(full), HasSubstr("--window-pages is for --backend token_pool and models with a sliding window"));
}

TokenKeeperOptions windowed_options() {
  TokenKeeperOptions options;
  options.num_pages = 40;
  options.page_size = 2;
  options.max_running = 2;
  options.window_left = 3;
  options.num_window_pages = 20;
  options.token_budget = 9;
  return options;
}

/// A prompt of 9 tokens in steps of 5 and 4, then tokens one by one.
TEST(WindowedTokenKeeper, GivesUpWhatNoWindowReaches) {
  Workload workload;
  workload.requests.assign(2, Request{0.0, 9, 12, 1, {}});
  TokenKeeper keeper(workload, windowed_options());
  const std::vector<uint64_t> chain = token_chain(workload, 0);
  const auto first = [&](int32_t tokens) { return std::span(chain).first(static_cast<size_t>(tokens)); };
  EXPECT_EQ(keeper.begin(0, first(8)), 0);
  for (const int32_t computed : {5, 9}) {
    ASSERT_TRUE(keeper.reserve(0, computed));
    keeper.publish(0, first(computed));
    keeper.computed(0, first(computed));
  }
  // The tree has 8 tokens, of which the last 3 are in the window and locked: the node of 4 that they lie in.
  EXPECT_EQ(keeper.window_use().left, 0);
  EXPECT_EQ(keeper.held(), 5);
  EXPECT_EQ(keeper.window_use().held, 3);
  for (int32_t computed = 10; computed <= 16; ++computed) {
    ASSERT_TRUE(keeper.reserve(0, computed));
    keeper.publish(0, first(computed));
    keeper.computed(0, first(computed));
  }
  // The next query, at 16, sees 13 to 15: of the request's own tokens, 8 to 11 are out of reach.
  EXPECT_EQ(keeper.window_use().left, 4);
  EXPECT_EQ(keeper.held(), 8);
  EXPECT_EQ(keeper.window_use().held, 4);
  std::vector<int32_t> window(16);
  keeper.to_window(keeper.rows().row(keeper.row_of(0)).first(16), window);
  EXPECT_THAT(std::span(window).subspan(8, 4), ElementsAre(0, 1, 0, 1));
  EXPECT_THAT(std::span(window).subspan(12), Each(::testing::Gt(1)));
  const PageTableView rows = keeper.window_rows();
  for (size_t i = 12; i < 16; ++i)
    EXPECT_EQ(rows.indices[keeper.row_of(0) * rows.row_stride + static_cast<int64_t>(i)], window[i]);
  keeper.release(0, first(16));
  EXPECT_EQ(keeper.held(), 0);
  EXPECT_EQ(keeper.window_use().held, 0);
  EXPECT_EQ(keeper.cached(), 8);
  // What has lost its window copies is found where the last tokens before its end have theirs.
  EXPECT_EQ(keeper.begin(1, first(16)), 16);
  keeper.release(1, first(16));
  EXPECT_EQ(keeper.begin(1, first(12)), 8);
  keeper.release(1, first(8));
  keeper.drop_cache();
  EXPECT_EQ(keeper.cached(), 0);
}

/// Two requests compute the same prompt in one step: nothing is shown before it is computed, one copy stays.
TEST(WindowedTokenKeeper, ShowsWhatIsComputed) {
  Workload workload;
  workload.tokens_per_hash = 4;
  workload.requests.assign(2, Request{0.0, 9, 9, 1, {1, 2, 3}});
  TokenKeeper keeper(workload, windowed_options());
  const std::vector<uint64_t> chain = token_chain(workload, 0);
  for (const int32_t request : {0, 1}) {
    EXPECT_EQ(keeper.begin(request, std::span(chain).first(8)), 0);
    ASSERT_TRUE(keeper.reserve(request, 9));
    keeper.publish(request, std::span(chain).first(9));
    EXPECT_EQ(keeper.stored_from(request), 0);
  }
  EXPECT_EQ(keeper.held(), 10);
  for (const int32_t request : {0, 1}) keeper.computed(request, std::span(chain).first(9));
  EXPECT_EQ(keeper.held(), 6);
  EXPECT_THAT(keeper.pages_of(1).first(4), ::testing::ElementsAreArray(keeper.pages_of(0).first(4)));
  for (const int32_t request : {0, 1}) keeper.release(request, std::span(chain).first(9));
  EXPECT_EQ(keeper.held(), 0);
  EXPECT_EQ(keeper.window_use().held, 0);
}

}  // namespace
}  // namespace folio::replay
