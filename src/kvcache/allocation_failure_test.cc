// A prefix cache's calls with every allocation failing once: the tree is whole afterwards, and locks can be given up.
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "core/allocation_failure_test_util.hpp"
#include "folio/kvcache/prefix_cache.hpp"

namespace folio {
namespace {

std::vector<int32_t> numbers(int32_t first, int32_t count) {
  std::vector<int32_t> values;
  for (int32_t i = 0; i < count; ++i) values.push_back(first + i);
  return values;
}

/// Roots, leaves, splits, tombstones and copies for them: tokens begin alike, slots never.
void calls(PrefixCache& cache, std::optional<PrefixLock>& lock, std::vector<int32_t>& slots, SlotChanges& changes,
           bool windowed) {
  std::vector<int32_t> tokens = numbers(0, 12), other = numbers(0, 12);
  other[6] = 99;
  cache.insert({tokens, "a"}, numbers(100, 12), changes, windowed ? 6 : 0);
  cache.insert({tokens}, numbers(200, 12), changes);
  cache.insert({other}, numbers(300, 12), changes);
  slots.clear();
  lock = cache.acquire({std::span(other).first(9)}, slots);
  slots.resize(12, 400);
  for (size_t i = static_cast<size_t>(lock->length()); i < slots.size(); ++i) {
    slots[i] = 400 + static_cast<int32_t>(i);
  }
  cache.extend(*lock, {other}, slots, changes);
  cache.evict({.slots = 4, .window_copies = windowed ? 4 : 0}, changes);
  cache.insert({tokens}, numbers(500, 12), changes);
  cache.finish(std::move(*lock), {other}, slots, changes);
}

void expect_a_whole_tree(int32_t page_size, int32_t window_left) {
  std::optional<PrefixCache> cache;
  std::optional<PrefixLock> lock;
  std::vector<int32_t> slots;
  SlotChanges changes;
  folio::testing::sweep_failing_allocations(
      [&] {
        cache.emplace(PrefixCacheOptions{.page_size = page_size, .window_left = window_left});
        calls(*cache, lock, slots, changes, window_left >= 0);
      },
      [&] {
        if (cache) cache->check_invariants();
        lock.reset();
        if (cache) {
          cache->check_invariants();
          EXPECT_EQ(cache->protected_slots(), 0);
          const int64_t size = cache->size();
          changes = SlotChanges();
          EXPECT_EQ(cache->evict({.slots = size}, changes).slots, size);
          EXPECT_EQ(cache->num_nodes(), 0);
        }
        cache.reset();
        slots = std::vector<int32_t>();
        changes = SlotChanges();
      });
}

TEST(PrefixCacheAllocationFailure, TheTreeStaysWhole) {
  expect_a_whole_tree(1, -1);
  expect_a_whole_tree(3, -1);
}
TEST(PrefixCacheAllocationFailure, ATreeWithAWindowStaysWhole) {
  expect_a_whole_tree(1, 4);
  expect_a_whole_tree(2, 4);
}

}  // namespace
}  // namespace folio
