// The layout of shared memory. Needs no GPU.
#include "kernels/cuda/sm90/prefill/config.hpp"

#include <gtest/gtest.h>

#include <set>

namespace folio::kernels::cuda::sm90::prefill {
namespace {

constexpr HeadDims kAll[] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {256, 256}};

/// The swizzle of 128 (or 64) bytes, as TMA and wgmma do it: bits 4 to 6 exchanged by bits 7 to 9, or 4
/// and 5 by 7 and 8.
int32_t exchanged(int32_t dim, int32_t linear) {
  return linear ^ (linear >> 7 & (swizzle_bytes(dim) / 16 - 1)) << 4;
}

TEST(Sm90PrefillConfig, ChunksOfATileLieWhereTmaLeavesThemAndWgmmaReadsThem) {
  for (const HeadDims& dims : kAll) {
    std::set<int32_t> offsets;
    const int32_t chunks = swizzle_bytes(dims.qk) / 16;
    for (int32_t token = 0; token < block_n(dims); ++token) {
      for (int32_t chunk = 0; chunk < dims.qk / kElementsPer16B; ++chunk) {
        const int32_t linear = token / kAtomRows * atom_row_bytes(dims.qk) + chunk / chunks * atom_bytes(dims.qk) +
                               token % kAtomRows * swizzle_bytes(dims.qk) + chunk % chunks * 16;
        EXPECT_EQ(tile_offset(dims.qk, token, chunk), exchanged(dims.qk, linear));
        offsets.insert(tile_offset(dims.qk, token, chunk));
      }
    }
    EXPECT_EQ(offsets.size(), static_cast<size_t>(tile_bytes(dims, dims.qk) / 16));
    EXPECT_EQ(*offsets.rbegin(), tile_bytes(dims, dims.qk) - 16);
  }
}

TEST(Sm90PrefillConfig, QAndOutputOfAWarpgroupShareTheirMemory) {
  for (const HeadDims& dims : kAll) {
    std::set<int32_t> q;
    const int32_t chunks = swizzle_bytes(dims.qk) / 16;
    for (int32_t row = 0; row < kBlockM; ++row) {
      for (int32_t chunk = 0; chunk < dims.qk / kElementsPer16B; ++chunk) {
        const int32_t linear = row / kWarpgroupRows * q_bytes(dims.qk) + chunk / chunks * query_column_bytes(dims.qk) +
                               row % kWarpgroupRows * swizzle_bytes(dims.qk) + chunk % chunks * 16;
        EXPECT_EQ(q_tile_offset(dims.qk, row, chunk), exchanged(dims.qk, linear));
        q.insert(q_tile_offset(dims.qk, row, chunk));
      }
    }
    EXPECT_EQ(q.size(), static_cast<size_t>(kConsumerWarpgroups * q_bytes(dims.qk) / 16));
    EXPECT_EQ(*q.rbegin(), kConsumerWarpgroups * q_bytes(dims.qk) - 16);
    std::set<int32_t> out;
    for (int32_t row = 0; row < kWarpgroupRows; ++row) {
      for (int32_t chunk = 0; chunk < dims.v / kElementsPer16B; ++chunk)
        out.insert(out_tile_offset(dims.v, row, chunk));
    }
    EXPECT_EQ(out.size(), static_cast<size_t>(kWarpgroupRows * dims.v / kElementsPer16B));
    EXPECT_LE(*out.rbegin(), q_bytes(dims.qk) - 16);
  }
}

TEST(Sm90PrefillConfig, OutputWritesHaveNoBankConflicts) {
  for (const HeadDims& dims : kAll) {
    for (int32_t chunk = 0; chunk < dims.v / kElementsPer16B; ++chunk) {
      std::set<int32_t> banks;
      for (int32_t row = 0; row < 8; ++row) banks.insert(out_tile_offset(dims.v, row, chunk) / 16 % 8);
      EXPECT_EQ(banks.size(), 8u);
    }
  }
}

TEST(Sm90PrefillConfig, SharedMemoryIsAlignedAndLeavesRoomForItsStorage) {
  for (const HeadDims& dims : kAll) {
    const SmemLayout layout = smem_layout(dims);
    EXPECT_EQ(tile_bytes(dims, dims.qk) % 1024, 0);
    EXPECT_EQ(tile_bytes(dims, dims.v) % 1024, 0);
    EXPECT_EQ(layout.v % 1024, 0);
    EXPECT_EQ(layout.q % 1024, 0);
    EXPECT_EQ(q_bytes(dims.qk) % 1024, 0);
    EXPECT_EQ(layout.storage % 16, 0);
    EXPECT_LE(layout.storage + 1024, kMaxSmemBytes);
  }
}

TEST(Sm90PrefillConfig, TmaTilesLieInOnePageAndKvTileAndWarpsShareThem) {
  EXPECT_EQ(tma_tile_tokens(1, 128), 0);
  EXPECT_EQ(tma_tile_tokens(12, 128), 0);
  EXPECT_EQ(tma_tile_tokens(8, 128), 8);
  EXPECT_EQ(tma_tile_tokens(24, 128), 8);
  EXPECT_EQ(tma_tile_tokens(48, 128), 16);
  EXPECT_EQ(tma_tile_tokens(192, 128), 64);
  EXPECT_EQ(tma_tile_tokens(128, 128), 128);
  EXPECT_EQ(tma_tile_tokens(1024, 128), 128);
  EXPECT_EQ(tma_tile_tokens(1024, 64), 64);
  for (const int32_t warps : {kWarpgroupWarps, kWarpgroupWarps - kSomeFetchWarps}) {
    for (const int32_t tokens : {64, 128}) {
      for (int32_t tma_tokens = kAtomRows; tma_tokens <= tokens; tma_tokens *= 2) {
        EXPECT_GE(tma_tiles_per_warp(tma_tokens, tokens, warps) * warps * tma_tokens, tokens);
        EXPECT_EQ(32 % tma_tiles_per_warp(tma_tokens, tokens, warps), 0);
        EXPECT_EQ(1 << tma_tiles_shift(tma_tokens, tokens, warps), tma_tiles_per_warp(tma_tokens, tokens, warps));
      }
    }
  }
  EXPECT_EQ(tma_tiles_per_warp(8, 64, 4), 2);
  EXPECT_EQ(tma_tiles_per_warp(8, 128, 2), 8);
  EXPECT_EQ(tma_tiles_per_warp(16, 128, 4), 2);
  EXPECT_EQ(tma_tiles_per_warp(32, 128, 4), 1);
  EXPECT_EQ(tma_tiles_per_warp(128, 128, 2), 1);
}

TEST(Sm90PrefillConfig, Fp8MmaFindsPWhereScoresWere) {
  // Of GEMM0's scores, member t of a lane group has columns 8j + 2t and the next; of p, of each 32, words 4t
  // to 4t + 3 and the same 16 further on. See ptx/wgmma.cuh.
  std::set<int32_t> columns;
  for (int32_t token = 0; token < kFp8MmaBlockN; ++token) {
    const int32_t column = vt_column(token);
    columns.insert(column);
    EXPECT_EQ(column / 16, token / 16);
    EXPECT_EQ(column % 16 / 4, token % 8 / 2);  // t
    EXPECT_EQ(column % 4, token % 16 / 8 * 2 + token % 2);
  }
  EXPECT_EQ(columns.size(), static_cast<size_t>(kFp8MmaBlockN));
  for (int32_t row = 0; row < 128; ++row) {
    for (int32_t chunk = 0; chunk < 8; ++chunk) {
      EXPECT_EQ(fp8_tile_offset(row, chunk), exchanged(128, row * kFp8RowBytes + chunk * 16));
    }
  }
}

TEST(Sm90PrefillConfig, TilesAreMaskedWhereRowsDiffer) {
  const VisibleRange visible{100, 900, 200, 700};
  EXPECT_TRUE(needs_mask(visible, 128, 128));
  EXPECT_FALSE(needs_mask(visible, 256, 128));
  EXPECT_FALSE(needs_mask(visible, 512, 128));
  EXPECT_TRUE(needs_mask(visible, 640, 128));
  EXPECT_FALSE(needs_mask({0, 640, 0, 640}, 512, 128));
  EXPECT_TRUE(needs_mask({0, 639, 0, 639}, 512, 128));
  EXPECT_TRUE(needs_mask({0, 640, 513, 640}, 512, 128));
}

}  // namespace
}  // namespace folio::kernels::cuda::sm90::prefill
