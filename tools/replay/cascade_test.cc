#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "replay/report.hpp"
#include "replay/scene_for_test.hpp"

namespace folio::replay {
namespace {

using backends::CascadeMode;
using ::testing::HasSubstr;

/// Requests that arrive all at once, so that those who share pages run together.
Scene crowded_scene(CascadeMode mode) {
  Scene scene = small_scene(6, 16);
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

TEST(ReplayCascade, BackendsRefuseIt) {
  Scene scene = crowded_scene(CascadeMode::kAuto);
  scene.options.stack.backend = ServingBackend::kFlashInfer;
  try {
    run_replay(context(), scene.workload, scene.options, kNeverStop, [](const ReplayProgress&) {});
    ADD_FAILURE() << "did not throw";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_THAT(error.what(), HasSubstr("--cascade auto is for --backend none"));
  }
}

}  // namespace
}  // namespace folio::replay
