#include "replay/synthetic.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "folio/types/float_convert.hpp"

namespace folio::replay {
namespace {

constexpr int32_t kDim = 128;

std::vector<float> row_as_floats(uint64_t key, DType dtype) {
  std::vector<unsigned char> row(static_cast<size_t>(kDim * size_of(dtype)));
  fill_row(key, dtype, kDim, row.data());
  std::vector<float> values;
  for (int32_t i = 0; i < kDim; ++i) values.push_back(load_as_float(row.data(), dtype, i));
  return values;
}

TEST(Synthetic, ExactInEverySixteenBitType) {
  for (uint64_t key = 0; key < 50; ++key) {
    const std::vector<float> exact = row_as_floats(key, DType::kFloat32);
    EXPECT_EQ(exact, row_as_floats(key, DType::kBFloat16));
    EXPECT_EQ(exact, row_as_floats(key, DType::kFloat16));
  }
}

TEST(Synthetic, RoundedInTheEightBitTypes) {
  const std::vector<float> exact = row_as_floats(3, DType::kFloat32);
  const std::vector<float> e4m3 = row_as_floats(3, DType::kFloat8E4M3);
  const std::vector<float> e5m2 = row_as_floats(3, DType::kFloat8E5M2);
  for (size_t i = 0; i < exact.size(); ++i) {
    EXPECT_EQ(e4m3[i], fp8_e4m3_to_float(float_to_fp8_e4m3(exact[i])));
    EXPECT_EQ(e5m2[i], fp8_e5m2_to_float(float_to_fp8_e5m2(exact[i])));
  }
}

TEST(Synthetic, AsStoredIsWhatACacheGivesBack) {
  std::vector<float> exact = row_as_floats(9, DType::kFloat32);
  std::vector<float> stored(kDim);
  fill_row_as_stored(9, DType::kBFloat16, 1.0f / 128.0f, kDim, stored.data());
  EXPECT_EQ(stored, exact);
  fill_row_as_stored(9, DType::kFloat8E4M3, 1.0f / 128.0f, kDim, stored.data());
  EXPECT_NE(stored, exact);
  for (float& value : exact) value = fp8_e4m3_to_float(float_to_fp8_e4m3(value * 128.0f)) / 128.0f;
  EXPECT_EQ(stored, exact);
}

/// Each row has a scale of its own, as write_kv_cache gives it.
TEST(Synthetic, AsStoredInInt8IsWhatACacheGivesBack) {
  std::vector<float> exact = row_as_floats(9, DType::kFloat32);
  std::vector<float> stored(kDim);
  fill_row_as_stored(9, DType::kInt8, 1.0f, kDim, stored.data());
  float largest = 0.0f;
  for (const float value : exact) largest = std::max(largest, std::abs(value));
  const float scale = largest / 127.0f;
  for (float& value : exact) value = static_cast<float>(float_to_int8(value / scale)) * scale;
  EXPECT_EQ(stored, exact);
}

TEST(Synthetic, SpreadAsPromised) {
  double sum = 0.0;
  double squares = 0.0;
  constexpr int kRows = 2000;
  for (uint64_t key = 0; key < kRows; ++key) {
    for (const float value : row_as_floats(query_row_key(1, static_cast<int32_t>(key), 0, 0, 0), DType::kFloat32)) {
      ASSERT_LT(std::abs(value), 2.0f);
      sum += value;
      squares += static_cast<double>(value) * value;
    }
  }
  const double n = kRows * kDim;
  const double deviation = std::sqrt(4.0 / 3.0);
  EXPECT_LT(std::abs(sum / n), 5.0 * deviation / std::sqrt(n));  // five standard errors
  EXPECT_NEAR(squares / n, 4.0 / 3.0,
              5.0 * (4.0 / 3.0) / std::sqrt(n));  // a uniform square varies by less than its mean
}

TEST(Synthetic, RowsDifferInEveryPartOfTheirKey) {
  std::set<uint64_t> keys;
  for (uint64_t seed = 1; seed < 3; ++seed) {
    for (int32_t layer = 0; layer < 3; ++layer) {
      for (int32_t head = 0; head < 3; ++head) {
        for (uint64_t link = 0; link < 3; ++link) {
          keys.insert(kv_row_key(seed, InputKind::kKey, link, layer, head));
          keys.insert(kv_row_key(seed, InputKind::kValue, link, layer, head));
        }
        for (int32_t request = 0; request < 3; ++request) {
          for (int32_t position = 0; position < 3; ++position) {
            keys.insert(query_row_key(seed, request, position, layer, head));
          }
        }
      }
    }
  }
  EXPECT_EQ(keys.size(), 2u * 9u * (6u + 9u));
}

}  // namespace
}  // namespace folio::replay
