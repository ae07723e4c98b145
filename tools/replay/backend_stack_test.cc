#include "replay/backend_stack.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "replay/scene_for_test.hpp"

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
}

INSTANTIATE_TEST_SUITE_P(Backends, BackendReplay, ::testing::Values(ServingBackend::kFlashInfer),
                         [](const auto& backend) { return std::string(to_string(backend.param)); });

}  // namespace
}  // namespace folio::replay
