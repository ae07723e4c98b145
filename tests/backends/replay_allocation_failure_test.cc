// A short replay with every allocation failing once: an error and no leak, and the next replay gives what it always
// does.
#include <gtest/gtest.h>

#include <string>

#include "core/allocation_failure_test_util.hpp"
#include "replay/scene_test_util.hpp"

namespace folio::replay {
namespace {

/// Two requests, of which the second finds a prefix of the first: a prefill, its chunks and some decodes.
Scene short_scene(ServingBackend backend) {
  Scene scene = small_scene(2, 512);
  scene.options.stack.backend = backend;
  scene.options.stack.num_layers = 1;
  scene.options.stack.head_dim_v = scene.options.stack.head_dim_qk;
  scene.options.checks.rate = 0.0;
  return scene;
}

class ReplayAllocationFailure : public ::testing::TestWithParam<ServingBackend> {};

TEST_P(ReplayAllocationFailure, IsAnErrorAndNoLeak) {
  const Scene scene = short_scene(GetParam());
  const uint64_t expected = replay(scene).digest;
  folio::testing::sweep_failing_allocations(
      [&] { run_replay(context(), scene.workload, scene.options, kNeverStop, [](const ReplayProgress&) {}); }, [] {});
  EXPECT_EQ(replay(scene).digest, expected) << "a replay after those that failed";
}

INSTANTIATE_TEST_SUITE_P(Backends, ReplayAllocationFailure,
                         ::testing::Values(ServingBackend::kNone, ServingBackend::kFlashInfer,
                                           ServingBackend::kFlashAttention, ServingBackend::kTokenPool),
                         [](const auto& instance) { return std::string(to_string(instance.param)); });

}  // namespace
}  // namespace folio::replay
