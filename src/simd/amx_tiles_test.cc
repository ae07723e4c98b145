#include "simd/amx_tiles.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "platform/cpu_features.hpp"
#include "simd/emulated_tiles_test_util.hpp"

namespace folio::inline v0::simd {
namespace {

struct Operands {
  alignas(64) uint16_t left[16][32];
  alignas(64) uint16_t right[16][32];
  alignas(64) float sum[16][16];
};

uint16_t bfloat16_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

Operands random_operands(std::mt19937& random, float magnitude) {
  Operands operands;
  std::normal_distribution<float> normal(0.0f, magnitude);
  for (auto& row : operands.left) {
    for (uint16_t& code : row) code = bfloat16_of(normal(random));
  }
  for (auto& row : operands.right) {
    for (uint16_t& code : row) code = bfloat16_of(normal(random));
  }
  for (auto& row : operands.sum) {
    for (float& value : row) value = normal(random);
  }
  return operands;
}

/// Rows `stride` floats apart: the sum with one product added.
template <class Tiles>
std::vector<float> added(const Operands& operands, int64_t stride) {
  std::vector<float> result(static_cast<size_t>(16 * stride), -1.0f);
  Tiles::configure();
  Tiles::template load<2>(operands.sum, 64);
  Tiles::template load<4>(operands.left, 64);
  Tiles::template load<7>(operands.right, 64);
  Tiles::template multiply_add<2, 4, 7>();
  Tiles::template store<2>(result.data(), stride * 4);
  Tiles::template zero<2>();
  Tiles::release();
  return result;
}

TEST(EmulatedTiles, AddProductsOfPairs) {
  Operands operands{};
  operands.left[3][10] = bfloat16_of(2.0f);
  operands.left[3][11] = bfloat16_of(3.0f);
  operands.right[5][2 * 7] = bfloat16_of(10.0f);
  operands.right[5][2 * 7 + 1] = bfloat16_of(100.0f);
  operands.sum[3][7] = 1000.0f;
  operands.sum[9][1] = 5.0f;
  const std::vector<float> result = added<EmulatedTiles>(operands, 20);
  EXPECT_EQ(result[3 * 20 + 7], 1320.0f);
  EXPECT_EQ(result[9 * 20 + 1], 5.0f);
  EXPECT_EQ(result[3 * 20 + 6], 0.0f);
  EXPECT_EQ(result[3 * 20 + 17], -1.0f);  // between the rows
}

TEST(EmulatedTiles, TakeDenormalsAsZero) {
  Operands operands{};
  operands.left[0][0] = 1;  // the smallest bfloat16
  operands.right[0][0] = bfloat16_of(0x1p126f);
  EXPECT_EQ(added<EmulatedTiles>(operands, 16)[0], 0.0f);
}

TEST(AmxTiles, GiveTheBitsOfTheEmulation) {
  if (!platform::cpu_features().amx_bf16) GTEST_SKIP() << "no AMX on this CPU, or not granted";
  std::mt19937 random(1);
  for (const float magnitude : {1.0f, 1e-19f, 1e-30f, 1e18f}) {
    for (int i = 0; i < 50; ++i) {
      Operands operands = random_operands(random, magnitude);
      if (i % 5 == 4) {
        operands.left[i % 16][i % 32] = bfloat16_of(std::numeric_limits<float>::infinity());
        operands.left[(i + 1) % 16][3] = 0x0042;  // denormal
        operands.sum[2][i % 16] = 1e-40f;
      }
      const std::vector<float> got = added<AmxTiles>(operands, 24);
      const std::vector<float> want = added<EmulatedTiles>(operands, 24);
      for (size_t at = 0; at < got.size(); ++at) {
        if (want[at] != want[at] && got[at] != got[at]) continue;  // any NaN
        uint32_t got_bits, want_bits;
        std::memcpy(&got_bits, &got[at], 4);
        std::memcpy(&want_bits, &want[at], 4);
        ASSERT_EQ(got_bits, want_bits) << "magnitude " << magnitude << " at " << at << ": " << got[at] << " against "
                                       << want[at];
      }
    }
  }
}

/// What a tile load reads must have been stored before, and what a tile store writes must be read after: neither is
/// visible in the instructions' operands.
TEST(AmxTiles, SeeTheStoresBeforeThem) {
  if (!platform::cpu_features().amx_bf16) GTEST_SKIP() << "no AMX on this CPU, or not granted";
  AmxTiles::configure();
  alignas(64) float scratch[16][16];
  for (int round = 0; round < 3; ++round) {
    for (auto& row : scratch) {
      for (float& value : row) value = static_cast<float>(round);
    }
    AmxTiles::load<0>(scratch, 64);
    for (auto& row : scratch) {
      for (float& value : row) value = -1.0f;
    }
    AmxTiles::store<0>(scratch, 64);
    EXPECT_EQ(scratch[15][15], static_cast<float>(round));
  }
  AmxTiles::release();
}

}  // namespace
}  // namespace folio::inline v0::simd
