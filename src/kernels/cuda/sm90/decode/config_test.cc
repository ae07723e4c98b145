// Swizzles, the layout of shared memory and mask bounds: they need no GPU.
#include "kernels/cuda/sm90/decode/config.hpp"

#include <gtest/gtest.h>

#include <set>

namespace folio::kernels::cuda::sm90::decode {
namespace {

constexpr HeadDims kAll[] = {{64, 64, 2}, {96, 96, 2}, {128, 128, 2}, {192, 128, 2}, {64, 64, 1}, {128, 128, 1}};

/// ldmatrix reads equal chunks of eight tokens at once: they must lie in eight different groups of four banks.
TEST(Sm90DecodeConfig, SwizzledOffsetsAreDistinctAndReadWithoutBankConflicts) {
  for (const HeadDims& dims : kAll) {
    for (const int32_t copy_tokens : {kCpAsync, kTmaHalfTile, kTmaWholeTile}) {
      std::set<int32_t> offsets;
      for (int32_t chunk = 0; chunk < dims.qk * dims.bytes / 16; ++chunk) {
        for (int32_t first = 0; first < kTileTokens; first += 8) {
          std::set<int32_t> banks;
          for (int32_t token = first; token < first + 8; ++token) {
            const int32_t offset = swizzled_offset(dims.qk, dims.bytes, copy_tokens, token, chunk);
            offsets.insert(offset);
            banks.insert(offset / 16 % 8);
          }
          EXPECT_EQ(banks.size(), 8u);
        }
      }
      EXPECT_EQ(offsets.size(), static_cast<size_t>(tile_bytes(dims.qk, dims.bytes) / 16));
      EXPECT_EQ(*offsets.begin(), 0);
      EXPECT_EQ(*offsets.rbegin(), tile_bytes(dims.qk, dims.bytes) - 16);
    }
  }
}

/// The swizzle of 128 or 64 bytes, as TMA does it: bits 4 to 6 (5) exchanged by bits 7 to 9 (8).
TEST(Sm90DecodeConfig, SwizzledOffsetsAreThoseOfTma) {
  for (const HeadDims& dims : kAll) {
    for (const int32_t copy_tokens : {kTmaHalfTile, kTmaWholeTile}) {
      for (int32_t token = 0; token < kTileTokens; ++token) {
        for (int32_t chunk = 0; chunk < dims.v * dims.bytes / 16; ++chunk) {
          const int32_t begin = token / copy_tokens * tile_bytes(dims.v, dims.bytes) / (kTileTokens / copy_tokens);
          const int32_t width = swizzle_bytes(dims.v, dims.bytes);
          const int32_t in_width = width / 16;
          const int32_t linear =
              begin + (chunk / in_width * copy_tokens + token % copy_tokens) * width + chunk % in_width * 16;
          EXPECT_EQ(swizzled_offset(dims.v, dims.bytes, copy_tokens, token, chunk),
                    linear ^ ((linear >> 7 & (width == 128 ? 7 : 3)) << 4));
        }
      }
    }
  }
}

TEST(Sm90DecodeConfig, SmemLayoutIsAlignedAndLeavesRoomForTheStorage) {
  for (const HeadDims& dims : kAll) {
    const SmemLayout layout = smem_layout(dims);
    HeadDims double_height = dims;
    double_height.rows = kMaxRows;
    EXPECT_LE(smem_layout(double_height).storage + 4096 + 1024, kMaxSmemBytes);
    EXPECT_EQ(stage_bytes(dims) % 512, 0);
    EXPECT_EQ(tile_bytes(dims.qk, dims.bytes) / 2 % (8 * swizzle_bytes(dims.qk, dims.bytes)), 0) << "of TMA half tiles";
    EXPECT_GE(stages(dims), 2);
    EXPECT_EQ(layout.reduce % 16, 0);
    EXPECT_EQ(layout.running % 16, 0);
    EXPECT_EQ(layout.queries % 16, 0);
    EXPECT_EQ(query_stride(dims) % 16, 0);
    EXPECT_EQ(layout.places % 16, 0);
    EXPECT_EQ(layout.storage % 16, 0);
    EXPECT_LE(layout.storage + 1024, kMaxSmemBytes);
  }
}

TEST(Sm90DecodeConfig, WorkTilesHoldAGqaGroupAndEightRowsLeaveRoomForTheCombineKernel) {
  EXPECT_EQ(work_tile_rows(1), 8);
  EXPECT_EQ(work_tile_rows(8), 8);
  EXPECT_EQ(work_tile_rows(9), 16);
  EXPECT_EQ(work_tile_rows(64), 16);
  for (const HeadDims& dims : kAll) {
    const int32_t threads_a_quarter = 32 * ((cta_threads(dims) / 32 + 3) / 4);
    const int32_t registers = 65536 / launch_bound_threads(dims, kTileRows);
    EXPECT_GE(16384 - threads_a_quarter * registers, 32 * 128) << "for a warp of the combine kernel";
    if (dims.qk == 192) continue;
    EXPECT_LE(smem_layout(dims).storage + 16 * 1024, kMaxSmemBytes) << "for the storage and the combine kernel's";
  }
}

TEST(Sm90VisibleRange, TilesAreMaskedWhereRowsDiffer) {
  const VisibleRange range{20, 100, 40, 90};
  EXPECT_TRUE(has_invisible(range, 16, kTileTokens));
  EXPECT_FALSE(has_invisible(range, 32, kTileTokens));
  EXPECT_TRUE(has_invisible(range, 96, kTileTokens));
  EXPECT_TRUE(needs_mask(range, 32, kTileTokens));
  EXPECT_FALSE(needs_mask(range, 48, kTileTokens));
  EXPECT_TRUE(needs_mask(range, 80, kTileTokens));
  EXPECT_TRUE(is_mixed(range, 16, kTileTokens));
  EXPECT_FALSE(is_mixed(range, 48, kTileTokens));
  EXPECT_TRUE(is_mixed(range, 80, kTileTokens));
  const VisibleRange alike{20, 100, 20, 100};
  EXPECT_TRUE(needs_mask(alike, 16, kTileTokens));
  EXPECT_FALSE(is_mixed(alike, 16, kTileTokens));
  EXPECT_FALSE(is_mixed(alike, 96, kTileTokens));
}

}  // namespace
}  // namespace folio::kernels::cuda::sm90::decode
