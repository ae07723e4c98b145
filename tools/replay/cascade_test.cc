#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "replay/report.hpp"
#include "replay/scene_test_util.hpp"

namespace folio::replay {
namespace {

using backends::CascadeMode;
using ::testing::HasSubstr;

/// Requests that arrive all at once, so that those who share pages run together; what they share is more than a KV tile
/// of any kernel, or sharing would save nothing.
Scene crowded_scene(CascadeMode mode) {
  Scene scene = small_scene(6, 4);
  scene.options.stack.num_q_heads = 8;  // four queries to a KV head
  scene.options.stack.head_dim_qk = scene.options.stack.head_dim_v = 64;
  scene.options.stack.determinism = Determinism::kRunToRun;
  scene.options.stack.cascade = mode;
  scene.options.scheduler.max_running = 6;
  scene.options.scheduler.token_budget = scene.options.stack.max_tokens = 512;
  scene.options.clock.step_ms = 1e9;
  scene.options.checks.rate = 0.01;
  return scene;
}

/// The same prompt nine times.
Scene scene_of_one_prompt(CascadeMode mode) {
  Scene scene = crowded_scene(mode);
  Request first = scene.workload.requests.front();
  first.input_length = 280;
  first.output_length = 4;
  scene.workload.requests.assign(9, first);
  scene.options.scheduler.max_running = 9;
  scene.options.stack.num_pages = scene.workload.pages_for_all(8);
  return scene;
}

TEST(ReplayCascade, AutoReadsLessAndIsRight) {
  const ReplayResult off = replay(crowded_scene(CascadeMode::kOff));
  const ReplayResult shared = replay(crowded_scene(CascadeMode::kAuto));  // checked against the oracle
  EXPECT_EQ(off.work.kv_bytes_read, off.work.kv_bytes_read_alone);
  EXPECT_EQ(off.work.plans_with_cascade, 0);
  EXPECT_GT(shared.work.plans_with_cascade, 0);
  EXPECT_LT(shared.work.kv_bytes_read, shared.work.kv_bytes_read_alone);
  // Without sharing the order of the requests does not matter.
  EXPECT_EQ(shared.work.kv_bytes_read_alone, off.work.kv_bytes_read);
  EXPECT_EQ(shared.scheduler.computed_tokens, off.scheduler.computed_tokens);
  EXPECT_THAT(summary_text(shared), HasSubstr("% less), shared prefixes in"));
  EXPECT_EQ(summary_json(shared).at("cascade").at("kv_bytes_read_without"), shared.work.kv_bytes_read_alone);
  EXPECT_EQ(summary_json(off).count("cascade"), 0u);
}

TEST(ReplayCascade, WindowsAndFp8Too) {
  Scene scene = scene_of_one_prompt(CascadeMode::kAuto);
  scene.options.stack.kv = DType::kFloat8E4M3;
  scene.options.stack.window_left = 200;
  scene.options.stack.full_every = 2;
  scene.options.stack.logits_soft_cap = 5.0f;
  EXPECT_GT(replay(scene).work.plans_with_cascade, 0);
}

TEST(ReplayCascade, TheHeuristicNeedsWhatAllHaveInCommon) {
  const ReplayResult result = replay(crowded_scene(CascadeMode::kHeuristic));
  EXPECT_EQ(result.work.plans_with_cascade, 0);  // the excerpt's requests do not all begin alike

  // 256 tokens and more in common, and all heads have keys of their own.
  Scene alike = scene_of_one_prompt(CascadeMode::kHeuristic);
  alike.options.stack.num_kv_heads = alike.options.stack.num_q_heads;
  const ReplayResult same = replay(alike);
  EXPECT_GT(same.work.plans_with_cascade, 0);
  EXPECT_LT(same.work.kv_bytes_read, same.work.kv_bytes_read_alone);
}

TEST(ReplayCascade, PlansAloneCountTheSame) {
  Scene scene = crowded_scene(CascadeMode::kAuto);
  const ReplayResult whole = replay(scene);
  scene.options.stack.plan_only = true;
  const ReplayResult planned = replay(scene);
  EXPECT_EQ(planned.work.kv_bytes_read, whole.work.kv_bytes_read);
  EXPECT_EQ(planned.work.kv_bytes_read_alone, whole.work.kv_bytes_read_alone);
  EXPECT_EQ(planned.work.flops, whole.work.flops);
  EXPECT_EQ(planned.pool_bytes, 0u);
  EXPECT_EQ(planned.checks.rows, 0);
  EXPECT_THAT(summary_text(planned), HasSubstr("no attention was computed"));
}

TEST(ReplayCascade, InvariantLevelsKeepTheirBits) {
  Scene scene = small_scene(6);
  const uint64_t digest = replay(scene).digest;
  scene.options.stack.cascade = CascadeMode::kAuto;
  const ReplayResult result = replay(scene);
  EXPECT_EQ(result.digest, digest);
  EXPECT_EQ(result.work.plans_with_cascade, 0);
  EXPECT_THAT(summary_text(result), HasSubstr("nothing is shared with --determinism schedule-invariant"));
}

class BackendCascade : public ::testing::TestWithParam<ServingBackend> {
 protected:
  static ReplayResult served(Scene scene) {
    scene.options.stack.backend = GetParam();
    return replay(scene);  // checked against the oracle
  }
  /// That the core and the backend plan the same reads.
  static void expect_same_work(const ReplayResult& result, const ReplayResult& core) {
    EXPECT_EQ(result.work.kv_bytes_read, core.work.kv_bytes_read);
    EXPECT_EQ(result.work.kv_bytes_read_alone, core.work.kv_bytes_read_alone);
    EXPECT_EQ(result.work.plans, core.work.plans);
    EXPECT_EQ(result.work.plans_with_cascade, core.work.plans_with_cascade);
    EXPECT_EQ(result.work.flops, core.work.flops);
  }
};

TEST_P(BackendCascade, SavesWhatTheCoreSaves) {
  const ReplayResult core = replay(crowded_scene(CascadeMode::kAuto));
  const ReplayResult result = served(crowded_scene(CascadeMode::kAuto));
  expect_same_work(result, core);
  EXPECT_LT(result.work.kv_bytes_read, result.work.kv_bytes_read_alone);
  EXPECT_EQ(result.digest, core.digest);
  EXPECT_THAT(summary_text(result), HasSubstr("% less), shared prefixes in"));
  EXPECT_EQ(summary_json(result).at("cascade"), summary_json(core).at("cascade"));

  Scene alike = scene_of_one_prompt(CascadeMode::kHeuristic);
  alike.options.stack.num_kv_heads = alike.options.stack.num_q_heads;
  const ReplayResult same = served(alike);
  EXPECT_GT(same.work.plans_with_cascade, 0);
  expect_same_work(same, replay(alike));

  const ReplayResult off = served(crowded_scene(CascadeMode::kOff));
  EXPECT_EQ(off.work.plans_with_cascade, 0);
  EXPECT_EQ(off.work.kv_bytes_read, off.work.kv_bytes_read_alone);
}

TEST_P(BackendCascade, WindowsAndFp8Too) {
  for (const KvLayout layout : {KvLayout::kStridedNhd, KvLayout::kStridedHnd}) {
    Scene scene = scene_of_one_prompt(CascadeMode::kAuto);
    scene.options.stack.layout = layout;
    scene.options.stack.kv = DType::kFloat8E4M3;
    scene.options.stack.window_left = 200;
    scene.options.stack.full_every = 2;
    scene.options.stack.logits_soft_cap = 5.0f;
    EXPECT_GT(served(scene).work.plans_with_cascade, 0);
  }
}

TEST_P(BackendCascade, PlansAloneCountTheSame) {
  Scene scene = crowded_scene(CascadeMode::kAuto);
  const ReplayResult whole = served(scene);
  scene.options.stack.plan_only = true;
  const ReplayResult planned = served(scene);
  expect_same_work(planned, whole);
  EXPECT_EQ(planned.pool_bytes, 0u);
  EXPECT_EQ(planned.work.kv_bytes_written, 0);
  EXPECT_EQ(planned.checks.rows, 0);

  Scene divided = crowded_scene(CascadeMode::kOff);
  divided.options.stack.ranks = 2;
  divided.options.scheduler.page_size = divided.options.stack.tokens_per_page_id();
  const ReplayResult both = served(divided);
  divided.options.stack.plan_only = true;
  expect_same_work(served(divided), both);
}

TEST_P(BackendCascade, InvariantLevelsKeepTheirBits) {
  Scene scene = small_scene(6);
  scene.options.stack.head_dim_v = scene.options.stack.head_dim_qk;
  const uint64_t digest = replay(scene).digest;
  scene.options.stack.cascade = CascadeMode::kAuto;
  const ReplayResult result = served(scene);
  EXPECT_EQ(result.digest, digest);
  EXPECT_EQ(result.work.plans_with_cascade, 0);
}

TEST_P(BackendCascade, IsRefusedOverRanks) {
  Scene scene = crowded_scene(CascadeMode::kAuto);
  scene.options.stack.ranks = 2;
  try {
    served(scene);
    ADD_FAILURE() << "did not throw";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_THAT(error.what(), HasSubstr("--cascade auto is for --ranks 1, and --ranks 2 for --cascade off"));
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, BackendCascade,
                         ::testing::Values(ServingBackend::kFlashInfer, ServingBackend::kFlashAttention),
                         [](const auto& backend) { return std::string(to_string(backend.param)); });

}  // namespace
}  // namespace folio::replay
