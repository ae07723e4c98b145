#include "folio/types/float_convert.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace folio {
namespace {

/// A narrow format as its standard describes it, and the functions under test.
struct Format {
  const char* name;
  int exponent_bits;
  int mantissa_bits;
  uint32_t largest_finite;  ///< code
  bool saturates;           ///< else overflows to infinity, the code after the largest finite one
  float (*upcast)(uint32_t code);
  uint32_t (*narrow)(float value);

  uint32_t sign_bit() const { return 1u << (exponent_bits + mantissa_bits); }
};

constexpr std::array<Format, 4> kFormats = {{
    {"float16", 5, 10, 0x7bff, false, [](uint32_t c) { return float16_to_float(static_cast<uint16_t>(c)); },
     [](float v) -> uint32_t { return float_to_float16(v); }},
    {"bfloat16", 8, 7, 0x7f7f, false, [](uint32_t c) { return bfloat16_to_float(static_cast<uint16_t>(c)); },
     [](float v) -> uint32_t { return float_to_bfloat16(v); }},
    {"fp8_e4m3", 4, 3, 0x7e, true, [](uint32_t c) { return fp8_e4m3_to_float(static_cast<uint8_t>(c)); },
     [](float v) -> uint32_t { return float_to_fp8_e4m3(v); }},
    {"fp8_e5m2", 5, 2, 0x7b, true, [](uint32_t c) { return fp8_e5m2_to_float(static_cast<uint8_t>(c)); },
     [](float v) -> uint32_t { return float_to_fp8_e5m2(v); }},
}};

/// The value of a finite, non-negative code, from the definition of such formats.
double defined_value(const Format& format, uint32_t code) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(code >> format.mantissa_bits);
  const int mantissa = static_cast<int>(code & ((1u << format.mantissa_bits) - 1u));
  const double fraction = std::ldexp(mantissa, -format.mantissa_bits);
  return exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1.0 + fraction, exponent - bias);
}

/// Rounds by search: the neighbouring codes of |value| and the midpoint between them, which a double holds exactly.
class Rounder {
 public:
  explicit Rounder(const Format& format) : format_(format) {
    // One step beyond the largest finite code: where the next value would be if the exponent range went on.
    for (uint32_t code = 0; code <= format.largest_finite + 1; ++code) values_.push_back(defined_value(format, code));
  }

  uint32_t operator()(float value) const {
    const uint32_t sign = std::signbit(value) ? format_.sign_bit() : 0;
    const double magnitude = std::fabs(static_cast<double>(value));
    const auto above = std::upper_bound(values_.begin(), values_.end(), magnitude);
    uint32_t code =
        above == values_.end() ? format_.largest_finite + 1 : static_cast<uint32_t>(above - values_.begin() - 1);
    if (above != values_.end()) {
      const double midpoint = (values_[code] + values_[code + 1]) / 2;
      if (magnitude > midpoint || (magnitude == midpoint && code % 2 != 0)) ++code;
    }
    if (format_.saturates) code = std::min(code, format_.largest_finite);
    return sign | code;
  }

  double midpoint(uint32_t code) const { return (values_[code] + values_[code + 1]) / 2; }

 private:
  const Format& format_;
  std::vector<double> values_;
};

class FloatConvert : public ::testing::TestWithParam<Format> {};

TEST_P(FloatConvert, EveryFiniteCodeWidensToItsDefinitionAndBack) {
  const Format& format = GetParam();
  for (uint32_t code = 0; code <= format.largest_finite; ++code) {
    for (const uint32_t sign : {0u, format.sign_bit()}) {
      const float wide = format.upcast(code | sign);
      const double expected = defined_value(format, code) * (sign != 0 ? -1.0 : 1.0);
      ASSERT_EQ(static_cast<double>(wide), expected) << "code " << (code | sign);
      ASSERT_EQ(std::signbit(wide), sign != 0) << "code " << (code | sign);
      ASSERT_EQ(format.narrow(wide), code | sign);
    }
  }
}

TEST_P(FloatConvert, EveryOtherCodeIsInfinityOrNan) {
  const Format& format = GetParam();
  const bool has_infinity = std::string(format.name) != "fp8_e4m3";
  for (uint32_t code = format.largest_finite + 1; code < format.sign_bit(); ++code) {
    for (const uint32_t sign : {0u, format.sign_bit()}) {
      const float wide = format.upcast(code | sign);
      ASSERT_EQ(std::signbit(wide), sign != 0) << "code " << (code | sign);
      if (has_infinity && code == format.largest_finite + 1) {
        ASSERT_TRUE(std::isinf(wide)) << "code " << (code | sign);
        ASSERT_EQ(format.narrow(wide), (format.saturates ? format.largest_finite : code) | sign);
      } else {
        ASSERT_TRUE(std::isnan(wide)) << "code " << (code | sign);
        ASSERT_TRUE(std::isnan(format.upcast(format.narrow(wide)))) << "code " << (code | sign);
        ASSERT_EQ(format.narrow(wide) & format.sign_bit(), sign) << "code " << (code | sign);
      }
    }
  }
}

TEST_P(FloatConvert, MidpointsGoToTheEvenCodeAndTheirNeighboursToTheNearest) {
  const Format& format = GetParam();
  const Rounder rounder(format);
  for (uint32_t code = 0; code < format.largest_finite; ++code) {
    const float middle = static_cast<float>(rounder.midpoint(code));
    ASSERT_EQ(static_cast<double>(middle), rounder.midpoint(code)) << "a midpoint is exact in float";
    const float infinity = std::numeric_limits<float>::infinity();
    for (const float sign : {1.0f, -1.0f}) {
      const uint32_t sign_bit = sign < 0 ? format.sign_bit() : 0;
      ASSERT_EQ(format.narrow(sign * middle), sign_bit | (code % 2 == 0 ? code : code + 1)) << middle;
      ASSERT_EQ(format.narrow(sign * std::nextafter(middle, 0.0f)), sign_bit | code) << middle;
      ASSERT_EQ(format.narrow(sign * std::nextafter(middle, infinity)), sign_bit | (code + 1)) << middle;
    }
  }
}

TEST_P(FloatConvert, RandomFloatsAgreeWithASearch) {
  const Format& format = GetParam();
  const Rounder rounder(format);
  std::mt19937 random(20250711);
  const int smallest_exponent = 2 - (1 << (format.exponent_bits - 1)) - format.mantissa_bits;
  std::uniform_int_distribution<int> exponent(std::max(-149, smallest_exponent - 3), 1 << (format.exponent_bits - 1));
  std::uniform_real_distribution<double> significand(1.0, 2.0);
  for (int i = 0; i < 200'000; ++i) {
    const auto any_bits = static_cast<uint32_t>(random());
    // Half of the values: every float there is. The other half: those around the format's range.
    float value = std::bit_cast<float>(any_bits);
    if (i % 2 == 0) {
      const float near = static_cast<float>(std::ldexp(significand(random), exponent(random)));
      value = (any_bits & 1u) != 0 ? -near : near;
    }
    if (std::isnan(value)) continue;
    ASSERT_EQ(format.narrow(value), rounder(value)) << std::hexfloat << value;
  }
}

TEST_P(FloatConvert, OverflowSaturatesOrBecomesInfinity) {
  const Format& format = GetParam();
  const Rounder rounder(format);
  const uint32_t overflow = format.saturates ? format.largest_finite : format.largest_finite + 1;
  const float limit = static_cast<float>(rounder.midpoint(format.largest_finite));
  for (const float value : {limit, std::numeric_limits<float>::max(), std::numeric_limits<float>::infinity()}) {
    EXPECT_EQ(format.narrow(value), overflow) << value;
    EXPECT_EQ(format.narrow(-value), overflow | format.sign_bit()) << value;
  }
  EXPECT_EQ(format.narrow(std::nextafter(limit, 0.0f)), format.largest_finite);
}

TEST_P(FloatConvert, UnderflowGoesToSignedZeroAtHalfTheSmallestSubnormal) {
  const Format& format = GetParam();
  const float half = static_cast<float>(defined_value(format, 1) / 2);
  EXPECT_EQ(format.narrow(half), 0u);
  EXPECT_EQ(format.narrow(-half), format.sign_bit());
  EXPECT_EQ(format.narrow(std::nextafter(half, 1.0f)), 1u);
  EXPECT_EQ(format.narrow(-std::nextafter(half, 1.0f)), 1u | format.sign_bit());
  EXPECT_EQ(format.narrow(0.0f), 0u);
  EXPECT_EQ(format.narrow(-0.0f), format.sign_bit());
}

TEST_P(FloatConvert, NanStaysNanWithItsSignWhateverItsPayload) {
  const Format& format = GetParam();
  for (const uint32_t payload : {1u, 0x2000u, 0x10000u, 0x200000u, 0x3fffffu, 0x400000u, 0x7fffffu}) {
    for (const uint32_t sign : {0u, 0x80000000u}) {
      const uint32_t code = format.narrow(std::bit_cast<float>(sign | 0x7f800000u | payload));
      EXPECT_TRUE(std::isnan(format.upcast(code))) << payload;
      EXPECT_EQ((code & format.sign_bit()) != 0, sign != 0) << payload;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllFormats, FloatConvert, ::testing::ValuesIn(kFormats),
                         [](const auto& instance) { return std::string(instance.param.name); });

TEST(FloatConvertConstexpr, WorksAtCompileTime) {
  static_assert(float16_to_float(0x3c00) == 1.0f);
  static_assert(float_to_float16(65520.0f) == 0x7c00);
  static_assert(float_to_float16(65519.0f) == 0x7bff);
  static_assert(float_to_bfloat16(1.0f) == 0x3f80);
  static_assert(float_to_fp8_e4m3(448.0f) == 0x7e);
  static_assert(fp8_e5m2_to_float(0x7b) == 57344.0f);
}

TEST(Fp4E2m1, HasEightMagnitudesAndASign) {
  const std::array<float, 8> magnitudes = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  for (uint8_t code = 0; code < 8; ++code) {
    EXPECT_EQ(fp4_e2m1_to_float(code), magnitudes[code]);
    EXPECT_EQ(fp4_e2m1_to_float(static_cast<uint8_t>(code | 8)), -magnitudes[code]);
    EXPECT_EQ(float_to_fp4_e2m1(magnitudes[code]), code);
    EXPECT_EQ(float_to_fp4_e2m1(-magnitudes[code]), code | 8);
    if (code == 7) continue;
    const float middle = (magnitudes[code] + magnitudes[code + 1]) / 2;
    EXPECT_EQ(float_to_fp4_e2m1(middle), code + code % 2) << "ties go to the even code";
    EXPECT_EQ(float_to_fp4_e2m1(std::nextafter(middle, 0.0f)), code);
    EXPECT_EQ(float_to_fp4_e2m1(std::nextafter(middle, 9.0f)), code + 1);
  }
  EXPECT_EQ(float_to_fp4_e2m1(1e30f), 7);
  EXPECT_EQ(float_to_fp4_e2m1(-std::numeric_limits<float>::infinity()), 15);
  EXPECT_EQ(float_to_fp4_e2m1(-std::numeric_limits<float>::quiet_NaN()), 7) << "there is no NaN";
  EXPECT_EQ(float_to_fp4_e2m1(1e-40f), 0);
  const std::array<uint8_t, 2> pairs = {0x21, 0x9f};
  EXPECT_EQ(load_fp4_as_float(pairs.data(), 0), 0.5f);
  EXPECT_EQ(load_fp4_as_float(pairs.data(), 1), 1.0f);
  EXPECT_EQ(load_fp4_as_float(pairs.data(), 2), -6.0f);
  EXPECT_EQ(load_fp4_as_float(pairs.data(), 3), -0.5f);
}

TEST(Int8, RoundsToTheNearestEvenAndSaturates) {
  for (int32_t number = -127; number <= 127; ++number) {
    const auto exact = static_cast<float>(number);
    EXPECT_EQ(float_to_int8(exact), number);
    if (number == 127) continue;
    const float middle = exact + 0.5f;
    EXPECT_EQ(float_to_int8(middle), number + (number % 2 != 0)) << "ties go to the even number";
    EXPECT_EQ(float_to_int8(std::nextafter(middle, -200.0f)), number);
    EXPECT_EQ(float_to_int8(std::nextafter(middle, 200.0f)), number + 1);
  }
  EXPECT_EQ(float_to_int8(127.5f), 127);
  EXPECT_EQ(float_to_int8(-1e30f), -127);
  EXPECT_EQ(float_to_int8(std::numeric_limits<float>::infinity()), 127);
  EXPECT_EQ(float_to_int8(-std::numeric_limits<float>::quiet_NaN()), 0);
  EXPECT_EQ(float_to_int8(1e-40f), 0);
}

TEST(LoadStore, GoThroughTheElementType) {
  const std::array<DType, 5> types = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3,
                                      DType::kFloat8E5M2};
  const int8_t number = -128;  // what others may have stored
  EXPECT_EQ(load_as_float(&number, DType::kInt8, 0), -128.0f);
  for (const DType dtype : types) {
    std::array<unsigned char, 16> memory;
    memory.fill(0xcd);
    store_from_float(memory.data(), dtype, 1, -1.5f);
    EXPECT_EQ(load_as_float(memory.data(), dtype, 1), -1.5f) << to_string(dtype);
    const auto size = static_cast<size_t>(size_of(dtype));
    for (size_t i = 0; i < memory.size(); ++i) {
      const bool written = i >= size && i < 2 * size;
      EXPECT_TRUE(written || memory[i] == 0xcd) << to_string(dtype) << " byte " << i;
    }
  }
}

TEST(LoadStore, IgnoreTypesWithoutElements) {
  for (const DType dtype : {DType::kUnset, DType::kFloat4E2M1x2}) {
    std::array<unsigned char, 4> memory = {0xcd, 0xcd, 0xcd, 0xcd};
    store_from_float(memory.data(), dtype, 0, 1.0f);
    EXPECT_THAT(memory, ::testing::Each(0xcd));
    EXPECT_EQ(load_as_float(memory.data(), dtype, 0), 0.0f);
  }
}

}  // namespace
}  // namespace folio
