#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/golden_test.hpp"
#include "folio/backends/batch_order.hpp"
#include "folio/types/error.hpp"

namespace folio::inline v0::backends {
namespace {

using folio::testing::golden_cases;
using folio::testing::GoldenCase;

std::vector<int32_t> identity(size_t n) {
  std::vector<int32_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

SwapStates swapping(std::vector<int32_t>& order) {
  return [&order](int32_t a, int32_t b) { std::swap(order[static_cast<size_t>(a)], order[static_cast<size_t>(b)]); };
}

class ReorderTable : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(ReorderTable, OrdersTheBatch) {
  const std::vector<int32_t> scheduled = GetParam().ints("scheduled");
  std::vector<int32_t> order = identity(scheduled.size());
  EXPECT_EQ(reorder_batch_to_split_decodes_and_prefills(scheduled, GetParam().ints("computed"),
                                                        GetParam().at<int32_t>("threshold"), swapping(order)),
            GetParam().at<bool>("modified"));
  EXPECT_EQ(order, GetParam().ints("order"));
}

INSTANTIATE_TEST_SUITE_P(Golden, ReorderTable, ::testing::ValuesIn(golden_cases("backends/batch_reorder")),
                         folio::testing::golden_case_name);

TEST(ReorderBatch, SortsAnyBatchAndMovesOnlyWhatIsMisplaced) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const size_t n = random() % 40;
    std::vector<int32_t> scheduled(n);
    std::vector<int32_t> computed(n);
    std::vector<int> section(n);
    for (size_t i = 0; i < n; ++i) {
      scheduled[i] = static_cast<int32_t>(1 + random() % 6);
      computed[i] = static_cast<int32_t>(random() % 3);
      section[i] = computed[i] == 0 ? 2 : scheduled[i] <= 2 ? 0 : 1;
    }
    std::vector<int> wanted = section;
    std::ranges::sort(wanted);
    std::vector<int32_t> order = identity(n);
    const bool modified = reorder_batch_to_split_decodes_and_prefills(scheduled, computed, 2, swapping(order));
    EXPECT_EQ(modified, section != wanted);
    for (size_t i = 0; i < n; ++i) {
      EXPECT_EQ(section[static_cast<size_t>(order[i])], wanted[i]);
      if (section[i] == wanted[i]) {
        EXPECT_EQ(order[i], static_cast<int32_t>(i));
      }
    }
  }
}

TEST(ReorderBatch, RefusesSpansOfDifferentLengths) {
  const std::vector<int32_t> two{1, 2};
  const std::vector<int32_t> one{1};
  std::vector<int32_t> order = identity(2);
  EXPECT_THROW(reorder_batch_to_split_decodes_and_prefills(two, one, 1, swapping(order)), Error);
}

class SingleTokenTable : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(SingleTokenTable, SwapsTheLastDecodesWithTheFirstPrefills) {
  const std::vector<int32_t> scheduled = GetParam().ints("scheduled");
  std::vector<int32_t> order = identity(scheduled.size());
  const std::vector<int32_t> before = order;
  const SingleTokenReorder result = reorder_batch_single_token_decodes(scheduled, swapping(order));
  EXPECT_EQ(order, GetParam().ints("order"));
  EXPECT_EQ(result.modified, order != before);
  const BatchSplit& split = result.split;
  EXPECT_EQ((std::vector{split.num_decodes, split.num_prefills, split.num_decode_tokens, split.num_prefill_tokens}),
            GetParam().ints("split"));
}

INSTANTIATE_TEST_SUITE_P(Golden, SingleTokenTable,
                         ::testing::ValuesIn(golden_cases("backends/batch_reorder", "single_token")),
                         folio::testing::golden_case_name);

}  // namespace
}  // namespace folio::inline v0::backends
