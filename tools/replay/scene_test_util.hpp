#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <string_view>

#include "replay/replay.hpp"

/// A small replay for tests: the first requests of the shipped excerpt on a toy model.
namespace folio::replay {

/// Whether this program is instrumented by AddressSanitizer or ThreadSanitizer.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kInstrumented = true;
#else
inline constexpr bool kInstrumented = false;
#endif

inline const std::atomic<bool> kNeverStop{false};

/// Whether this run's replays are a GPU's: FOLIO_TEST_DEVICE=cuda, as in the library's suites.
inline bool on_gpu() {
  const char* const device = std::getenv("FOLIO_TEST_DEVICE");
  return device != nullptr && std::string_view(device) == "cuda";
}

/// Skips all tests of a run that wants a GPU where there is none.
class DeviceEnvironment : public ::testing::Environment {
 public:
  void SetUp() override {
    if (!on_gpu()) return;
    try {
      Context::cuda(0);
    } catch (const Error&) {
      GTEST_SKIP() << "FOLIO_TEST_DEVICE: no GPU";
    }
  }
};
[[maybe_unused]] inline const auto* const kDeviceEnvironment =
    ::testing::AddGlobalTestEnvironment(new DeviceEnvironment);

inline const Context& context() {
  static const Context shared =
      on_gpu() ? Context::cuda(0) : Context::cpu({.executor = {}, .num_threads = 2, .force_kernel = {}});
  return shared;
}

/// A small model over the excerpt's first requests.
struct Scene {
  Workload workload;
  ReplayOptions options;
};

inline Scene small_scene(int64_t requests = 11, int32_t scale = 64) {
  Scene scene;
  scene.workload = make_workload(read_trace(FOLIO_EXAMPLE_TRACES "/mooncake_excerpt.jsonl", TraceFormat::kMooncake),
                                 scale, requests);
  StackConfig& stack = scene.options.stack;
  stack.num_layers = 2;
  stack.num_q_heads = 4;
  stack.num_kv_heads = 2;
  stack.head_dim_qk = 16;
  stack.head_dim_v = 24;
  stack.page_size = 8;
  stack.layout = KvLayout::kStridedNhd;
  stack.determinism = Determinism::kScheduleInvariant;
  stack.num_pages = scene.workload.pages_for_all(stack.page_size);
  stack.max_tokens = 96;
  scene.options.scheduler = {.token_budget = 96, .max_running = 8, .page_size = 8};
  scene.options.checks.rate = 0.02;
  return scene;
}

inline ReplayResult replay(const Scene& scene, const std::atomic<bool>& stop = kNeverStop) {
  const ReplayResult result = run_replay(context(), scene.workload, scene.options, stop, [](const ReplayProgress&) {});
  EXPECT_EQ(result.checks.failures, 0) << result.checks.first_failure;
  EXPECT_EQ(result.leaked_pages, 0);
  EXPECT_FALSE(result.failed());
  return result;
}

}  // namespace folio::replay
