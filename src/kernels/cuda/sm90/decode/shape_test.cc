// Where things stand in shared memory, where no GPU is needed.
#include "kernels/cuda/sm90/decode/shape.hpp"

#include <gtest/gtest.h>

#include <set>

namespace folio::kernels::cuda::sm90::decode {
namespace {

constexpr HeadDims kAll[] = {{64, 64, 2}, {96, 96, 2}, {128, 128, 2}, {192, 128, 2}, {64, 64, 1}, {128, 128, 1}};

/// ldmatrix reads eight tokens' equal pieces at once: they must stand in eight different groups of four banks.
TEST(Sm90Shape, PiecesOfATileStandApartAndReadWithoutConflicts) {
  for (const HeadDims& dims : kAll) {
    for (const int32_t box : {kSingles, kSmallBox, kLargeBox}) {
      std::set<int32_t> offsets;
      for (int32_t piece = 0; piece < dims.qk * dims.bytes / 16; ++piece) {
        for (int32_t first = 0; first < kTileTokens; first += 8) {
          std::set<int32_t> banks;
          for (int32_t token = first; token < first + 8; ++token) {
            const int32_t offset = piece_offset(dims.qk, dims.bytes, box, token, piece);
            offsets.insert(offset);
            banks.insert(offset / 16 % 8);
          }
          EXPECT_EQ(banks.size(), 8u);
        }
      }
      EXPECT_EQ(offsets.size(), static_cast<size_t>(half_bytes(dims.qk, dims.bytes) / 16));
      EXPECT_EQ(*offsets.begin(), 0);
      EXPECT_EQ(*offsets.rbegin(), half_bytes(dims.qk, dims.bytes) - 16);
    }
  }
}

/// The swizzle of 128 or 64 bytes, as TMA does it: bits 4 to 6 (5) exchanged by bits 7 to 9 (8).
TEST(Sm90Shape, PiecesStandWhereACopiedBoxLeavesThem) {
  for (const HeadDims& dims : kAll) {
    for (const int32_t box : {kSmallBox, kLargeBox}) {
      for (int32_t token = 0; token < kTileTokens; ++token) {
        for (int32_t piece = 0; piece < dims.v * dims.bytes / 16; ++piece) {
          const int32_t begin = token / box * half_bytes(dims.v, dims.bytes) / (kTileTokens / box);
          const int32_t width = side_by_side(dims.v, dims.bytes);
          const int32_t in_width = width / 16;
          const int32_t linear = begin + (piece / in_width * box + token % box) * width + piece % in_width * 16;
          EXPECT_EQ(piece_offset(dims.v, dims.bytes, box, token, piece),
                    linear ^ ((linear >> 7 & (width == 128 ? 7 : 3)) << 4));
        }
      }
    }
  }
}

TEST(Sm90Shape, PartsOfSharedMemoryAreAlignedAndLeaveRoomForTheRest) {
  for (const HeadDims& dims : kAll) {
    const SharedLayout layout = shared_layout(dims);
    EXPECT_EQ(stage_bytes(dims) % 512, 0);
    EXPECT_EQ(half_bytes(dims.qk, dims.bytes) / 2 % (8 * side_by_side(dims.qk, dims.bytes)), 0) << "of small boxes";
    EXPECT_GE(stages(dims), 2);
    EXPECT_EQ(layout.results % 16, 0);
    EXPECT_EQ(layout.running % 16, 0);
    EXPECT_EQ(layout.queries % 16, 0);
    EXPECT_EQ(query_stride(dims) % 16, 0);
    EXPECT_EQ(layout.places % 16, 0);
    EXPECT_EQ(layout.rest % 16, 0);
    EXPECT_LE(layout.rest + 1024, kSharedLimit);
  }
}

TEST(Sm90Shape, ItemsHaveRowsForAGroupAndEightLeaveRoomBeside) {
  EXPECT_EQ(rows_of_item(1), 8);
  EXPECT_EQ(rows_of_item(8), 8);
  EXPECT_EQ(rows_of_item(9), 16);
  EXPECT_EQ(rows_of_item(64), 16);
  for (const HeadDims& dims : kAll) {
    const int32_t threads_a_quarter = 32 * ((threads(dims) / 32 + 3) / 4);
    const int32_t registers = 65536 / register_threads(dims, kFewRows);
    EXPECT_GE(16384 - threads_a_quarter * registers, 32 * 128) << "for a warp of the merge kernel";
    if (dims.qk == 192) continue;
    EXPECT_LE(shared_layout(dims).rest + 16 * 1024, kSharedLimit) << "for the rest and the merge kernel's";
  }
}

TEST(Sm90Shape, TilesAreMaskedWhereRowsDiffer) {
  const Sight sight{20, 100, 40, 90};
  EXPECT_TRUE(has_unseen(sight, 16));
  EXPECT_FALSE(has_unseen(sight, 32));
  EXPECT_TRUE(has_unseen(sight, 96));
  EXPECT_TRUE(needs_mask(sight, 32));
  EXPECT_FALSE(needs_mask(sight, 48));
  EXPECT_TRUE(needs_mask(sight, 80));
  EXPECT_TRUE(is_mixed(sight, 16));
  EXPECT_FALSE(is_mixed(sight, 48));
  EXPECT_TRUE(is_mixed(sight, 80));
  const Sight alike{20, 100, 20, 100};
  EXPECT_TRUE(needs_mask(alike, 16));
  EXPECT_FALSE(is_mixed(alike, 16));
  EXPECT_FALSE(is_mixed(alike, 96));
}

}  // namespace
}  // namespace folio::kernels::cuda::sm90::decode
