#include "replay/page_manager.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "folio/types/error.hpp"

namespace folio::replay {
namespace {

using ::testing::ElementsAre;

/// Allocates pages, publishes them under `keys`, releases them.
std::vector<int32_t> cache_sequence(PageManager& manager, std::vector<uint64_t> keys) {
  std::vector<int32_t> pages;
  EXPECT_TRUE(manager.allocate(static_cast<int32_t>(keys.size()), pages));
  for (size_t i = 0; i < keys.size(); ++i) manager.publish(pages[i], keys[i]);
  manager.release(pages);
  return pages;
}

TEST(PageManager, AllocatesAllOrNothing) {
  PageManager manager(4, true);
  std::vector<int32_t> pages;
  EXPECT_TRUE(manager.allocate(3, pages));
  EXPECT_FALSE(manager.allocate(2, pages));
  EXPECT_EQ(pages.size(), 3u);
  EXPECT_EQ(manager.available(), 1);
  EXPECT_EQ(manager.held(), 3);
  manager.release(pages);
  EXPECT_EQ(manager.held(), 0);
}

TEST(PageManager, FindsTheLongestPrefixAndCountsReferences) {
  PageManager manager(8, true);
  const std::vector<int32_t> stored = cache_sequence(manager, {10, 11, 12});
  EXPECT_EQ(manager.cached(), 3);
  std::vector<int32_t> a;
  std::vector<int32_t> b;
  const std::vector<uint64_t> diverging = {10, 11, 99};
  EXPECT_EQ(manager.acquire_prefix(diverging, a), 2);
  EXPECT_THAT(a, ElementsAre(stored[0], stored[1]));
  const std::vector<uint64_t> whole = {10, 11, 12, 13};
  EXPECT_EQ(manager.acquire_prefix(whole, b), 3);
  EXPECT_EQ(manager.held(), 3);
  manager.release(a);
  EXPECT_EQ(manager.held(), 3);
  manager.release(b);
  EXPECT_EQ(manager.held(), 0);
  EXPECT_EQ(manager.cached(), 3);
}

TEST(PageManager, AMissAtTheBeginningHidesWhatFollows) {
  PageManager manager(8, true);
  cache_sequence(manager, {10, 11});
  std::vector<int32_t> pages;
  const std::vector<uint64_t> keys = {9, 11};
  EXPECT_EQ(manager.acquire_prefix(keys, pages), 0);
  EXPECT_TRUE(pages.empty());
}

TEST(PageManager, EvictsTheLeastRecentlyUsedAndSequencesFromTheirEnd) {
  PageManager manager(4, true);
  cache_sequence(manager, {1, 2});
  cache_sequence(manager, {3, 4});
  std::vector<int32_t> used;
  const std::vector<uint64_t> first = {1};
  manager.acquire_prefix(first, used);  // key 1 becomes the most recently used, key 2 stays the oldest
  manager.release(used);
  const auto cached = [&](uint64_t key) {
    std::vector<int32_t> pages;
    const std::vector<uint64_t> keys = {key};
    const bool found = manager.acquire_prefix(keys, pages) == 1;
    manager.release(pages);
    return found;
  };
  std::vector<int32_t> fresh;
  ASSERT_TRUE(manager.allocate(1, fresh));
  EXPECT_EQ(manager.evictions(), 1);
  EXPECT_FALSE(cached(2));
  ASSERT_TRUE(manager.allocate(1, fresh));
  EXPECT_FALSE(cached(4));  // the end of its sequence goes before its beginning
  EXPECT_TRUE(cached(3));
  EXPECT_TRUE(cached(1));
}

TEST(PageManager, HeldPagesAreNeverEvicted) {
  PageManager manager(2, true);
  cache_sequence(manager, {1, 2});
  std::vector<int32_t> held;
  const std::vector<uint64_t> keys = {1, 2};
  manager.acquire_prefix(keys, held);
  std::vector<int32_t> fresh;
  EXPECT_FALSE(manager.allocate(1, fresh));
  EXPECT_EQ(manager.evictions(), 0);
}

TEST(PageManager, ASecondPageUnderAKeyStaysPrivate) {
  PageManager manager(4, true);
  std::vector<int32_t> pages;
  manager.allocate(2, pages);
  manager.publish(pages[0], 5);
  manager.publish(pages[1], 5);
  manager.release(pages);
  EXPECT_EQ(manager.cached(), 1);
  std::vector<int32_t> found;
  const std::vector<uint64_t> keys = {5};
  manager.acquire_prefix(keys, found);
  EXPECT_THAT(found, ElementsAre(pages[0]));
}

TEST(PageManager, WithoutReuseNothingIsKept) {
  PageManager manager(4, false);
  cache_sequence(manager, {1, 2});
  EXPECT_EQ(manager.cached(), 0);
  EXPECT_EQ(manager.available(), 4);
}

TEST(PageManager, DroppingTheCacheLeavesHeldPages) {
  PageManager manager(4, true);
  cache_sequence(manager, {1, 2});
  std::vector<int32_t> held;
  const std::vector<uint64_t> keys = {1};
  manager.acquire_prefix(keys, held);
  manager.drop_cache();
  EXPECT_EQ(manager.held(), 1);
  EXPECT_EQ(manager.cached(), 0);
  EXPECT_EQ(manager.evictions(), 0);
}

TEST(PageManager, MisuseThrows) {
  EXPECT_THROW(PageManager(0, true), Error);
  PageManager manager(2, true);
  std::vector<int32_t> pages;
  manager.allocate(1, pages);
  manager.publish(pages[0], 1);
  EXPECT_THROW(manager.publish(pages[0], 2), Error);
  manager.release(pages);
  EXPECT_THROW(manager.release(pages), Error);
  EXPECT_THROW(manager.publish(pages[0], 1), Error);
  const std::vector<int32_t> outside = {2};
  EXPECT_THROW(manager.release(outside), Error);
}

/// Random use against a model that only keeps reference counts: no page is given twice, none is lost.
TEST(PageManager, RandomUseAgainstAModel) {
  std::mt19937 random(7);
  PageManager manager(32, true);
  std::vector<std::vector<int32_t>> holders;
  std::map<int32_t, int> references;
  uint64_t next_key = 0;
  for (int step = 0; step < 20000; ++step) {
    if (random() % 2 == 0 || holders.empty()) {
      std::vector<int32_t> pages;
      const std::vector<uint64_t> keys = {random() % (next_key + 1), random() % (next_key + 1)};
      manager.acquire_prefix(keys, pages);
      const size_t shared = pages.size();
      if (manager.allocate(static_cast<int32_t>(random() % 6), pages)) {
        for (size_t i = shared; i < pages.size(); ++i) {
          EXPECT_EQ(references[pages[i]], 0) << "page " << pages[i] << " was given although it is held";
          if (random() % 3 != 0) manager.publish(pages[i], next_key++ % 50);
        }
      }
      for (const int32_t page : pages) ++references[page];
      holders.push_back(std::move(pages));
    } else {
      const size_t who = random() % holders.size();
      for (const int32_t page : holders[who]) --references[page];
      manager.release(holders[who]);
      holders.erase(holders.begin() + static_cast<std::ptrdiff_t>(who));
    }
    const auto held =
        std::count_if(references.begin(), references.end(), [](const auto& entry) { return entry.second > 0; });
    ASSERT_EQ(manager.held(), held);
  }
  EXPECT_GT(manager.evictions(), 0);
  for (const auto& pages : holders) manager.release(pages);
  manager.drop_cache();
  EXPECT_EQ(manager.held(), 0);
  std::vector<int32_t> all;
  EXPECT_TRUE(manager.allocate(32, all));
  std::sort(all.begin(), all.end());
  EXPECT_EQ(std::unique(all.begin(), all.end()), all.end());
}

}  // namespace
}  // namespace folio::replay
