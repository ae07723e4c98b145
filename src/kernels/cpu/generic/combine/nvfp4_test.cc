#include "kernels/cpu/generic/combine/row_convert.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include "folio/types/float_convert.hpp"
#include "folio/types/nvfp4.hpp"

namespace folio::kernels::generic {
namespace {

TEST(Nvfp4Layout, GivesEveryBlockItsOwnByte) {
  for (const int64_t blocks : {1, 3, 4, 5, 40}) {
    for (const int64_t rows : {1, 31, 32, 33, 128, 129, 300}) {
      std::set<int64_t> seen;
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t block = 0; block < blocks; ++block) seen.insert(nvfp4_scale_index(row, block, blocks));
      }
      EXPECT_EQ(static_cast<int64_t>(seen.size()), rows * blocks);
      EXPECT_GE(*seen.begin(), 0);
      EXPECT_LT(*seen.rbegin(), nvfp4_scale_bytes(rows, blocks));
    }
  }
  EXPECT_EQ(nvfp4_scale_index(0, 0, 5), 0);
  EXPECT_EQ(nvfp4_scale_index(1, 0, 5), 16) << "rows of a quarter follow each other 16 bytes apart";
  EXPECT_EQ(nvfp4_scale_index(32, 3, 5), 4 + 3) << "the quarters of a tile's rows stand side by side";
  EXPECT_EQ(nvfp4_scale_index(0, 4, 5), 512) << "blocks 4 and up are another tile";
  EXPECT_EQ(nvfp4_scale_index(128, 0, 5), 1024) << "5 blocks are two tiles";
  EXPECT_EQ(nvfp4_scale_bytes(129, 5), 256 * 8);
}

TEST(Nvfp4, ANaNStaysVisibleAndSpoilsItsBlockOnly) {
  std::vector<float> values(32, 1.0f);
  values[19] = std::numeric_limits<float>::quiet_NaN();
  std::vector<uint8_t> data(16), scales(512);
  const Nvfp4Place place{scales.data(), 0, 0, 2};
  store_nvfp4(values.data(), 1.0f, 32, data.data(), place);
  std::vector<float> back(32);
  load_nvfp4(data.data(), 1.0f, 32, place, back.data());
  for (size_t i = 0; i < 32; ++i) EXPECT_EQ(std::isnan(back[i]), i >= 16) << i;
}

TEST(Nvfp4, AnInfinityStaysAtTheLargestValue) {
  std::vector<float> values(16, 1.0f);
  values[3] = -std::numeric_limits<float>::infinity();
  std::vector<uint8_t> data(8), scales(512);
  const Nvfp4Place place{scales.data(), 0, 0, 1};
  store_nvfp4(values.data(), 1.0f, 16, data.data(), place);
  EXPECT_EQ(fp8_e4m3_to_float(scales[0]), 448.0f);
  std::vector<float> back(16);
  load_nvfp4(data.data(), 1.0f, 16, place, back.data());
  EXPECT_EQ(back[3], -6.0f * 448.0f);
  EXPECT_EQ(back[2], 0.0f);
}

TEST(Nvfp4, EveryE2m1ValueSurvives) {
  std::vector<float> values(16);
  for (uint8_t code = 0; code < 16; ++code) values[code] = fp4_e2m1_to_float(code);
  std::vector<uint8_t> data(8), scales(512);
  store_nvfp4(values.data(), 1.0f, 16, data.data(), {scales.data(), 5, 2, 3});
  EXPECT_EQ(fp8_e4m3_to_float(scales[static_cast<size_t>(nvfp4_scale_index(5, 2, 3))]), 1.0f);
  for (uint8_t i = 0; i < 8; ++i) EXPECT_EQ(data[i], 2 * i | (2 * i + 1) << 4) << "element 2i in the low nibble";
}

}  // namespace
}  // namespace folio::kernels::generic
