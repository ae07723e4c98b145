// Sums in the order of the ranks, of parts that lie in one place.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "folio/distributed/process_group.hpp"
#include "folio/types/error.hpp"

namespace folio::distributed {
namespace {

using ::testing::HasSubstr;

Context cpu() {
  return Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}});
}

TEST(SumOverRanks, AddsInTheirOrder) {
  constexpr size_t kCount = 2500;  // more than a step
  // 1e8 + 4 - 1e8 is 0 in this order and 4 in any other: the sum tells where it began.
  const float values[] = {4.0f, 1e8f, -1e8f, 0.5f};
  std::vector<std::vector<float>> parts;
  std::vector<const float*> sent;
  for (const float value : values) {
    parts.emplace_back(kCount, value);
    sent.push_back(parts.back().data());
  }
  std::vector<float> out(kCount + 1, 7.0f), expected(kCount, (values[0] + values[1]) + values[2] + values[3]);
  ASSERT_EQ(expected[0], 0.5f);
  expected.push_back(7.0f);  // behind the end
  sum_over_ranks(cpu(), sent, kCount, out.data());
  EXPECT_EQ(out, expected);
}

TEST(SumOverRanks, RefusesBadArguments) {
  float data[4] = {}, out[2] = {};
  const auto refused = [](const char* text, const auto& call) {
    try {
      call();
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(), HasSubstr(text));
    }
  };
  const std::vector<const float*> sent = {data, data + 2}, with_null = {data, nullptr};
  refused("no parts", [&] { sum_over_ranks(cpu(), {}, 2, out); });
  refused("send is null", [&] { sum_over_ranks(cpu(), with_null, 2, out); });
  refused("out is null", [&] { sum_over_ranks(cpu(), sent, 2, nullptr); });
  refused("overlaps", [&] { sum_over_ranks(cpu(), sent, 2, data + 1); });
  refused("exceeds memory", [&] { sum_over_ranks(cpu(), sent, SIZE_MAX / 2, out); });
  refused("default stream", [&] { sum_over_ranks(cpu(), sent, 2, out, Stream{data}); });
  sum_over_ranks(cpu(), with_null, 0, nullptr);  // nothing to add
}

}  // namespace
}  // namespace folio::distributed
