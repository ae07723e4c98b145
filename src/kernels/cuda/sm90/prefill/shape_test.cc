// Where things stand in shared memory, where no GPU is needed.
#include "kernels/cuda/sm90/prefill/native_shape.hpp"

#include <gtest/gtest.h>

#include <set>

namespace folio::kernels::cuda::sm90::prefill {
namespace {

constexpr HeadDims kAll[] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {256, 256}};

/// The swizzle of 128 (or 64) bytes, as TMA and products do it: bits 4 to 6 exchanged by bits 7 to 9, or 4
/// and 5 by 7 and 8.
int32_t exchanged(int32_t dim, int32_t linear) {
  return linear ^ (linear >> 7 & (span(dim) / 16 - 1)) << 4;
}

TEST(Sm90PrefillShape, PiecesOfATileStandWhereBoxesLeaveThemAndProductsFindThem) {
  for (const HeadDims& dims : kAll) {
    std::set<int32_t> offsets;
    const int32_t pieces = span(dims.qk) / 16;
    for (int32_t token = 0; token < tile_tokens(dims); ++token) {
      for (int32_t piece = 0; piece < dims.qk / kPiece; ++piece) {
        const int32_t linear = token / kEight * eight_bytes(dims.qk) + piece / pieces * span_step(dims.qk) +
                               token % kEight * span(dims.qk) + piece % pieces * 16;
        EXPECT_EQ(tile_offset(dims.qk, token, piece), exchanged(dims.qk, linear));
        offsets.insert(tile_offset(dims.qk, token, piece));
      }
    }
    EXPECT_EQ(offsets.size(), static_cast<size_t>(tile_bytes(dims, dims.qk) / 16));
    EXPECT_EQ(*offsets.rbegin(), tile_bytes(dims, dims.qk) - 16);
  }
}

TEST(Sm90PrefillShape, QueriesAndResultsOfAWarpgroupTakeTheSamePlace) {
  for (const HeadDims& dims : kAll) {
    std::set<int32_t> queries;
    const int32_t pieces = span(dims.qk) / 16;
    for (int32_t row = 0; row < kRows; ++row) {
      for (int32_t piece = 0; piece < dims.qk / kPiece; ++piece) {
        const int32_t linear = row / kGroupRows * query_bytes(dims.qk) + piece / pieces * query_step(dims.qk) +
                               row % kGroupRows * span(dims.qk) + piece % pieces * 16;
        EXPECT_EQ(query_offset(dims.qk, row, piece), exchanged(dims.qk, linear));
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
    EXPECT_EQ(tile_bytes(dims, dims.qk) % 1024, 0);
    EXPECT_EQ(tile_bytes(dims, dims.v) % 1024, 0);
    EXPECT_EQ(layout.values % 1024, 0);
    EXPECT_EQ(layout.queries % 1024, 0);
    EXPECT_EQ(query_bytes(dims.qk) % 1024, 0);
    EXPECT_EQ(layout.rest % 16, 0);
    EXPECT_LE(layout.rest + 1024, kSharedLimit);
  }
}

TEST(Sm90PrefillShape, BoxesLieInOnePageAndTileAndAreSharedByWarps) {
  EXPECT_EQ(box_tokens(1, 128), 0);
  EXPECT_EQ(box_tokens(12, 128), 0);
  EXPECT_EQ(box_tokens(8, 128), 8);
  EXPECT_EQ(box_tokens(24, 128), 8);
  EXPECT_EQ(box_tokens(48, 128), 16);
  EXPECT_EQ(box_tokens(192, 128), 64);
  EXPECT_EQ(box_tokens(128, 128), 128);
  EXPECT_EQ(box_tokens(1024, 128), 128);
  EXPECT_EQ(box_tokens(1024, 64), 64);
  for (const int32_t tokens : {64, 128}) {
    for (int32_t box = kEight; box <= tokens; box *= 2) {
      EXPECT_GE(boxes_per_warp(box, tokens) * kGroupWarps * box, tokens);
      EXPECT_EQ(32 % boxes_per_warp(box, tokens), 0);
      EXPECT_EQ(1 << boxes_shift(box, tokens), boxes_per_warp(box, tokens));
    }
  }
  EXPECT_EQ(boxes_per_warp(8, 64), 2);
  EXPECT_EQ(boxes_per_warp(8, 128), 4);
  EXPECT_EQ(boxes_per_warp(16, 128), 2);
  EXPECT_EQ(boxes_per_warp(32, 128), 1);
  EXPECT_EQ(boxes_per_warp(128, 128), 1);
}

TEST(Sm90PrefillShape, ProductsOfCodesFindWeightsWhereTheirScoresWere) {
  // Of a product's scores, lane group member t has columns 8j + 2t and the next; of its weights, of each 32, words 4t
  // to 4t + 3 and the same 16 further on. See ptx/wgmma.cuh.
  std::set<int32_t> columns;
  for (int32_t token = 0; token < kNativeTokens; ++token) {
    const int32_t column = native_column(token);
    columns.insert(column);
    EXPECT_EQ(column / 16, token / 16);
    EXPECT_EQ(column % 16 / 4, token % 8 / 2);  // t
    EXPECT_EQ(column % 4, token % 16 / 8 * 2 + token % 2);
  }
  EXPECT_EQ(columns.size(), static_cast<size_t>(kNativeTokens));
  for (int32_t row = 0; row < 128; ++row) {
    for (int32_t piece = 0; piece < 8; ++piece) {
      EXPECT_EQ(native_offset(row, piece), exchanged(128, row * kNativeRow + piece * 16));
    }
  }
}

TEST(Sm90PrefillShape, TilesAreMaskedWhereRowsDiffer) {
  const Sight sight{100, 900, 200, 700};
  EXPECT_TRUE(needs_mask(sight, 128, 128));
  EXPECT_FALSE(needs_mask(sight, 256, 128));
  EXPECT_FALSE(needs_mask(sight, 512, 128));
  EXPECT_TRUE(needs_mask(sight, 640, 128));
  EXPECT_FALSE(needs_mask({0, 640, 0, 640}, 512, 128));
  EXPECT_TRUE(needs_mask({0, 639, 0, 639}, 512, 128));
  EXPECT_TRUE(needs_mask({0, 640, 513, 640}, 512, 128));
}

}  // namespace
}  // namespace folio::kernels::cuda::sm90::prefill
