#include "kernels/cuda/sm90/mla/shape.hpp"

#include <gtest/gtest.h>

#include <set>

namespace folio::kernels::cuda::sm90::mla {
namespace {

/// Where hardware puts 16 bytes that lie at `linear` before pieces are exchanged: bits 4 to 6 by bits 7 to 9.
int32_t exchanged(int32_t linear) {
  return linear ^ (linear >> 7 & 7) << 4;
}

TEST(Sm90MlaConfig, PiecesOfATileStandWhereBoxesLeaveThemAndProductsFindThem) {
  std::set<int32_t> offsets;
  for (int32_t token = 0; token < kTokens; ++token) {
    for (int32_t piece = 0; piece < kDimQk / kPiece; ++piece) {
      EXPECT_EQ(tile_offset(token, piece), exchanged(piece / 8 * kColumnBytes + token * 128 + piece % 8 * 16));
      offsets.insert(tile_offset(token, piece));
    }
  }
  EXPECT_EQ(offsets.size(), static_cast<size_t>(kTileBytes / 16));
  EXPECT_EQ(*offsets.rbegin(), kTileBytes - 16);
}

TEST(Sm90MlaConfig, PartsOfATileAreItsColumns) {
  int32_t columns = 0;
  for (int32_t part = 0; part < kParts; ++part) {
    EXPECT_EQ(part_begin(part), columns);
    columns += part_columns(part);
  }
  EXPECT_EQ(columns, kColumns);
  EXPECT_EQ(part_begin(kTail) * kColumnBytes, kWeights);
}

TEST(Sm90MlaConfig, BoxesLieInOnePageAndTile) {
  EXPECT_EQ(box_tokens(1), 0);
  EXPECT_EQ(box_tokens(12), 0);
  EXPECT_EQ(box_tokens(8), 8);
  EXPECT_EQ(box_tokens(24), 8);
  EXPECT_EQ(box_tokens(48), 16);
  EXPECT_EQ(box_tokens(64), 64);
  EXPECT_EQ(box_tokens(1024), 64);
}

TEST(Sm90MlaConfig, SeenBoxesAreThoseWithASeenToken) {
  for (int32_t box = kEight; box <= kTokens; box *= 2) {
    for (int32_t begin = 0; begin < 3 * kTokens; begin += 5) {
      for (int32_t end = begin; end < 3 * kTokens; end += 7) {
        const BoxRange got = seen_boxes({begin, end, begin, end}, kTokens, box);
        int32_t counts[4] = {};
        for (int32_t b = 0; b < kTokens / box; ++b) {
          const int32_t first = kTokens + b * box;
          const bool seen = begin < end && first < end && first + box > begin;
          EXPECT_EQ(seen, b >= got.begin && b < got.end) << box << " " << begin << " " << end << " " << b;
          if (seen) ++counts[b % 4];
        }
        for (int32_t which = 0; which < 4; ++which) EXPECT_EQ(got.count_of(which), counts[which]);
      }
    }
  }
}

TEST(Sm90MlaConfig, TilesAreMaskedWhereRowsDiffer) {
  const Sight sight{100, 900, 200, 700};
  EXPECT_TRUE(needs_mask(sight, 192));
  EXPECT_FALSE(needs_mask(sight, 256));
  EXPECT_FALSE(needs_mask(sight, 576));
  EXPECT_TRUE(needs_mask(sight, 640));
  EXPECT_TRUE(is_mixed(sight, 640));
  EXPECT_FALSE(is_mixed(sight, 256));
  EXPECT_TRUE(has_unseen(sight, 64));
  EXPECT_FALSE(has_unseen(sight, 128));
  EXPECT_TRUE(has_unseen(sight, 896));
  const Sight same{0, 639, 0, 639};  // all rows see the same
  EXPECT_TRUE(needs_mask(same, 576));
  EXPECT_TRUE(has_unseen(same, 576));
  EXPECT_FALSE(is_mixed(same, 576));
}

}  // namespace
}  // namespace folio::kernels::cuda::sm90::mla
