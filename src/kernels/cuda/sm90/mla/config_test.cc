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

/// Of the kernels: packed rows as rows of MMAs; few packed rows, with 16-bit keys and with fp8 keys.
using Layouts = ::testing::Types<RowsLayout, Layout<kSwapAbRows, 2>, Layout<kSwapAbRows, 1>>;
template <typename L>
class Sm90MlaLayout : public ::testing::Test {};
TYPED_TEST_SUITE(Sm90MlaLayout, Layouts);

TYPED_TEST(Sm90MlaLayout, ChunksLieWhereTmaWritesThemAndMmaReadsThem) {
  using L = TypeParam;
  std::set<int32_t> offsets;
  for (int32_t token = 0; token < kBlockN; ++token) {
    for (int32_t chunk = 0; chunk < 8 * L::kColumnBlocks; ++chunk) {
      EXPECT_EQ(tile_offset(token, chunk), swizzled(chunk / 8 * kColumnBlockBytes + token * 128 + chunk % 8 * 16));
      offsets.insert(tile_offset(token, chunk));
    }
  }
  EXPECT_EQ(offsets.size(), static_cast<size_t>(L::kTileBytes / 16));
  EXPECT_EQ(*offsets.rbegin(), L::kTileBytes - 16);
  std::set<int32_t> of_queries;
  for (int32_t row = 0; row < L::kQBlockBytes / 128; ++row) {
    for (int32_t chunk = 0; chunk < 8 * kQColumnBlocks; ++chunk) {
      const int32_t linear = chunk / 8 * L::kQBlockBytes + row * 128 + chunk % 8 * 16;
      EXPECT_EQ(L::q_offset(row, chunk), L::kQOffset + swizzled(linear));
      of_queries.insert(L::q_offset(row, chunk));
    }
  }
  EXPECT_EQ(*of_queries.begin(), L::kStages * L::kTileBytes);
  EXPECT_EQ(*of_queries.rbegin(), L::kStorageOffset - 16);
  EXPECT_EQ(of_queries.size(), static_cast<size_t>(kQColumnBlocks * L::kQBlockBytes / 16));
}

TYPED_TEST(Sm90MlaLayout, PartsOfATileAreItsColumnBlocks) {
  using L = TypeParam;
  int32_t blocks = 0;
  for (int32_t part = 0; part < kKvParts; ++part) {
    EXPECT_EQ(L::part_begin(part), blocks);
    blocks += L::part_size(part);
  }
  EXPECT_EQ(blocks, L::kColumnBlocks);
  EXPECT_EQ(L::part_begin(kRope) * kColumnBlockBytes, L::kPOffset);
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
      EXPECT_LE(offset + kColumnBlockBytes, std::min(2 * next + 2, RowsLayout::kColumnBlocks) * kColumnBlockBytes);
      EXPECT_EQ(offset / kColumnBlockBytes / RowsLayout::kHalfColumnBlocks, part);
    }
  }
  EXPECT_EQ(next, kFp8Blocks);
}

/// Eight lanes share an access of 16 bytes, sixteen one of 8: their banks differ.
TEST(Sm90MlaConfig, ReadsOfFp8DataHaveNoBankConflicts) {
  std::set<int32_t> tokens;
  for (int32_t row = 0; row < 8; ++row) tokens.insert(fp8_token(row));
  EXPECT_EQ(tokens.size(), 8u);
  for (int32_t half = 0; half < 2; ++half) {
    for (int32_t first = 0; first < 32; first += 8) {  // GEMM0: of a lane's token, the chunk of its four components
      std::set<int32_t> banks;
      for (int32_t lane = first; lane < first + 8; ++lane) {
        banks.insert(tile_offset(fp8_token(lane / 4), 4 * half + lane % 4) % 128 / 16);
      }
      EXPECT_EQ(banks.size(), 8u);
    }
  }
  for (int32_t second = 0; second < 2; ++second) {
    for (int32_t warp = 0; warp < kWarpgroupWarps; ++warp) {
      for (int32_t first = 0; first < 32; first += 16) {  // GEMM1: eight components of one of a lane's tokens
        std::set<int32_t> banks;
        for (int32_t lane = first; lane < first + 16; ++lane) {
          const int32_t component = 64 * warp + 8 * (lane / 4);
          const int32_t token = fp8_token(2 * (lane % 4) + second);
          banks.insert((tile_offset(token, component / 16) + component % 16) % 128 / 8);
        }
        EXPECT_EQ(banks.size(), 16u);
      }
    }
  }
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
