#include "replay/backend_stack.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "folio/distributed.hpp"
#include "replay/gpu.hpp"
#include "replay/scene_test_util.hpp"

namespace folio::replay {
namespace {

using ::testing::HasSubstr;

class BackendReplay : public ::testing::TestWithParam<ServingBackend> {
 protected:
  /// Backends have one head size for keys and values.
  static Scene scene(int64_t requests = 11) {
    Scene scene = small_scene(requests);
    scene.options.stack.backend = GetParam();
    scene.options.stack.head_dim_v = scene.options.stack.head_dim_qk;
    return scene;
  }
};

/// The backend adds nothing of its own to the arithmetic: Folio's own calls give the same bits over the same cache
/// layout, and so does every other schedule of the same tokens.
TEST_P(BackendReplay, GivesTheBitsOfTheCoreWhateverTheSchedule) {
  Scene core = scene();
  core.options.stack.backend = ServingBackend::kNone;
  const uint64_t digest = replay(core).digest;
  const ReplayResult served = replay(scene());
  EXPECT_EQ(served.digest, digest);
  EXPECT_EQ(served.backend, GetParam());
  EXPECT_GT(served.work.kv_bytes_read, 0);

  Scene chunked = scene();
  chunked.options.scheduler.token_budget = 17;
  EXPECT_EQ(replay(chunked).digest, digest);

  Scene cramped = scene();
  cramped.options.clock.step_ms = 1e9;  // all at once
  cramped.options.stack.num_pages = (cramped.workload.longest() + 7) / 8 + 2;
  const ReplayResult preempted = replay(cramped);
  EXPECT_GT(preempted.scheduler.preemptions, 0);
  EXPECT_EQ(preempted.digest, digest);
}

TEST_P(BackendReplay, AgreesWithTheOracle) {
  for (const DType kv : {DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    for (const KvLayout layout : {KvLayout::kStridedNhd, KvLayout::kStridedHnd}) {
      Scene varied = scene(4);
      StackConfig& stack = varied.options.stack;
      stack.kv = kv;
      stack.layout = layout;
      stack.window_left = 9;
      stack.full_every = 2;
      stack.logits_soft_cap = 5.0f;
      stack.determinism = Determinism::kBatchInvariant;
      varied.options.checks.rate = 0.2;
      EXPECT_GT(replay(varied).checks.rows, 100);
    }
  }
}

/// Ranks that divide the KV token by token, two of them with several tokens each.
TEST_P(BackendReplay, DividedOverRanksAgreesWithTheOracleAndWithItself) {
  for (const char* combine : {"ag_rs", "a2a"}) {
    uint64_t digest = 0;
    for (const int32_t budget : {96, 17}) {
      Scene divided = scene();
      StackConfig& stack = divided.options.stack;
      stack.num_q_heads = 8;
      stack.page_size = 4;
      stack.ranks = 2;
      stack.dcp_interleave = 4;
      stack.dcp_comm_backend = combine;
      stack.window_left = 30;
      stack.full_every = 2;
      divided.options.scheduler.page_size = stack.tokens_per_page_id();
      divided.options.scheduler.token_budget = budget;
      divided.options.checks.rate = 0.2;
      const ReplayResult result = replay(divided);
      EXPECT_GT(result.checks.rows, 100);
      EXPECT_GT(result.scheduler.hit_tokens, 0);
      if (digest != 0) {
        EXPECT_EQ(result.digest, digest);
      }
      digest = result.digest;
    }
  }
}

TEST_P(BackendReplay, RefusesWhatBackendsDoNotTake) {
  const auto refusal = [](const Scene& scene) -> std::string {
    try {
      run_replay(context(), scene.workload, scene.options, kNeverStop, [](const ReplayProgress&) {});
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
      return error.what();
    }
    return {};
  };
  Scene packed = scene(3);
  packed.options.stack.layout = KvLayout::kCpuPacked;
  EXPECT_THAT(refusal(packed), HasSubstr("--backend none"));
  Scene two_sizes = scene(3);
  two_sizes.options.stack.head_dim_v = 24;
  EXPECT_THAT(refusal(two_sizes), HasSubstr("one head size"));
  Scene rounded = scene(3);
  rounded.options.stack.num_q_heads = 8;
  rounded.options.stack.ranks = 2;
  rounded.options.stack.kv = DType::kFloat8E4M3;
  rounded.options.stack.determinism = Determinism::kRunToRun;
  EXPECT_THAT(refusal(rounded), HasSubstr("schedule-invariant"));
  Scene undivided = scene(3);
  undivided.options.stack.ranks = 2;
  undivided.options.stack.backend = ServingBackend::kNone;
  EXPECT_THAT(refusal(undivided), HasSubstr("--backend"));
  if (!gpu::is_gpu(context())) return;
  const auto processes = distributed::make_thread_groups(2);
  Scene over_processes = scene(3);
  over_processes.options.stack.num_q_heads = 8;
  over_processes.options.stack.ranks = 2;
  over_processes.options.processes = processes.front().get();
  EXPECT_THAT(refusal(over_processes), HasSubstr("with --device cuda the ranks are threads of one process"));
}

INSTANTIATE_TEST_SUITE_P(Backends, BackendReplay,
                         ::testing::Values(ServingBackend::kFlashInfer, ServingBackend::kFlashAttention),
                         [](const auto& backend) { return std::string(to_string(backend.param)); });

}  // namespace
}  // namespace folio::replay
