#include "folio/kvcache/token_allocator.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "core/error_test_util.hpp"
#include "core/golden_test.hpp"
#include "folio/types/error.hpp"

namespace folio {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using testing::message_of;
using Slots = std::vector<int32_t>;

class TokenAllocatorGolden : public ::testing::TestWithParam<testing::GoldenCase> {
 protected:
  /// A call that fills `slots` or answers false, against the slots, null or error that the step expects.
  template <typename Fill>
  static void expect_slots(const json& step, size_t count, Fill fill) {
    Slots slots(count, -7);
    const Slots untouched = slots;
    if (step.contains("error")) {
      EXPECT_THAT(message_of([&] { (void)fill(slots); }), HasSubstr(step.at("error").get<std::string>()));
      EXPECT_EQ(slots, untouched);
    } else if (step.at("slots").is_null()) {
      EXPECT_FALSE(fill(slots));
      EXPECT_EQ(slots, untouched);
    } else {
      EXPECT_TRUE(fill(slots));
      EXPECT_EQ(slots, step.at("slots").get<Slots>());
    }
  }

  static size_t growth(const json& step) {
    const auto before = step.value("prefix_lens", Slots());
    int64_t tokens = 0;
    const auto after = step.at("seq_lens").get<Slots>();
    for (size_t r = 0; r < after.size(); ++r) tokens += before.empty() ? 1 : after[r] - before[r];
    return static_cast<size_t>(std::max<int64_t>(tokens, 0));
  }
};

TEST_P(TokenAllocatorGolden, GivesAndTakes) {
  TokenAllocator allocator(GetParam().at<int32_t>("num_slots"), GetParam().at<int32_t>("page_size"));
  std::optional<TokenAllocator::FreeGroup> group;
  for (const json& step : GetParam().data.at("ops")) {
    SCOPED_TRACE(step.dump());
    const auto op = step.at("op").get<std::string>();
    if (op == "alloc") {
      expect_slots(step, step.at("count").get<size_t>(), [&](Slots& slots) { return allocator.alloc(slots); });
    } else if (op == "free" && step.contains("error")) {
      const int32_t before = allocator.available();
      EXPECT_THAT(message_of([&] { allocator.free(step.at("slots").get<Slots>()); }),
                  HasSubstr(step.at("error").get<std::string>()));
      EXPECT_EQ(allocator.available(), before);
    } else if (op == "free") {
      allocator.free(step.at("slots").get<Slots>());
    } else if (op == "available") {
      EXPECT_EQ(allocator.available(), step.at("slots").get<int32_t>());
    } else if (op == "begin_group") {
      group.emplace(allocator.free_group());
    } else if (op == "end_group") {
      group.reset();
    } else if (op == "extend" || op == "decode") {
      const auto before = step.value("prefix_lens", Slots());
      const auto after = step.at("seq_lens").get<Slots>();
      const auto last = step.at("last_slots").get<Slots>();
      expect_slots(step, growth(step), [&](Slots& slots) {
        return op == "extend" ? allocator.alloc_extend(before, after, last, slots)
                              : allocator.alloc_decode(after, last, slots);
      });
    } else {
      FAIL() << "no such op";
    }
    allocator.check_invariants();
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, TokenAllocatorGolden,
                         ::testing::ValuesIn(testing::golden_cases("kvcache/token_allocator")),
                         testing::golden_case_name);

TEST(TokenAllocatorTest, ChecksItsSizes) {
  EXPECT_THAT(message_of([] { TokenAllocator(10, 4); }), HasSubstr("num_slots is 10; it must be a multiple"));
  EXPECT_THAT(message_of([] { TokenAllocator(-4, 4); }), HasSubstr("num_slots is -4"));
  EXPECT_THAT(message_of([] { TokenAllocator(4, 0); }), HasSubstr("page_size is 0"));
  EXPECT_THAT(message_of([] { TokenAllocator(INT32_MAX, 1); }), HasSubstr("2^31 - 1 - page_size"));
  TokenAllocator none(0, 4);
  Slots slots(1);
  EXPECT_FALSE(none.alloc(slots));
  EXPECT_TRUE(none.alloc({}));
  none.check_invariants();
}

TEST(TokenAllocatorTest, ChecksTheNumbersOfArguments) {
  TokenAllocator allocator(8, 4);
  const Slots one{0};
  const Slots two{0, 0};
  Slots slots(3);
  EXPECT_THAT(message_of([&] { (void)allocator.alloc_extend(one, two, two, slots); }),
              HasSubstr("one of each a request"));
  EXPECT_THAT(message_of([&] { (void)allocator.alloc_decode(one, two, slots); }), HasSubstr("one of each a request"));
  EXPECT_THAT(message_of([&] { (void)allocator.alloc_extend(one, Slots{2}, one, slots); }),
              HasSubstr("slots has 3 entries; the requests grow by 2 tokens"));
  EXPECT_EQ(allocator.available(), 8);
}

/// One request's last slot is the slot that another of the same call is to get: both would get the one behind it.
TEST(TokenAllocatorTest, ALastSlotThatTheSameCallHandsOut_IsNotHeldYet) {
  TokenAllocator allocator(8, 4);
  Slots first(1);
  ASSERT_TRUE(allocator.alloc(first));
  const Slots prefix_lens{1, 2}, seq_lens{3, 3}, last_slots{first[0], first[0] + 1};
  Slots slots(3, -7);
  EXPECT_EQ(message_of([&] { (void)allocator.alloc_extend(prefix_lens, seq_lens, last_slots, slots); }),
            "the last slot of request 1 is 5, which is not held");
  EXPECT_EQ(slots, Slots(3, -7));
  allocator.check_invariants();
}

TEST(TokenAllocatorTest, HasOneGroupAtATime) {
  TokenAllocator allocator(4);
  Slots slots(2);
  ASSERT_TRUE(allocator.alloc(slots));
  {
    TokenAllocator::FreeGroup group = allocator.free_group();
    TokenAllocator::FreeGroup moved = std::move(group);
    EXPECT_THAT(message_of([&] { (void)allocator.free_group(); }), HasSubstr("groups do not nest"));
    EXPECT_THAT(message_of([&] { allocator.clear(); }), HasSubstr("group of frees is open"));
    allocator.free(slots);
    EXPECT_EQ(allocator.available(), 2);
  }
  EXPECT_EQ(allocator.available(), 4);
  allocator.check_invariants();
}

TEST(TokenAllocatorTest, IsAsNewAfterClear) {
  TokenAllocator allocator(130);
  Slots slots(100);
  ASSERT_TRUE(allocator.alloc(slots));
  allocator.free(Slots{7, 70});
  EXPECT_TRUE(allocator.is_held(8));
  EXPECT_FALSE(allocator.is_held(7));
  allocator.clear();
  EXPECT_FALSE(allocator.is_held(8));
  EXPECT_EQ(allocator.available(), 130);
  ASSERT_TRUE(allocator.alloc(slots));
  EXPECT_EQ(slots.front(), 1);
  EXPECT_EQ(slots.back(), 100);
  allocator.check_invariants();
}

}  // namespace
}  // namespace folio
