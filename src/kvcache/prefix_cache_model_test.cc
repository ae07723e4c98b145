#include <gtest/gtest.h>

#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kvcache/engine_model_test_util.hpp"

/// The pools and the prefix cache under random requests, against naive models. FOLIO_MODEL_OPERATIONS: in all, divided
/// over the cases; the program of the label `slow` has a million.
namespace folio::testing {
namespace {

std::vector<EngineModel::Options> cases() {
  std::vector<EngineModel::Options> all;
  const auto add = [&](int32_t page_size, int32_t window_left, int32_t num_slots, int32_t num_window_slots) {
    EngineModel::Options options;
    options.page_size = page_size;
    options.window_left = window_left;
    options.num_slots = num_slots;
    options.num_window_slots = num_window_slots;
    options.max_len = 32 + 4 * page_size;
    options.whole_leaves = all.size() % 2 == 0;
    options.seed = static_cast<uint32_t>(all.size()) + 7;
    all.push_back(options);
  };
  add(1, -1, 128, 128);
  add(1, -1, 512, 512);
  add(2, -1, 256, 256);
  add(4, -1, 256, 256);
  add(1, 1, 128, 64);
  add(1, 4, 256, 96);
  add(2, 5, 256, 128);
  add(4, 4, 256, 128);
  add(4, 7, 512, 192);
  add(16, 24, 1024, 640);
  return all;
}

class PrefixCacheModel : public ::testing::TestWithParam<EngineModel::Options> {};

TEST_P(PrefixCacheModel, ServesAsTheNaiveModel) {
  EngineModel engine(GetParam());
  ASSERT_NO_THROW(engine.run(FOLIO_MODEL_OPERATIONS / static_cast<int64_t>(cases().size())));
  ASSERT_NO_THROW(engine.drain());
  // A model that never hits, evicts or heals would show nothing.
  EXPECT_GT(engine.hit_tokens(), 0);
  EXPECT_GT(engine.evicted_slots(), 0);
  EXPECT_EQ(engine.healed_slots() > 0, GetParam().window_left > 0);
}

INSTANTIATE_TEST_SUITE_P(Cases, PrefixCacheModel, ::testing::ValuesIn(cases()), [](const auto& param_info) {
  const EngineModel::Options& options = param_info.param;
  return "pages_of_" + std::to_string(options.page_size) +
         (options.window_left < 0 ? "_" : "_window_" + std::to_string(options.window_left) + "_") +
         std::to_string(options.num_slots) + "_slots" + (options.whole_leaves ? "" : "_leaves_cut");
});

TEST(PrefixCacheThreads, OneTreeAThread) {
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::vector<std::string> errors;
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      try {
        EngineModel::Options options = cases()[4 + t];
        options.seed = 100 + t;
        EngineModel engine(options);
        engine.run(FOLIO_MODEL_OPERATIONS / 10);
        engine.drain();
      } catch (const std::exception& error) {
        const std::lock_guard<std::mutex> guard(mutex);
        errors.emplace_back(error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(errors, std::vector<std::string>());
}

}  // namespace
}  // namespace folio::testing
