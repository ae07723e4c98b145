#include "kernels/cpu/generic/combine/row_convert.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "folio/types/float_convert.hpp"

namespace folio::kernels::generic {
namespace {

uint32_t bits(float value) {
  return std::bit_cast<uint32_t>(value);
}

TEST(LoadRow, AgreesWithTheScalarConversionOnEveryCode) {
  std::vector<uint16_t> codes(65536);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint16_t>(i);
  std::vector<float> wide(codes.size());
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    load_row(codes.data(), dtype, static_cast<int32_t>(codes.size()), wide.data());
    for (size_t i = 0; i < codes.size(); ++i) {
      const float expected = load_as_float(codes.data(), dtype, static_cast<int64_t>(i));
      ASSERT_EQ(bits(wide[i]), bits(expected)) << to_string(dtype) << " code " << i;
    }
  }
}

/// Every exponent with interesting mantissas, neighbours of every float16 and bfloat16 midpoint, and random bits.
std::vector<float> probes() {
  std::vector<float> values;
  for (uint32_t upper = 0; upper < 65536; ++upper) {
    for (const uint32_t lower : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      values.push_back(std::bit_cast<float>((upper << 16) | lower));
    }
  }
  for (uint32_t code = 0; code < 0x7c00; ++code) {
    const float middle = (float16_to_float(static_cast<uint16_t>(code)) +
                          (code == 0x7bff ? 65536.0f : float16_to_float(static_cast<uint16_t>(code + 1)))) /
                         2;
    for (const float value : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1e30f)}) {
      values.push_back(value);
      values.push_back(-value);
    }
  }
  std::mt19937 random(7);
  for (int i = 0; i < 200'000; ++i) values.push_back(std::bit_cast<float>(static_cast<uint32_t>(random())));
  return values;
}

TEST(StoreRow, AgreesWithTheScalarConversion) {
  const std::vector<float> values = probes();
  const auto n = static_cast<int32_t>(values.size());
  for (const DType dtype :
       {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    std::vector<uint32_t> memory(values.size());
    std::vector<uint32_t> expected(values.size());
    store_row(values.data(), 1.0f, dtype, n, memory.data());
    for (int64_t i = 0; i < n; ++i) store_from_float(expected.data(), dtype, i, values[static_cast<size_t>(i)]);
    const auto size = static_cast<size_t>(size_of(dtype));
    for (size_t i = 0; i < values.size(); ++i) {
      const auto* got = reinterpret_cast<const unsigned char*>(memory.data()) + i * size;
      const auto* want = reinterpret_cast<const unsigned char*>(expected.data()) + i * size;
      ASSERT_EQ(std::memcmp(got, want, size), 0)
          << to_string(dtype) << " of " << std::hexfloat << values[i] << ": " << load_as_float(got, dtype, 0)
          << " instead of " << load_as_float(want, dtype, 0);
    }
  }
}

TEST(StoreRow, DividesByTheScaleOfFp8Only) {
  const float values[3] = {1.0f, -3.0f, 1000.0f};
  uint8_t codes[3];
  store_row(values, 0.05f, DType::kFloat8E4M3, 3, codes);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(codes[i], float_to_fp8_e4m3(values[i] / 0.05f));
  EXPECT_EQ(codes[2], 0x7e);  // 20,000 saturates
  uint16_t halves[3];
  store_row(values, 1.0f, DType::kFloat16, 3, halves);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(halves[i], float_to_float16(values[i]));
}

TEST(RowConvert, WritesNothingBeyondTheRow) {
  const float values[5] = {1, 2, 3, 4, 5};
  uint16_t codes[8] = {9, 9, 9, 9, 9, 9, 9, 9};
  store_row(values, 1.0f, DType::kBFloat16, 5, codes);
  EXPECT_EQ(codes[4], float_to_bfloat16(5.0f));
  EXPECT_EQ(codes[5], 9);
  float wide[6] = {-1, -1, -1, -1, -1, -1};
  load_row(codes, DType::kBFloat16, 5, wide);
  EXPECT_EQ(wide[4], 5.0f);
  EXPECT_EQ(wide[5], -1.0f);
}

}  // namespace
}  // namespace folio::kernels::generic
