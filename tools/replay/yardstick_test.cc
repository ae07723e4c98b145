#include "replay/yardstick.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "replay/yardstick_kernels.hpp"

namespace folio::replay {
namespace {

/// What is read must really be read: the sum of all 64-bit words, whatever the number of streams.
TEST(Yardstick, ReadsEveryByte) {
  constexpr size_t kPageBytes = 1024;
  constexpr size_t kPages = 16;
  std::vector<uint64_t> memory(kPages * kPageBytes / 8);
  uint64_t expected = 0;
  for (size_t i = 0; i < memory.size(); ++i) expected += memory[i] = i * 0x9e3779b97f4a7c15u;
  std::vector<const std::byte*> pages;
  for (size_t p = 0; p < kPages; ++p)
    pages.push_back(reinterpret_cast<const std::byte*>(memory.data()) + (p * 7 % kPages) * kPageBytes);
  for (const int32_t streams : {1, 4, 8}) {
    EXPECT_EQ(yardstick_baseline::kKernels.read_pages(pages.data(), pages.size(), kPageBytes, streams), expected)
        << streams;
  }
}

TEST(Yardstick, CountsItsMultiplyAdds) {
  double once = 0.0;
  double ten_times = 0.0;
  yardstick_baseline::kKernels.multiply(1, &once);
  EXPECT_GT(once, 0.0);
  const float result = yardstick_baseline::kKernels.multiply(10, &ten_times);
  EXPECT_EQ(ten_times, 10.0 * once);
  EXPECT_GT(result, 0.0f);
}

TEST(Yardstick, RatesArePositive) {
  const Context context = Context::cpu({.executor = {}, .num_threads = 2, .force_kernel = {}});
  std::vector<std::byte> memory(1 << 20);
  std::vector<const std::byte*> pages;
  for (size_t at = 0; at < memory.size(); at += 4096) pages.push_back(memory.data() + at);
  EXPECT_GT(best_read_rate(context, {pages, 4096}), 0.0);
  EXPECT_GT(multiply_rate(context, 0.001), 0.0);
  const std::vector<std::string> features = cpu_features();
  const bool tiles = std::find(features.begin(), features.end(), "amx_bf16") != features.end();
  EXPECT_EQ(matrix_rate(context, 0.001) > 0.0, tiles);
  EXPECT_FALSE(yardstick_isa().empty());
}

TEST(Yardstick, ProductRate_OfAKernel_IsThatOfTheUnitItComputesOn) {
  const Context context = Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}});
  for (const char* kernel : {"generic", "generic-v3", "generic-v4", "avx2", "avx512"}) {
    EXPECT_GT(product_rate(context, kernel, 0.001), 0.0) << kernel;
  }
  EXPECT_EQ(product_rate(context, "generic-bf16", 0.001), 0.0) << "nothing measures Arm's pairs";
  const std::vector<std::string> features = cpu_features();
  const bool pairs = std::find(features.begin(), features.end(), "avx512_bf16") != features.end();
  EXPECT_EQ(pair_rate(context, 0.001) > 0.0, pairs);
  EXPECT_EQ(product_rate(context, "avx512-bf16", 0.001) > 0.0, pairs);
  const bool tiles = matrix_rate(context, 0.001) > 0.0;
  const double in_tiles = product_rate(context, "amx", 0.001);
  if (tiles) {
    EXPECT_GT(in_tiles, product_rate(context, "avx512", 0.001));
  } else {
    EXPECT_EQ(in_tiles, 0.0);
  }
}

}  // namespace
}  // namespace folio::replay
