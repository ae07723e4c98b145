#include "testing/guarded_buffer.hpp"

#include <gtest/gtest.h>

#include <utility>

namespace folio::verify {
namespace {

TEST(GuardedBuffer, HoldsItsBytesAndMoves) {
  GuardedBuffer buffer = GuardedBuffer::of(std::vector<int32_t>{1, 2, 3});
  EXPECT_EQ(buffer.as<int32_t>()[2], 3);
  buffer.protect();
  GuardedBuffer other = std::move(buffer);
  EXPECT_EQ(other.as<int32_t>()[0], 1);
  other.unprotect();
  other.fill(0xff);
  EXPECT_EQ(other.as<int32_t>()[1], -1);
}

TEST(GuardedBuffer, SparseOnesHoldWhatIsOpen) {
  GuardedBuffer buffer = GuardedBuffer::sparse(size_t{20} << 30);
  buffer.open(0, 16, 0x11);
  buffer.open(100, 16, 0x22);  // in the same page of the operating system
  buffer.open(size_t{17} << 30, 8, 0x33);
  EXPECT_EQ(buffer.as<uint8_t>()[100], 0x11);
  EXPECT_EQ(buffer.as<uint8_t>()[(size_t{17} << 30) + 7], 0x33);
  buffer.protect();
  buffer.unprotect();
  buffer.as<uint8_t>()[size_t{17} << 30] = 1;
}

TEST(GuardedBuffer, KeptMemoryGoesToTheNextOfItsSizeAsIfItWereNew) {
  void* kept = nullptr;
  {
    const GuardedBuffer buffer(5000, GuardedEnd::kBack, 0x77);
    EXPECT_TRUE(buffer.can_be_kept());
    EXPECT_FALSE(buffer.is_kept());
    buffer.keep();
    buffer.protect();
    kept = buffer.data();
  }
  const GuardedBuffer other(9000);
  EXPECT_NE(other.data(), kept);
  EXPECT_FALSE(other.is_kept());
  GuardedBuffer same(5000);
  ASSERT_EQ(same.data(), kept);
  EXPECT_TRUE(same.is_kept());
  same.as<uint8_t>()[0] = 1;
  for (size_t i = 1; i < same.size(); ++i) ASSERT_EQ(same.as<uint8_t>()[i], 0);
  const GuardedBuffer another(5000);
  EXPECT_NE(another.data(), kept);
  EXPECT_FALSE(GuardedBuffer(size_t{1} << 20).can_be_kept());
  EXPECT_FALSE(GuardedBuffer::sparse(5000).can_be_kept());
}

using GuardedBufferDeathTest = ::testing::Test;

volatile uint8_t sink;

TEST(GuardedBufferDeathTest, CrashesRightBehindItsBack) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const GuardedBuffer buffer(100);
  EXPECT_EQ(buffer.as<uint8_t>()[99], 0);
  EXPECT_DEATH(sink = buffer.as<volatile uint8_t>()[100], "");
}

TEST(GuardedBufferDeathTest, CrashesRightBeforeItsFront) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const GuardedBuffer buffer(100, GuardedEnd::kFront);
  EXPECT_DEATH(sink = buffer.as<volatile uint8_t>()[-1], "");
}

TEST(GuardedBufferDeathTest, CrashesWhenWrittenWhileProtected) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const GuardedBuffer buffer(100);
  buffer.protect();
  EXPECT_DEATH(buffer.as<volatile uint8_t>()[50] = 1, "");
}

TEST(GuardedBufferDeathTest, HasNoReadableByteWhenEmpty) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const GuardedBuffer buffer(0);
  EXPECT_DEATH(sink = buffer.as<volatile uint8_t>()[0], "");
}

}  // namespace
}  // namespace folio::verify
