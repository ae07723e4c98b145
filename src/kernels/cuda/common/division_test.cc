#include "kernels/cuda/common/division.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "folio/types/float_convert.hpp"

namespace folio::inline v0::kernels::cuda {
namespace {

float quotient(float value, float divisor) {
  Divisor(divisor).divide<1>(&value);
  return value;
}

float from_bits(uint32_t bits) {
  return std::bit_cast<float>(bits);
}

/// Around the quotients that lie between two codes of an 8-bit type a wrong last bit would be another code.
TEST(Divisor, GivesTheRoundedQuotientWhereCodesMeet) {
  std::mt19937 random(5);
  for (int32_t i = 0; i < 20000; ++i) {
    const float divisor = from_bits(0x3f800000u | static_cast<uint32_t>(random() & 0x7fffffu));
    for (int32_t middle = 1; middle < 32; middle += 2) {
      const float exact = static_cast<float>(middle) * divisor;
      for (int32_t off = -2; off <= 2; ++off) {
        const float value = from_bits(std::bit_cast<uint32_t>(exact) + static_cast<uint32_t>(off));
        ASSERT_EQ(quotient(value, divisor), value / divisor) << value << " / " << divisor;
      }
    }
  }
}

TEST(Divisor, GivesTheCodesOfADivisionOfAnyNumbers) {
  std::mt19937 random(6);
  for (int32_t i = 0; i < 400000; ++i) {
    const float value = from_bits(static_cast<uint32_t>(random()));
    const float divisor = std::abs(from_bits(static_cast<uint32_t>(random())));
    if (std::isnan(value) || !std::isfinite(divisor) || divisor == 0.0f) continue;
    ASSERT_EQ(float_to_fp8_e4m3(quotient(value, divisor)), float_to_fp8_e4m3(value / divisor))
        << value << " / " << divisor;
    ASSERT_EQ(float_to_fp8_e5m2(quotient(value, divisor)), float_to_fp8_e5m2(value / divisor))
        << value << " / " << divisor;
  }
}

TEST(Divisor, KeepsSignsOfZerosInfinitiesAndNans) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float divisor : {0.3f, 1.0f, 0x1p-60f, 0x1p100f}) {
    EXPECT_TRUE(std::signbit(quotient(-0.0f, divisor)));
    EXPECT_FALSE(std::signbit(quotient(0.0f, divisor)));
    EXPECT_EQ(quotient(kInfinity, divisor), kInfinity);
    EXPECT_EQ(quotient(-kInfinity, divisor), -kInfinity);
    EXPECT_TRUE(std::isnan(quotient(std::numeric_limits<float>::quiet_NaN(), divisor)));
  }
}

}  // namespace
}  // namespace folio::inline v0::kernels::cuda
