#include "core/checked_math.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <limits>

namespace folio::core {
namespace {

constexpr int64_t kMax64 = std::numeric_limits<int64_t>::max();
constexpr int64_t kMin64 = std::numeric_limits<int64_t>::min();

TEST(CheckedMath, AddsUpToTheLimit) {
  EXPECT_EQ(checked_add(kMax64 - 1, int64_t{1}), kMax64);
  EXPECT_THROW(checked_add(kMax64, int64_t{1}), Error);
  EXPECT_THROW(checked_add(kMin64, int64_t{-1}), Error);
  EXPECT_THROW(checked_add(std::numeric_limits<size_t>::max(), size_t{1}), Error);
  EXPECT_THROW(checked_add(std::numeric_limits<int32_t>::max(), 1), Error);
}

TEST(CheckedMath, SubtractsDownToTheLimit) {
  EXPECT_EQ(checked_sub(kMin64 + 1, int64_t{1}), kMin64);
  EXPECT_THROW(checked_sub(kMin64, int64_t{1}), Error);
  EXPECT_THROW(checked_sub(size_t{0}, size_t{1}), Error);
}

TEST(CheckedMath, MultipliesAnyNumberOfFactors) {
  EXPECT_EQ(checked_mul(int64_t{1} << 31, int64_t{1} << 31), int64_t{1} << 62);
  EXPECT_THROW(checked_mul(int64_t{1} << 32, int64_t{1} << 31), Error);
  EXPECT_EQ(checked_mul(int64_t{2}, int64_t{3}, int64_t{5}, int64_t{7}), 210);
  // The product would be 0, but an intermediate one overflows: refused, since sizes are multiplied in this order.
  EXPECT_THROW(checked_mul(kMax64, int64_t{2}, int64_t{0}), Error);
  EXPECT_THROW(checked_mul(kMin64, int64_t{-1}), Error);
}

TEST(CheckedMath, CastsWhatFits) {
  EXPECT_EQ(checked_cast<int32_t>(int64_t{-2147483648}), std::numeric_limits<int32_t>::min());
  EXPECT_THROW(checked_cast<int32_t>(int64_t{1} << 31), Error);
  EXPECT_THROW(checked_cast<size_t>(int64_t{-1}), Error);
  EXPECT_THROW(checked_cast<int64_t>(std::numeric_limits<uint64_t>::max()), Error);
  EXPECT_EQ(checked_cast<uint64_t>(kMax64), static_cast<uint64_t>(kMax64));
}

TEST(CheckedMath, RoundsUp) {
  EXPECT_EQ(ceil_div(0, 16), 0);
  EXPECT_EQ(ceil_div(1, 16), 1);
  EXPECT_EQ(ceil_div(16, 16), 1);
  EXPECT_EQ(ceil_div(17, 16), 2);
  EXPECT_EQ(ceil_div(kMax64, kMax64 - 1), 2);
  EXPECT_EQ(checked_round_up(size_t{257}, size_t{256}), 512u);
  EXPECT_EQ(checked_round_up(size_t{512}, size_t{256}), 512u);
  EXPECT_THROW(checked_round_up(std::numeric_limits<size_t>::max(), size_t{256}), Error);
}

TEST(CheckedMath, SaysWhatOverflowed) {
  try {
    checked_mul(kMax64, int64_t{2});
    FAIL() << "did not throw";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_STREQ(error.what(), "9223372036854775807 * 2 overflows");
  }
}

}  // namespace
}  // namespace folio::core
