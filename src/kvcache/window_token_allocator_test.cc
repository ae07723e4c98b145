#include "folio/kvcache/window_token_allocator.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/error_test_util.hpp"
#include "folio/types/error.hpp"

namespace folio {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using Slots = std::vector<int32_t>;

Slots alloc(WindowTokenAllocator& allocator, size_t count) {
  Slots slots(count);
  EXPECT_TRUE(allocator.alloc(slots));
  return slots;
}

Slots window_of(const WindowTokenAllocator& allocator, const Slots& slots) {
  Slots window(slots.size());
  allocator.to_window(slots, window);
  return window;
}

// SGLang, test_swa_unittest.py, as summarised: 16 slots in both pools.
TEST(WindowTokenAllocatorTest, AllocatesInBothPools) {
  WindowTokenAllocator allocator(16, 16);
  const Slots slot = alloc(allocator, 1);
  EXPECT_EQ(allocator.available() + allocator.window_available(), 30);
  EXPECT_TRUE(allocator.has_window_copy(slot[0]));
  allocator.free_window(slot);
  EXPECT_THAT(window_of(allocator, slot), ElementsAre(0));
  EXPECT_FALSE(allocator.has_window_copy(slot[0]));
  EXPECT_EQ(allocator.available(), 15);
  EXPECT_EQ(allocator.window_available(), 16);
  allocator.check_invariants();
}

TEST(WindowTokenAllocatorTest, NeedsRoomInBoth) {
  WindowTokenAllocator allocator(16, 8, 4);
  Slots slots = alloc(allocator, 5);
  EXPECT_THAT(slots, ElementsAre(4, 5, 6, 7, 8));
  Slots more(1, -7);
  EXPECT_FALSE(allocator.alloc(more));
  EXPECT_EQ(more[0], -7);
  EXPECT_EQ(allocator.available(), 8);
  allocator.free_window(Slots{4});
  EXPECT_THAT(window_of(allocator, slots), ElementsAre(0, 1, 2, 3, 8));
  EXPECT_TRUE(allocator.alloc(more));
  EXPECT_EQ(more[0], 12);
  EXPECT_THAT(window_of(allocator, {12, 13, 0, -1, 99}), ElementsAre(4, 1, 0, -1, 3));
  allocator.free(slots);
  EXPECT_EQ(allocator.window_available(), 4);
  allocator.check_invariants();
}

TEST(WindowTokenAllocatorTest, GrowsRequests) {
  WindowTokenAllocator allocator(16, 12, 4);
  Slots slots(9);
  ASSERT_TRUE(allocator.alloc_extend(Slots{0, 0}, Slots{6, 3}, Slots{-1, -1}, slots));
  EXPECT_THAT(slots, ElementsAre(4, 5, 6, 7, 8, 9, 12, 13, 14));
  EXPECT_EQ(allocator.window_available(), 0);
  Slots next(2);
  ASSERT_TRUE(allocator.alloc_decode(Slots{7, 4}, Slots{9, 14}, next));
  EXPECT_THAT(next, ElementsAre(10, 15));
  EXPECT_FALSE(allocator.alloc_decode(Slots{8, 5}, Slots{10, 15}, next));
  allocator.free_window(Slots{4});
  ASSERT_TRUE(allocator.alloc_decode(Slots{8, 5}, Slots{10, 15}, next));
  EXPECT_THAT(next, ElementsAre(11, 16));
  EXPECT_THAT(window_of(allocator, next), ElementsAre(11, 4));
  allocator.free_window(next);
  EXPECT_THAT(message_of([&] { (void)allocator.alloc_decode(Slots{6}, Slots{16}, std::span(next).first(1)); }),
              HasSubstr("goes on in the page of slot 16, which has no window copy"));
  EXPECT_THAT(
      message_of([&] { (void)allocator.alloc_extend(Slots{5}, Slots{6}, Slots{99}, std::span(next).first(1)); }),
      HasSubstr("the last slot of request 0 is 99, which is not held"));
  allocator.check_invariants();
}

TEST(WindowTokenAllocatorTest, MovesCopies) {
  WindowTokenAllocator allocator(16, 8, 2);
  const Slots tree = alloc(allocator, 4);
  allocator.free_window(Slots{2, 3});
  const Slots own = alloc(allocator, 2);
  const Slots copy = window_of(allocator, own);
  SlotChanges changes;
  changes.moved = {{own[0], tree[0]}, {own[1], tree[1]}};
  changes.freed = own;
  allocator.apply(changes);
  EXPECT_EQ(window_of(allocator, {tree[0], tree[1]}), copy);
  EXPECT_FALSE(allocator.is_held(own[0]));
  EXPECT_EQ(allocator.window_available(), 4);
  allocator.check_invariants();

  const auto move = [&](int32_t from, int32_t to) {
    const SlotChanges::Move one{from, to};
    return message_of([&] { allocator.move_window({&one, 1}); });
  };
  EXPECT_THAT(move(tree[0], tree[2]), HasSubstr("cannot become that of slot 4, which has one"));
  EXPECT_THAT(move(tree[0], tree[3]), HasSubstr("their offsets in pages of 2 differ"));
  EXPECT_THAT(move(own[0], tree[2]), HasSubstr("is not held"));
  EXPECT_THAT(move(tree[0], own[0]), HasSubstr("is not held"));
  allocator.free_window(Slots{tree[2]});
  EXPECT_THAT(move(tree[2], tree[0]), HasSubstr("there is none"));
}

TEST(WindowTokenAllocatorTest, ChecksBeforeItChanges) {
  WindowTokenAllocator allocator(4, 4);
  const Slots slots = alloc(allocator, 2);
  EXPECT_THAT(message_of([&] { allocator.free_window(Slots{1, 3}); }), HasSubstr("slot 3 is not held"));
  EXPECT_THAT(message_of([&] { allocator.free(Slots{1, 3}); }), HasSubstr("slot 3 is not held"));
  EXPECT_TRUE(allocator.has_window_copy(1));
  allocator.free_window(slots);
  allocator.free_window(slots);
  EXPECT_EQ(allocator.window_available(), 4);
  Slots one(1);
  EXPECT_THAT(message_of([&] { allocator.to_window(slots, one); }), HasSubstr("2 slots and 1 places"));
  EXPECT_THAT(message_of([] { WindowTokenAllocator(8, 7, 2); }), HasSubstr("num_slots is 7"));
  allocator.clear();
  EXPECT_EQ(allocator.available(), 4);
  allocator.check_invariants();
}

}  // namespace
}  // namespace folio
