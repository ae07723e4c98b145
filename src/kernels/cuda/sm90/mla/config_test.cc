#include "kernels/cuda/sm90/mla/config.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace folio::kernels::cuda::sm90::mla {
namespace {

/// The 128-byte swizzle of hardware: bits 4 to 6 of an address by bits 7 to 9.
int32_t swizzled(int32_t linear) {
  return linear ^ (linear >> 7 & 7) << 4;
}

TEST(Sm90MlaConfig, ChunksOfATileLieWhereTmaWritesThemAndMmaReadsThem) {
  std::set<int32_t> offsets;
  for (int32_t token = 0; token < kBlockN; ++token) {
    for (int32_t chunk = 0; chunk < 8 * kColumnBlocks; ++chunk) {
      EXPECT_EQ(tile_offset(token, chunk), swizzled(chunk / 8 * kColumnBlockBytes + token * 128 + chunk % 8 * 16));
      offsets.insert(tile_offset(token, chunk));
    }
  }
  EXPECT_EQ(offsets.size(), static_cast<size_t>(kTileBytes / 16));
  EXPECT_EQ(*offsets.rbegin(), kTileBytes - 16);
}

TEST(Sm90MlaConfig, PartsOfATileAreItsColumnBlocks) {
  int32_t blocks = 0;
  for (int32_t part = 0; part < kKvParts; ++part) {
    EXPECT_EQ(part_begin(part), blocks);
    blocks += part_size(part);
  }
  EXPECT_EQ(blocks, kColumnBlocks);
  EXPECT_EQ(part_begin(kRope) * kColumnBlockBytes, kPOffset);
}

TEST(Sm90MlaConfig, Fp8BlocksLandInsideTheirOwnColumnBlocks) {
  std::set<int32_t> offsets;
  int32_t next = 0;
  for (int32_t part = 0; part < kKvParts; ++part) {
    EXPECT_EQ(fp8_block_begin(part), next);
    for (int32_t i = 0; i < fp8_block_count(part); ++i, ++next) {
      const int32_t offset = fp8_block_offset(next);
      EXPECT_TRUE(offsets.insert(offset).second);
      EXPECT_GE(offset, 2 * next * kColumnBlockBytes);
      EXPECT_LE(offset + kColumnBlockBytes, std::min(2 * next + 2, kColumnBlocks) * kColumnBlockBytes);
      EXPECT_EQ(offset / kColumnBlockBytes / kHalfColumnBlocks, part);
    }
  }
  EXPECT_EQ(next, kFp8Blocks);
}

TEST(Sm90MlaConfig, TmaTilesLieInOnePageAndKvTile) {
  EXPECT_EQ(tma_tokens(1), 0);
  EXPECT_EQ(tma_tokens(12), 0);
  EXPECT_EQ(tma_tokens(8), 8);
  EXPECT_EQ(tma_tokens(24), 8);
  EXPECT_EQ(tma_tokens(48), 16);
  EXPECT_EQ(tma_tokens(64), 64);
  EXPECT_EQ(tma_tokens(1024), 64);
}

TEST(Sm90MlaConfig, TmaTilesOfQFillRowTiles) {
  EXPECT_EQ(q_tma_heads(128), 64);
  EXPECT_EQ(q_tma_heads(64), 64);
  EXPECT_EQ(q_tma_heads(16), 16);
  EXPECT_EQ(q_tma_heads(8), 8);
  for (const int32_t group_size : {1, 4, 24, 80}) EXPECT_EQ(q_tma_heads(group_size), 0) << group_size;
}

TEST(Sm90MlaConfig, LoadedTmaTilesAreThoseWithATokenOfTheRange) {
  for (int32_t tokens = kMinTmaTokens; tokens <= kBlockN; tokens *= 2) {
    for (int32_t begin = 0; begin < 3 * kBlockN; begin += 5) {
      for (int32_t end = begin; end < 3 * kBlockN; end += 7) {
        const TmaTileRange got = loaded_tma_tiles(begin, end, kBlockN, tokens);
        for (int32_t i = 0; i < kBlockN / tokens; ++i) {
          const int32_t first = kBlockN + i * tokens;
          const bool loaded = begin < end && first < end && first + tokens > begin;
          EXPECT_EQ(loaded, i >= got.begin && i < got.end) << tokens << " " << begin << " " << end << " " << i;
        }
      }
    }
  }
}

TEST(Sm90MlaConfig, TilesAreMaskedWhereRowsDiffer) {
  const VisibleRange range{100, 900, 200, 700};
  EXPECT_TRUE(needs_mask(range, 192, kBlockN));
  EXPECT_FALSE(needs_mask(range, 256, kBlockN));
  EXPECT_FALSE(needs_mask(range, 576, kBlockN));
  EXPECT_TRUE(needs_mask(range, 640, kBlockN));
  EXPECT_TRUE(is_mixed(range, 640, kBlockN));
  EXPECT_FALSE(is_mixed(range, 256, kBlockN));
  EXPECT_TRUE(has_invisible(range, 64, kBlockN));
  EXPECT_FALSE(has_invisible(range, 128, kBlockN));
  EXPECT_TRUE(has_invisible(range, 896, kBlockN));
  const VisibleRange same{0, 639, 0, 639};  // all rows see the same tokens
  EXPECT_TRUE(needs_mask(same, 576, kBlockN));
  EXPECT_TRUE(has_invisible(same, 576, kBlockN));
  EXPECT_FALSE(is_mixed(same, 576, kBlockN));
}

}  // namespace
}  // namespace folio::kernels::cuda::sm90::mla
