// Where things stand in shared memory, where no GPU is needed.
#include "kernels/cuda/sm90/prefill/shape.hpp"

#include <gtest/gtest.h>

#include <set>

namespace folio::kernels::cuda::sm90::prefill {
namespace {

constexpr HeadDims kAll[] = {{128, 128}};

/// The swizzle of 128 bytes, as the copy engine and products do it: bits 4 to 6 exchanged by bits 7 to 9.
int32_t exchanged(int32_t linear) {
  return linear ^ (linear >> 7 & 7) << 4;
}

TEST(Sm90PrefillShape, PiecesOfATileStandWhereBoxesLeaveThemAndProductsFindThem) {
  for (const HeadDims& dims : kAll) {
    std::set<int32_t> offsets;
    for (int32_t token = 0; token < kTokens; ++token) {
      for (int32_t piece = 0; piece < dims.qk / kPiece; ++piece) {
        const int32_t linear =
            token / kEight * eight_bytes(dims.qk) + piece / 8 * kHalfBytes + token % kEight * 128 + piece % 8 * 16;
        EXPECT_EQ(tile_offset(dims.qk, token, piece), exchanged(linear));
        offsets.insert(tile_offset(dims.qk, token, piece));
      }
    }
    EXPECT_EQ(offsets.size(), static_cast<size_t>(tile_bytes(dims.qk) / 16));
    EXPECT_EQ(*offsets.rbegin(), tile_bytes(dims.qk) - 16);
  }
}

TEST(Sm90PrefillShape, QueriesAndResultsOfAWarpgroupTakeTheSamePlace) {
  for (const HeadDims& dims : kAll) {
    std::set<int32_t> queries;
    for (int32_t row = 0; row < kRows; ++row) {
      for (int32_t piece = 0; piece < dims.qk / kPiece; ++piece) {
        const int32_t linear = row / kGroupRows * query_bytes(dims.qk) + piece / 8 * kQueryHalfBytes +
                               row % kGroupRows * 128 + piece % 8 * 16;
        EXPECT_EQ(query_offset(dims.qk, row, piece), exchanged(linear));
        queries.insert(query_offset(dims.qk, row, piece));
      }
    }
    EXPECT_EQ(queries.size(), static_cast<size_t>(kMathGroups * query_bytes(dims.qk) / 16));
    EXPECT_EQ(*queries.rbegin(), kMathGroups * query_bytes(dims.qk) - 16);
    std::set<int32_t> results;
    for (int32_t row = 0; row < kGroupRows; ++row) {
      for (int32_t piece = 0; piece < dims.v / kPiece; ++piece) results.insert(result_offset(dims.v, row, piece));
    }
    EXPECT_EQ(results.size(), static_cast<size_t>(kGroupRows * dims.v / kPiece));
    EXPECT_LE(*results.rbegin(), query_bytes(dims.qk) - 16);
  }
}

TEST(Sm90PrefillShape, LanesWriteResultsToDifferentBanks) {
  for (const HeadDims& dims : kAll) {
    for (int32_t piece = 0; piece < dims.v / kPiece; ++piece) {
      std::set<int32_t> banks;
      for (int32_t row = 0; row < 8; ++row) banks.insert(result_offset(dims.v, row, piece) / 16 % 8);
      EXPECT_EQ(banks.size(), 8u);
    }
  }
}

TEST(Sm90PrefillShape, PartsOfSharedMemoryAreAlignedAndLeaveRoomForTheRest) {
  for (const HeadDims& dims : kAll) {
    const SharedLayout layout = shared_layout(dims);
    EXPECT_EQ(stage_bytes(dims) % 1024, 0);
    EXPECT_EQ(layout.queries % 1024, 0);
    EXPECT_EQ(query_bytes(dims.qk) % 1024, 0);
    EXPECT_EQ(layout.rest % 16, 0);
    EXPECT_LE(layout.rest + 1024, kSharedLimit);
  }
}

TEST(Sm90PrefillShape, BoxesLieInOnePageAndTileAndAreSharedByWarps) {
  EXPECT_EQ(box_tokens(1), 0);
  EXPECT_EQ(box_tokens(12), 0);
  EXPECT_EQ(box_tokens(8), 8);
  EXPECT_EQ(box_tokens(24), 8);
  EXPECT_EQ(box_tokens(48), 16);
  EXPECT_EQ(box_tokens(192), 64);
  EXPECT_EQ(box_tokens(128), 128);
  EXPECT_EQ(box_tokens(1024), 128);
  for (int32_t box = kEight; box <= kTokens; box *= 2) {
    EXPECT_GE(boxes_per_warp(box) * kGroupWarps * box, kTokens);
    EXPECT_EQ(32 % boxes_per_warp(box), 0);
  }
  EXPECT_EQ(boxes_per_warp(8), 4);
  EXPECT_EQ(boxes_per_warp(16), 2);
  EXPECT_EQ(boxes_per_warp(32), 1);
  EXPECT_EQ(boxes_per_warp(128), 1);
}

TEST(Sm90PrefillShape, TilesAreMaskedWhereRowsDiffer) {
  const Sight sight{100, 900, 200, 700};
  EXPECT_TRUE(needs_mask(sight, 128));
  EXPECT_FALSE(needs_mask(sight, 256));
  EXPECT_FALSE(needs_mask(sight, 512));
  EXPECT_TRUE(needs_mask(sight, 640));
  EXPECT_FALSE(needs_mask({0, 640, 0, 640}, 512));
  EXPECT_TRUE(needs_mask({0, 639, 0, 639}, 512));
  EXPECT_TRUE(needs_mask({0, 640, 513, 640}, 512));
}

}  // namespace
}  // namespace folio::kernels::cuda::sm90::prefill
