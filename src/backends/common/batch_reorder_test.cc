#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "folio/backends/batch_order.hpp"
#include "folio/types/error.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::TestWithParam;
using testing::ValuesIn;

std::vector<int32_t> identity(size_t n) {
  std::vector<int32_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

SwapStates swapping(std::vector<int32_t>& order) {
  return [&order](int32_t a, int32_t b) { std::swap(order[static_cast<size_t>(a)], order[static_cast<size_t>(b)]); };
}

struct ReorderCase {
  std::string name;
  std::vector<int32_t> scheduled;
  std::vector<int32_t> computed;
  int32_t threshold;
  std::vector<int32_t> order;
  bool modified;
};

class ReorderTable : public TestWithParam<ReorderCase> {};

TEST_P(ReorderTable, OrdersTheBatch) {
  std::vector<int32_t> order = identity(GetParam().scheduled.size());
  EXPECT_EQ(reorder_batch_to_split_decodes_and_prefills(GetParam().scheduled, GetParam().computed, GetParam().threshold,
                                                        swapping(order)),
            GetParam().modified);
  EXPECT_EQ(order, GetParam().order);
}

// The cases of vLLM's tests (tests/v1/attention/test_batch_reordering.py).
INSTANTIATE_TEST_SUITE_P(Golden, ReorderTable,
                         ValuesIn(std::vector<ReorderCase>{
                             {"all_decodes", {1, 1, 1}, {10, 20, 30}, 1, {0, 1, 2}, false},
                             {"all_extends", {100, 200, 300}, {100, 200, 300}, 1, {0, 1, 2}, false},
                             {"mixed_interleaved", {100, 1, 200, 1}, {100, 10, 200, 20}, 1, {3, 1, 2, 0}, true},
                             {"already_ordered", {1, 1, 100, 200}, {10, 20, 100, 0}, 1, {0, 1, 2, 3}, false},
                             {"single", {1}, {10}, 1, {0}, false},
                             {"higher_threshold", {2, 3, 5, 6}, {10, 20, 30, 40}, 4, {0, 1, 2, 3}, false},
                             {"decodes_at_end", {100, 200, 1, 1}, {100, 200, 10, 20}, 1, {2, 3, 0, 1}, true},
                             {"decode_extend_prefill", {100, 10, 1}, {0, 50, 10}, 1, {2, 1, 0}, true},
                             {"extend_prefill_only", {100, 10, 200, 20}, {0, 50, 0, 75}, 1, {3, 1, 2, 0}, true},
                             {"complicated",
                              {1, 1, 374, 300, 1, 256, 1, 27, 1},
                              {20, 50, 0, 20, 20, 0, 5, 0, 4},
                              1,
                              {0, 1, 6, 8, 4, 3, 2, 7, 5},
                              true},
                             {"empty", {}, {}, 1, {}, false},
                             {"one_token_prefill", {1, 1}, {0, 5}, 1, {1, 0}, true},
                         }),
                         [](const auto& param_info) { return param_info.param.name; });

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

struct SingleTokenCase {
  std::vector<int32_t> scheduled;
  std::vector<int32_t> order;
  BatchSplit split;
};

class SingleTokenTable : public TestWithParam<SingleTokenCase> {};

TEST_P(SingleTokenTable, SwapsTheLastDecodesWithTheFirstPrefills) {
  std::vector<int32_t> order = identity(GetParam().scheduled.size());
  const std::vector<int32_t> before = order;
  const SingleTokenReorder result = reorder_batch_single_token_decodes(GetParam().scheduled, swapping(order));
  EXPECT_EQ(order, GetParam().order);
  EXPECT_EQ(result.modified, order != before);
  EXPECT_EQ(result.split, GetParam().split);
}

INSTANTIATE_TEST_SUITE_P(Golden, SingleTokenTable,
                         ValuesIn(std::vector<SingleTokenCase>{
                             {{100, 1, 200, 1}, {3, 1, 2, 0}, {2, 2, 2, 300}},
                             {{100, 200, 1, 1}, {3, 2, 1, 0}, {2, 2, 2, 300}},
                             {{1, 1, 100}, {0, 1, 2}, {2, 1, 2, 100}},
                             {{5, 6}, {0, 1}, {0, 2, 0, 11}},
                             {{}, {}, {0, 0, 0, 0}},
                         }));

}  // namespace
}  // namespace folio::inline v0::backends
