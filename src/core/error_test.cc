#include "core/error.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>

namespace folio::core {
namespace {

TEST(Message, JoinsEveryKindOfPart) {
  const std::string name = "head_dim_qk";
  EXPECT_EQ(message(name, " is ", 100, "; ", std::string_view("multiples of "), 8u, ' ', true, ' ', DType::kFloat8E4M3),
            "head_dim_qk is 100; multiples of 8 true fp8_e4m3");
  EXPECT_EQ(message(), "");
}

TEST(Message, WritesIntegersWhole) {
  EXPECT_EQ(message(std::numeric_limits<int64_t>::min()), "-9223372036854775808");
  EXPECT_EQ(message(std::numeric_limits<uint64_t>::max()), "18446744073709551615");
  EXPECT_EQ(message(int8_t{-5}, ' ', uint8_t{200}, ' ', int16_t{-300}), "-5 200 -300");
}

TEST(Message, WritesFloatsShortestAndNonFinite) {
  EXPECT_EQ(message(0.1f, ' ', 0.1, ' ', -2.0), "0.1 0.1 -2");
  EXPECT_EQ(message(-std::numeric_limits<double>::max()), "-1.7976931348623157e+308");
  EXPECT_EQ(message(std::numeric_limits<float>::infinity(), ' ', std::numeric_limits<float>::quiet_NaN()), "inf nan");
}

TEST(Fail, ThrowsTheCodeAndTheText) {
  try {
    fail(ErrorCode::kUnsupported, "page_size is ", 7, "; even ones are taken");
    FAIL() << "did not throw";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_STREQ(error.what(), "page_size is 7; even ones are taken");
  }
}

TEST(Require, ThrowsOnlyWhenFalse) {
  EXPECT_NO_THROW(require(true, "unused"));
  try {
    require(false, "bad ", 1);
    FAIL() << "did not throw";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_STREQ(error.what(), "bad 1");
  }
}

}  // namespace
}  // namespace folio::core
