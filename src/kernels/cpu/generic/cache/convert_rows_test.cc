#include "kernels/cpu/generic/cache/convert_rows.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "folio/types/float_convert.hpp"

namespace folio::inline v0::kernels::generic {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32,    DType::kFloat16,    DType::kBFloat16,
                             DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kInt8};

bool has_scale(DType dtype) {
  return is_fp8(dtype) || dtype == DType::kInt8;
}

/// Random bits: infinities, NaNs and subnormals included.
std::vector<std::byte> random_bytes(size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(n);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

/// What the contract says, one element at a time.
void convert_plainly(DType from_type, DType to_type, const std::byte* from, int from_step, std::byte* to, int to_step,
                     int64_t n, float from_scale, float to_scale) {
  for (int64_t i = 0; i < n; ++i) {
    float value = load_as_float(from, from_type, i * from_step);
    if (has_scale(from_type)) value *= from_scale;
    if (has_scale(to_type)) value /= to_scale;
    store_from_float(to, to_type, i * to_step, value);
  }
}

TEST(ConvertRow, EveryPairOfTypesAndSteps) {
  for (DType from_type : kDTypes) {
    for (DType to_type : kDTypes) {
      const RowConversion conversion = row_conversion(from_type, to_type, false);
      for (int from_step : {1, 2}) {
        for (int to_step : {1, 2}) {
          if ((from_step == 2 && from_type == DType::kFloat32) || (to_step == 2 && to_type == DType::kFloat32))
            continue;
          for (int64_t n : {int64_t{1}, int64_t{7}, int64_t{64}, int64_t{300}, int64_t{576}}) {
            const auto from = random_bytes(static_cast<size_t>(2 * n * 4), static_cast<uint32_t>(n));
            auto got = random_bytes(static_cast<size_t>(2 * n * 4 + 16), 5);
            auto expected = got;
            convert_row(conversion, {from.data(), from_step}, {got.data(), to_step}, n, 0.37f, 0.029f);
            convert_plainly(from_type, to_type, from.data(), from_step, expected.data(), to_step, n, 0.37f, 0.029f);
            if (has_scale(from_type) || has_scale(to_type) || from_type != to_type) {
              // NaN payloads that pass through an arithmetic operation are the processor's business.
              for (int64_t i = 0; i < n; ++i) {
                const float x = load_as_float(got.data(), to_type, i * to_step);
                const float y = load_as_float(expected.data(), to_type, i * to_step);
                if (x != x && y != y) store_from_float(expected.data(), to_type, i * to_step, x);
                if (x != x && y != y) store_from_float(got.data(), to_type, i * to_step, x);
              }
            }
            ASSERT_EQ(std::memcmp(got.data(), expected.data(), got.size()), 0)
                << to_string(from_type) << " to " << to_string(to_type) << " steps " << from_step << ", " << to_step
                << " n " << n;
          }
        }
      }
    }
  }
}

TEST(ConvertRow, BitwiseKeepsEveryBit) {
  for (DType type : kDTypes) {
    const RowConversion conversion = row_conversion(type, type, true);
    const int64_t n = 300;
    const auto bytes = static_cast<size_t>(n * size_of(type));
    const auto from = random_bytes(bytes, 3);
    std::vector<std::byte> to(bytes);
    convert_row(conversion, {from.data(), 1}, {to.data(), 1}, n, 7.0f, 5.0f);
    EXPECT_EQ(from, to);
  }
}

/// The scale is that of the whole row, also where a row passes through buffers, and of finite values alone.
TEST(QuantizeRow, TakesTheLargestFiniteMagnitude) {
  for (DType type : kDTypes) {
    const RowConversion conversion = row_conversion(type, DType::kInt8, false);
    for (int step : {1, 2}) {
      if (step == 2 && type == DType::kFloat32) continue;
      const int64_t n = 576;
      auto from = random_bytes(static_cast<size_t>(2 * n * 4), 9);
      for (int64_t i = 0; i < 2 * n; ++i) store_from_float(from.data(), type, i, 0.01f * static_cast<float>(i % 100));
      store_from_float(from.data(), type, (n - 1) * step, 50.0f);
      store_from_float(from.data(), type, 3 * step, std::numeric_limits<float>::infinity());
      store_from_float(from.data(), type, 5 * step, std::numeric_limits<float>::quiet_NaN());
      float most = 0.0f;
      for (int64_t i = 0; i < n; ++i) {
        const float value = load_as_float(from.data(), type, i * step) * (has_scale(type) ? 0.5f : 1.0f);
        if (std::isfinite(value)) most = std::max(most, std::abs(value));
      }
      std::vector<std::byte> got(static_cast<size_t>(n));
      float scale = 0.0f;
      quantize_row(conversion, {from.data(), step}, {got.data(), 1}, n, 0.5f, scale);
      EXPECT_EQ(scale, most / 127.0f) << to_string(type);
      std::vector<std::byte> expected(got.size());
      convert_row(conversion, {from.data(), step}, {expected.data(), 1}, n, 0.5f, scale);
      EXPECT_EQ(got, expected);
    }
  }
}

TEST(ConvertPair, EqualsTwoRows) {
  for (DType from_type : kDTypes) {
    for (DType to_type : {DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kInt8}) {
      const RowConversion conversion = row_conversion(from_type, to_type, false);
      for (int64_t n : {int64_t{8}, int64_t{128}, int64_t{264}}) {
        const auto even = random_bytes(static_cast<size_t>(n * 4), 1);
        const auto odd = random_bytes(static_cast<size_t>(n * 4), 2);
        std::vector<std::byte> got(static_cast<size_t>(2 * n * size_of(to_type)));
        std::vector<std::byte> expected(got.size());
        convert_pair(conversion, even.data(), odd.data(), got.data(), n, 2.0f, 0.5f);
        convert_row(conversion, {even.data(), 1}, {expected.data(), 2}, n, 2.0f, 0.5f);
        convert_row(conversion, {odd.data(), 1}, {expected.data() + size_of(to_type), 2}, n, 2.0f, 0.5f);
        ASSERT_EQ(got, expected) << to_string(from_type) << " to " << to_string(to_type);
      }
    }
  }
}

}  // namespace
}  // namespace folio::inline v0::kernels::generic
