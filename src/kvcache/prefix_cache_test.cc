#include "folio/kvcache/prefix_cache.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/error_test_util.hpp"
#include "folio/kvcache/req_to_token_pool.hpp"
#include "folio/kvcache/token_allocator.hpp"
#include "folio/types/error.hpp"

/// What a step-by-step table cannot say well: locks, hand-overs of running requests, refusals. Tables are in
/// prefix_cache_golden_test.cc.
namespace folio {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;
using Ints = std::vector<int32_t>;

class PrefixCacheTest : public ::testing::Test {
 protected:
  void TearDown() override { cache_.check_invariants(); }

  PrefixLock acquire(const Ints& tokens) {
    slots_.clear();
    return cache_.acquire({tokens}, slots_);
  }
  PrefixCache::Inserted insert(const Ints& tokens, const Ints& slots) {
    return cache_.insert({tokens}, slots, changes_);
  }

  PrefixCache cache_;
  SlotChanges changes_;
  Ints slots_;
};

/// Of the leaf that has to go last only the end does, in whole pages.
TEST(PrefixCacheCuts, TakeWhatIsNeeded) {
  for (const bool whole_leaves : {true, false}) {
    PrefixCache cache({2, -1, whole_leaves});
    SlotChanges changes;
    const Ints tokens = {1, 2, 3, 4, 5, 6};
    cache.insert({tokens}, Ints{12, 13, 14, 15, 16, 17}, changes);
    cache.insert({Ints{7, 8}}, Ints{18, 19}, changes);
    EXPECT_EQ(cache.evict({1, 0}, changes), (PrefixCache::Amount{whole_leaves ? 6 : 2, 0}));
    EXPECT_EQ(cache.match({tokens}), whole_leaves ? 0 : 4);
    EXPECT_EQ(changes.freed, whole_leaves ? (Ints{12, 13, 14, 15, 16, 17}) : (Ints{16, 17}));
    EXPECT_EQ(cache.evictable(), whole_leaves ? 2 : 6);
    changes.clear();
    // The cut leaf is still the least recently used; what is missing behind it comes from the next.
    EXPECT_EQ(cache.evict({5, 0}, changes).slots, whole_leaves ? 2 : 6);
    EXPECT_EQ(cache.size(), 0);
    cache.check_invariants();
  }
}

TEST(PrefixCacheCuts, TakeAllForAnyAmount) {
  for (const bool whole_leaves : {true, false}) {
    PrefixCache cache({2, -1, whole_leaves});
    SlotChanges changes;
    cache.insert({Ints{1, 2, 3, 4}}, Ints{12, 13, 14, 15}, changes);
    EXPECT_EQ(cache.evict({std::numeric_limits<int64_t>::max(), 0}, changes), (PrefixCache::Amount{4, 0}));
    EXPECT_EQ(cache.size(), 0);
  }
}

TEST(PrefixCacheCuts, KeepWindowCopiesCounted) {
  PrefixCache cache({1, 2, false});
  SlotChanges changes;
  const Ints tokens = {1, 2, 3, 4, 5};
  cache.insert({tokens}, Ints{1, 2, 3, 4, 5}, changes, 2);
  EXPECT_EQ(cache.evict({1, 0}, changes), (PrefixCache::Amount{1, 1}));
  EXPECT_EQ(cache.window_size(), 2);
  EXPECT_EQ(cache.match({tokens}), 4);
  EXPECT_EQ(cache.evict({1, 0}, changes), (PrefixCache::Amount{1, 1}));
  EXPECT_EQ(cache.match({tokens}), 0);  // one token with a window copy is not enough behind a tombstone
  cache.check_invariants();
  EXPECT_EQ(cache.evict({1, 0}, changes), (PrefixCache::Amount{3, 1}));
  EXPECT_EQ(cache.size(), 0);
}

TEST_F(PrefixCacheTest, LocksMoveAndEnd) {
  insert({1, 2, 3}, {11, 12, 13});
  PrefixLock a = acquire({1, 2, 3});
  EXPECT_EQ(a.length(), 3);
  PrefixLock b = std::move(a);
  EXPECT_EQ(a.length(), 0);  // NOLINT(bugprone-use-after-move): a moved lock keeps nothing
  EXPECT_EQ(cache_.protected_slots(), 3);
  a = acquire({1, 2});
  b = std::move(a);
  EXPECT_EQ(cache_.protected_slots(), 2);
  b = acquire({9});
  EXPECT_EQ(b.length(), 0);
  EXPECT_EQ(cache_.protected_slots(), 0);
  { const PrefixLock inner = acquire({1, 2, 3}); }
  EXPECT_EQ(cache_.evictable(), 3);
}

TEST_F(PrefixCacheTest, LocksMayOutliveTheCache) {
  std::optional<PrefixCache> cache(std::in_place);
  cache->insert({Ints{1, 2}}, Ints{11, 12}, changes_);
  PrefixLock lock = cache->acquire({Ints{1, 2}}, slots_);
  cache.reset();
  EXPECT_EQ(lock.length(), 2);
  lock.reset();
}

TEST_F(PrefixCacheTest, MatchChangesNothing) {
  insert({1, 2, 3}, {11, 12, 13});
  insert({4}, {14});
  EXPECT_EQ(cache_.match({Ints{1, 2, 9}}), 2);
  EXPECT_EQ(cache_.num_nodes(), 2);
  cache_.evict({.slots = 1}, changes_);
  EXPECT_THAT(changes_.freed, ElementsAre(11, 12, 13));
}

TEST_F(PrefixCacheTest, ExtendHandsOverAndLocks) {
  PrefixLock lock = acquire({1, 2, 3});
  Ints slots{21, 22, 23, 24};
  cache_.extend(lock, {Ints{1, 2, 3, 4}}, slots, changes_);
  EXPECT_EQ(lock.length(), 4);
  EXPECT_TRUE(changes_.empty());
  EXPECT_THAT(slots, ElementsAre(21, 22, 23, 24));
  EXPECT_EQ(cache_.protected_slots(), 4);
  slots.push_back(25);
  cache_.extend(lock, {Ints{1, 2, 3, 4, 5}}, slots, changes_);
  EXPECT_EQ(lock.length(), 5);
  EXPECT_EQ(cache_.protected_slots(), 5);
  cache_.finish(std::move(lock), {Ints{1, 2, 3, 4, 5}}, slots, changes_);
  EXPECT_TRUE(changes_.empty());
  EXPECT_EQ(cache_.evictable(), 5);
}

// Two requests with one prompt: what the second computed again is freed, and its row reads the first one's slots.
// Without the write-back it would go on reading freed slots.
TEST_F(PrefixCacheTest, ExtendWritesTheTreesSlotsBack) {
  PrefixLock first = acquire({1, 2});
  PrefixLock second = acquire({1, 2});
  Ints a{11, 12, 13};
  Ints b{21, 22, 23, 24};
  cache_.extend(first, {Ints{1, 2, 3}}, a, changes_);
  cache_.extend(second, {Ints{1, 2, 4, 5}}, b, changes_);
  EXPECT_THAT(b, ElementsAre(11, 12, 23, 24));
  EXPECT_THAT(changes_.freed, ElementsAre(21, 22));
  EXPECT_EQ(cache_.size(), 5);
  first.reset();
  second.reset();
  EXPECT_EQ(cache_.evictable(), 5);
}

TEST_F(PrefixCacheTest, FinishFreesDuplicatesAndTheTail) {
  PrefixCache cache({.page_size = 4});
  PrefixLock first = cache.acquire({Ints{1, 2, 3, 4}}, slots_);
  PrefixLock second = cache.acquire({Ints{1, 2, 3, 4}}, slots_);
  const Ints a{4, 5, 6, 7, 8, 9};
  const Ints b{12, 13, 14, 15, 16, 17, 18, 19, 20};
  cache.finish(std::move(first), {Ints{1, 2, 3, 4, 5, 6}}, a, changes_);
  EXPECT_THAT(changes_.freed, ElementsAre(8, 9));
  changes_.clear();
  cache.finish(std::move(second), {Ints{1, 2, 3, 4, 5, 6, 7, 8, 9}}, b, changes_);
  EXPECT_THAT(changes_.freed, ElementsAre(12, 13, 14, 15, 20));
  EXPECT_EQ(cache.size(), 8);
  EXPECT_EQ(cache.evictable(), 8);
  cache.check_invariants();
}

TEST_F(PrefixCacheTest, ExtendIsPageAligned) {
  PrefixCache cache({.page_size = 4});
  PrefixLock lock;
  Ints slots{4, 5, 6};
  cache.extend(lock, {Ints{1, 2, 3}}, slots, changes_);
  EXPECT_EQ(lock.length(), 0);
  slots = {4, 5, 6, 7, 8};
  cache.extend(lock, {Ints{1, 2, 3, 4, 5}}, slots, changes_);
  EXPECT_EQ(lock.length(), 4);
  EXPECT_EQ(cache.size(), 4);
  EXPECT_TRUE(changes_.empty());
}

// The example of the header: two requests, one after the other, in a pool that has room for one and a half.
TEST_F(PrefixCacheTest, ServesAsItsHeaderSays) {
  TokenAllocator allocator(12, 4);
  ReqToTokenPool rows(2, 16);
  PrefixCache cache({.page_size = 4});
  SlotChanges changes;
  const auto serve = [&](std::span<const int32_t> all, int64_t expected_hit) {
    Ints slots;
    PrefixLock lock = cache.acquire({all.first(all.size() - 1)}, slots);
    EXPECT_EQ(lock.length(), expected_hit);
    slots.resize(all.size());
    const auto fresh = std::span(slots).subspan(static_cast<size_t>(lock.length()));
    if (!allocator.alloc(fresh)) {
      cache.evict({.slots = static_cast<int64_t>(fresh.size())}, changes);
      allocator.free(changes.freed);
      changes.clear();
      EXPECT_TRUE(allocator.alloc(fresh));
    }
    const int32_t row = rows.alloc().value();
    cache.extend(lock, {all}, slots, changes);
    rows.write(row, 0, slots);
    allocator.free(changes.freed);
    changes.clear();
    cache.finish(std::move(lock), {all}, slots, changes);
    allocator.free(changes.freed);
    changes.clear();
    rows.free(row);
    EXPECT_EQ(allocator.available() + cache.size(), 12);
  };
  serve(Ints{1, 2, 3, 4, 5, 6, 7, 8}, 0);
  serve(Ints{1, 2, 3, 4, 5, 6, 7, 8}, 4);
  serve(Ints{1, 2, 3, 4, 9, 9, 9, 9, 9}, 4);
  serve(Ints{7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7}, 0);
}

TEST_F(PrefixCacheTest, ChecksHandOversFirst) {
  insert({1, 2}, {11, 12});
  PrefixLock lock = acquire({1, 2});
  Ints slots{11, 12, 13};
  const auto extend = [&](const Ints& tokens, Ints own, std::string_view extra_key = {}) {
    return message_of([&] { cache_.extend(lock, {tokens, extra_key}, own, changes_); });
  };
  EXPECT_THAT(extend({1, 2, 3}, {11, 12}), HasSubstr("there are 2 slots for 3 tokens"));
  EXPECT_THAT(extend({1, 2, 3}, {11, 12, -1}), HasSubstr("the slot of token 2 is -1"));
  EXPECT_THAT(extend({1}, {11}), HasSubstr("the lock keeps 2 tokens, the key has 1"));
  EXPECT_THAT(extend({1, 9, 3}, {11, 12, 13}), HasSubstr("are not those that the lock keeps"));
  EXPECT_THAT(extend({1, 2, 3}, {11, 92, 13}), HasSubstr("some are not the tree's; they are written back"));
  EXPECT_THAT(extend({1, 2, 3}, {11, 12, 13}, "adapter"), HasSubstr("extra key"));
  EXPECT_THAT(message_of([&] {
                cache_.extend(lock, {Ints{1, 2, 3}}, slots, changes_, 1);
              }),
              HasSubstr("window_begin is 1 in a cache without a window"));
  PrefixCache other;
  EXPECT_THAT(message_of([&] {
                other.extend(lock, {Ints{1, 2, 3}}, slots, changes_);
              }),
              HasSubstr("the lock is of another prefix cache"));
  EXPECT_EQ(lock.length(), 2);
  EXPECT_EQ(cache_.size(), 2);
  EXPECT_TRUE(changes_.empty());
  EXPECT_THAT(message_of([&] { cache_.insert({Ints{5}}, Ints{}, changes_); }), HasSubstr("0 slots for 1 tokens"));
  EXPECT_EQ(cache_.match({Ints{5}}), 0);
}

TEST_F(PrefixCacheTest, ChecksWindows) {
  PrefixCache cache({.page_size = 2, .window_left = 4});
  const Ints tokens{1, 2, 3, 4};
  const Ints slots{2, 3, 4, 5};
  for (const int64_t begin : {-2, 1, 6}) {
    EXPECT_THAT(message_of([&] { cache.insert({tokens}, slots, changes_, begin); }),
                HasSubstr("it must be a multiple of page_size (2) in [0, 4]"));
  }
  EXPECT_THAT(message_of([&] { cache.evict({.slots = -1}, changes_); }), HasSubstr("amounts are not negative"));
  EXPECT_THAT(message_of([&] { cache_.evict({.slots = 1, .window_copies = 1}, changes_); }),
              HasSubstr("of a cache without a window"));
  EXPECT_THAT(message_of([] { PrefixCache({.page_size = 0}); }), HasSubstr("page_size is 0"));
  EXPECT_THAT(message_of([] { PrefixCache({.window_left = 0}); }), HasSubstr("window_left is 0"));
  EXPECT_THAT(message_of([] { PrefixCache({.window_left = -2}); }), HasSubstr("window_left is -2"));
}

// SGLang replaced the slots of a tombstone by the request's and freed the old ones, also where another request's row
// held them.
TEST_F(PrefixCacheTest, HealingLeavesTheSlotsOfOthersAlone) {
  PrefixCache cache({.window_left = 2});
  cache.insert({Ints{1, 2}}, Ints{11, 12}, changes_);
  cache.insert({Ints{1, 2, 3, 4}}, Ints{21, 22, 13, 14}, changes_);
  PrefixLock reader = cache.acquire({Ints{1, 2, 3, 4}}, slots_);
  EXPECT_THAT(slots_, ElementsAre(11, 12, 13, 14));
  cache.evict({.window_copies = 1}, changes_);
  EXPECT_THAT(changes_.window_freed, ElementsAre(11, 12));
  changes_.clear();
  PrefixLock lock = cache.acquire({Ints{1, 2}}, slots_);
  EXPECT_EQ(lock.length(), 0);
  Ints own{31, 32, 33};
  cache.extend(lock, {Ints{1, 2, 9}}, own, changes_);
  EXPECT_THAT(changes_.moved, ElementsAre(SlotChanges::Move{31, 11}, SlotChanges::Move{32, 12}));
  EXPECT_THAT(changes_.freed, ElementsAre(31, 32));
  EXPECT_THAT(own, ElementsAre(11, 12, 33));
  EXPECT_EQ(cache.match({Ints{1, 2}}), 2);
  cache.check_invariants();
}

TEST_F(PrefixCacheTest, ExtendWithoutWindowCopiesHandsOverNothing) {
  PrefixCache cache({.page_size = 4, .window_left = 1});
  PrefixLock lock;
  Ints slots{4, 5, 6, 7, 8};
  cache.extend(lock, {Ints{1, 2, 3, 4, 5}}, slots, changes_, 4);
  EXPECT_EQ(lock.length(), 0);
  EXPECT_EQ(cache.size(), 0);
  cache.finish(std::move(lock), {Ints{1, 2, 3, 4, 5}}, slots, changes_, 4);
  EXPECT_THAT(changes_.freed, ElementsAre(4, 5, 6, 7, 8));
}

TEST_F(PrefixCacheTest, ClearForgets) {
  insert({1, 2}, {11, 12});
  PrefixLock lock = acquire({1});
  EXPECT_THAT(message_of([&] { cache_.clear(); }), HasSubstr("1 locks live"));
  lock.reset();
  cache_.clear();
  EXPECT_EQ(cache_.size(), 0);
  EXPECT_EQ(cache_.match({Ints{1}}), 0);
  insert({1}, {12});
  EXPECT_EQ(cache_.match({Ints{1}}), 1);
}

TEST_F(PrefixCacheTest, KeepsNoEmptyNamespaces) {
  for (int32_t i = 0; i < 100; ++i) {
    cache_.insert({Ints{1, 2}, std::to_string(i)}, Ints{2 * i, 2 * i + 1}, changes_);
    EXPECT_EQ(cache_.evict({.slots = 1}, changes_).slots, 2);
  }
  EXPECT_EQ(cache_.num_nodes(), 0);
  EXPECT_THAT(cache_.evict({.slots = 1}, changes_), (PrefixCache::Amount{0, 0}));
  cache_.insert({Ints{}, "empty"}, Ints{}, changes_);
}

// Long runs are compared in pieces: differences at, before and after their borders.
TEST_F(PrefixCacheTest, FindsTheFirstDifferenceOfLongRuns) {
  Ints tokens(1000);
  Ints slots(1000);
  for (int32_t i = 0; i < 1000; ++i) {
    tokens[static_cast<size_t>(i)] = i % 7;
    slots[static_cast<size_t>(i)] = i;
  }
  insert(tokens, slots);
  for (const size_t at : {0, 1, 127, 128, 129, 255, 256, 511, 512, 998, 999}) {
    Ints other = tokens;
    other[at] = 77;
    EXPECT_EQ(cache_.match({other}), static_cast<int64_t>(at));
  }
  EXPECT_EQ(cache_.match({tokens}), 1000);
}

}  // namespace
}  // namespace folio
