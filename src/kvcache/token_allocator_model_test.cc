#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "folio/kvcache/token_allocator.hpp"

/// Random calls against sorted sets, which give the same pages in the same order.
namespace folio {
namespace {

struct NaiveAllocator {
  std::set<int32_t> free;
  std::set<int32_t> released;
  std::set<int32_t> grouped;

  std::optional<std::vector<int32_t>> take(size_t pages) {
    if (pages > free.size()) {
      if (pages > free.size() + released.size()) return std::nullopt;
      free.merge(released);
    }
    const auto end = std::next(free.begin(), static_cast<std::ptrdiff_t>(pages));
    std::vector<int32_t> taken(free.begin(), end);
    free.erase(free.begin(), end);
    return taken;
  }
};

class TokenAllocatorModel : public ::testing::TestWithParam<int32_t> {
 protected:
  int32_t below(size_t limit) { return static_cast<int32_t>(random_() % limit); }
  std::mt19937 random_{5};
};

TEST_P(TokenAllocatorModel, GivesWhatSortedSetsGive) {
  const int32_t page_size = GetParam();
  const int32_t num_pages = 300;
  TokenAllocator allocator(num_pages * page_size, page_size);
  NaiveAllocator naive;
  for (int32_t page = 1; page <= num_pages; ++page) naive.free.insert(page);
  std::vector<std::vector<int32_t>> held;
  std::optional<TokenAllocator::FreeGroup> group;
  for (int i = 0; i < 20000; ++i) {
    const int32_t kind = below(100);
    if (kind < 50) {
      std::vector<int32_t> slots(static_cast<size_t>(1 + below(static_cast<size_t>(20 * page_size))));
      const auto expected =
          naive.take((slots.size() + static_cast<size_t>(page_size) - 1) / static_cast<size_t>(page_size));
      ASSERT_EQ(allocator.alloc(slots), expected.has_value());
      if (!expected) continue;
      for (size_t s = 0; s < slots.size(); ++s) {
        const auto p = static_cast<int32_t>(s) / page_size;
        ASSERT_EQ(slots[s], (*expected)[static_cast<size_t>(p)] * page_size + static_cast<int32_t>(s) % page_size);
      }
      held.push_back(std::move(slots));
    } else if (kind < 95 && !held.empty()) {
      const auto which = held.begin() + below(held.size());
      std::shuffle(which->begin(), which->end(), random_);
      allocator.free(*which);
      for (const int32_t slot : *which) (group ? naive.grouped : naive.released).insert(slot / page_size);
      held.erase(which);
    } else if (group) {
      group.reset();
      naive.released.merge(naive.grouped);
    } else {
      group.emplace(allocator.free_group());
    }
    ASSERT_EQ(allocator.available(), static_cast<int32_t>(naive.free.size() + naive.released.size()) * page_size);
    if (i % 500 == 0) {
      ASSERT_NO_THROW(allocator.check_invariants());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Pages, TokenAllocatorModel, ::testing::Values(1, 2, 16));

}  // namespace
}  // namespace folio
