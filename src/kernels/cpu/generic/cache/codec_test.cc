#include "kernels/cpu/generic/cache/codec.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <vector>

#include "folio/types/float_convert.hpp"

namespace folio::inline v0::kernels::generic {
namespace {

/// Floats that try every rounding: all upper halves combined with lower halves around ties, and a coprime stride
/// through all bit patterns.
template <typename Check>
void for_many_floats(Check check) {
  for (uint32_t high = 0; high < 0x10000; ++high) {
    for (uint32_t low :
         {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u, 0xefffu, 0xf000u, 0xf001u, 0xffffu}) {
      check(std::bit_cast<float>((high << 16) | low));
    }
  }
  uint32_t bits = 0;
  for (int i = 0; i < (1 << 20); ++i, bits += 4099u * 997u) check(std::bit_cast<float>(bits));
}

template <DType kDType, typename Expected>
void check_encode(Expected expected) {
  int64_t wrong = 0;
  for_many_floats([&](float value) {
    if (Codec<kDType>::encode(value) != expected(value) && wrong++ < 5) {
      ADD_FAILURE() << std::hex << "float bits " << std::bit_cast<uint32_t>(value) << ": "
                    << static_cast<uint32_t>(Codec<kDType>::encode(value)) << ", expected "
                    << static_cast<uint32_t>(expected(value));
    }
  });
  EXPECT_EQ(wrong, 0);
}

template <DType kDType, typename Code, typename Expected>
void check_decode(uint32_t codes, Expected expected) {
  for (uint32_t code = 0; code < codes; ++code) {
    ASSERT_EQ(std::bit_cast<uint32_t>(Codec<kDType>::decode(static_cast<Code>(code))),
              std::bit_cast<uint32_t>(expected(static_cast<Code>(code))))
        << std::hex << "code " << code;
  }
}

TEST(Codec, EncodesAsFloatConvertDoes) {
  check_encode<DType::kBFloat16>([](float v) { return float_to_bfloat16(v); });
  check_encode<DType::kFloat16>([](float v) { return float_to_float16(v); });
  check_encode<DType::kFloat8E4M3>([](float v) { return float_to_fp8_e4m3(v); });
  check_encode<DType::kFloat8E5M2>([](float v) { return float_to_fp8_e5m2(v); });
  check_encode<DType::kInt8>([](float v) { return float_to_int8(v); });
}

TEST(Codec, DecodesEveryCodeAsFloatConvertDoes) {
  check_decode<DType::kBFloat16, uint16_t>(0x10000, [](uint16_t c) { return bfloat16_to_float(c); });
  check_decode<DType::kFloat16, uint16_t>(0x10000, [](uint16_t c) { return float16_to_float(c); });
  check_decode<DType::kFloat8E4M3, uint8_t>(0x100, [](uint8_t c) { return fp8_e4m3_to_float(c); });
  check_decode<DType::kFloat8E5M2, uint8_t>(0x100, [](uint8_t c) { return fp8_e5m2_to_float(c); });
  check_decode<DType::kInt8, int8_t>(0x100, [](int8_t c) { return static_cast<float>(c); });
}

}  // namespace
}  // namespace folio::inline v0::kernels::generic
