// What the kernel's schedule rests on, where no GPU is needed.
#include "kernels/cuda/sm80/config.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>
#include <vector>

namespace folio::kernels::cuda::sm80 {
namespace {

TEST(Sm80Config, EveryDimensionUpTo256HasTheSmallestInstantiationThatHoldsIt) {
  for (int32_t qk = 8; qk <= 256; qk += 8) {
    for (int32_t v = 8; v <= 256; v += 8) {
      const int32_t index = head_dims_index(qk, v);
      ASSERT_GE(index, 0) << qk << '/' << v;
      EXPECT_GE(kHeadDims[index].qk, qk);
      EXPECT_GE(kHeadDims[index].v, v);
      for (int32_t i = 0; i < index; ++i) {
        EXPECT_TRUE(kHeadDims[i].qk < qk || kHeadDims[i].v < v) << qk << '/' << v << " fits " << i;
      }
    }
  }
  for (const auto& [qk, v] : {std::pair{264, 8}, {8, 264}, {320, 320}, {512, 512}, {576, 512}}) {
    EXPECT_EQ(head_dims_index(qk, v), kLargeHeadIndex) << qk << '/' << v;
  }
  EXPECT_EQ(head_dims_index(584, 8), -1);
  EXPECT_EQ(head_dims_index(8, 520), -1);
  EXPECT_EQ(head_dims_index(192, 128), 2);
  EXPECT_EQ(head_dims_index(192, 192), 3);
}

/// ldmatrix reads the same chunk of eight rows at once: these must lie in eight different groups of four banks.
TEST(Sm80Config, ChunksOfATileStandApartAndReadWithoutConflicts) {
  std::vector<HeadDims> all_dims(std::begin(kHeadDims), std::end(kHeadDims));
  all_dims.push_back(kLargeHeadDims);
  for (const HeadDims& dims : all_dims) {
    for (const int32_t dim : {dims.qk, dims.v}) {
      const int32_t chunks = dim / kChunk;
      std::set<int32_t> offsets;
      for (int32_t row = 0; row < kKvTile; ++row) {
        for (int32_t chunk = 0; chunk < chunks; ++chunk) offsets.insert(swizzled_offset(dim, row, chunk));
      }
      EXPECT_EQ(offsets.size(), static_cast<size_t>(kKvTile * chunks));
      EXPECT_EQ(*offsets.begin(), 0);
      EXPECT_EQ(*offsets.rbegin(), (kKvTile * chunks - 1) * 16);
      for (int32_t first = 0; first < kKvTile; first += 8) {
        for (int32_t chunk = 0; chunk < chunks; ++chunk) {
          std::set<int32_t> banks;
          for (int32_t row = first; row < first + 8; ++row) banks.insert(swizzled_offset(dim, row, chunk) / 16 % 8);
          EXPECT_EQ(banks.size(), 8u);
        }
      }
    }
  }
}

TEST(Sm80Config, ChunksOfFp8TilesStandApartAndReadWithoutConflicts) {
  for (const int32_t dim : {64, 128, 192, 256}) {
    const int32_t chunks = dim / 16;
    std::set<int32_t> offsets;
    for (int32_t row = 0; row < 16; ++row) {
      for (int32_t chunk = 0; chunk < chunks; ++chunk) offsets.insert(swizzled_offset_fp8(dim, row, chunk));
    }
    EXPECT_EQ(offsets.size(), static_cast<size_t>(16 * chunks));
    EXPECT_EQ(*offsets.begin(), 0);
    EXPECT_EQ(*offsets.rbegin(), (16 * chunks - 1) * 16);
    for (int32_t first = 0; first < 16; first += 8) {
      for (int32_t chunk = 0; chunk < chunks; ++chunk) {
        std::set<int32_t> banks;
        for (int32_t row = first; row < first + 8; ++row) banks.insert(swizzled_offset_fp8(dim, row, chunk) / 16 % 8);
        EXPECT_EQ(banks.size(), 8u) << dim;
      }
    }
  }
}

TEST(Sm80Config, QueriesForFp8KeysArePermutedWithinAStep) {
  std::set<int32_t> places;
  for (int32_t pair = 0; pair < 8; ++pair) places.insert(fp8_query_pair(pair));
  EXPECT_EQ(places.size(), 8u);
  for (int32_t t = 0; t < 4; ++t) {
    EXPECT_EQ(fp8_query_pair(2 * t), t);
    EXPECT_EQ(fp8_query_pair(2 * t + 1), t + 4);
  }
}

TEST(Sm80Config, TheSchedulersKvTilesAreWholeTilesOfBothPaths) {
  EXPECT_EQ(kKvTile, kWarps * 16);
  for (const HeadDims& dims : kHeadDims) {
    EXPECT_EQ(kKvTile % prefill_kv_tile(dims), 0);
    EXPECT_EQ(prefill_kv_tile(dims) % 16, 0);
    EXPECT_GE(rows_per_tile(dims), kDecodeRows);
    EXPECT_LE(rows_per_tile(dims), kThreads);  // a thread binds a row
    EXPECT_LE(tile_bytes(dims), kMaxSmemBytes);
    EXPECT_GE(rows_per_tile(dims), kWarps * kDecodeRows);  // each warp has room for its O
    EXPECT_EQ(epilogue_stride(dims) % 32, 8);              // and rows of a quad's columns lie in different banks
  }
}

TEST(Sm80Config, LargeHeadDimensionsFitTheLeastSharedMemory) {
  EXPECT_EQ(kKvTile % kLargeHeadKvTile, 0);
  EXPECT_LE(kLargeHeadBytes, kMaxSmemBytes);
  EXPECT_LE(4 * kLargeHeadRows * epilogue_stride(kLargeHeadDims), kLargeHeadBytes);
  EXPECT_EQ(epilogue_stride(kLargeHeadDims) % 32, 8);
  EXPECT_EQ(kLargeHeadScores % 128, 0);
  EXPECT_EQ(tile_rows(head_dims_index(576, 512)), kLargeHeadRows);
  EXPECT_EQ(tile_rows(head_dims_index(128, 128)), rows_per_tile({128, 128}));
  EXPECT_EQ((kLargeHeadRows / 16) * (kLargeHeadKvTile / 8), kWarps);  // a warp has 16 rows' scores of 8 keys
}

/// Rows' ranges of visible tokens, and what a tile needs, token by token.
struct Ranges {
  std::vector<std::pair<int32_t, int32_t>> rows;

  VisibleRange visible_range() const {
    VisibleRange out{INT32_MAX, 0, 0, INT32_MAX};
    for (const auto& [begin, end] : rows) {
      if (begin < end) {
        out.any_begin = std::min(out.any_begin, begin);
        out.any_end = std::max(out.any_end, end);
      }
      out.all_begin = std::max(out.all_begin, begin);
      out.all_end = std::min(out.all_end, end);
    }
    return out;
  }
  int64_t seen_by(int32_t token) const {
    return std::count_if(rows.begin(), rows.end(),
                         [&](const auto& row) { return token >= row.first && token < row.second; });
  }
};

TEST(Sm80Config, MasksAreAppliedWhereSomeRowDoesNotSeeSomeToken) {
  const std::vector<Ranges> cases{
      {{{0, 100}}},                      // decode
      {{{37, 100}}},                     // decode with a window
      {{{0, 97}, {0, 98}, {0, 99}}},     // causal
      {{{30, 97}, {31, 98}, {32, 99}}},  // causal with a window
      {{{0, 63}, {0, 64}}},              // the last token of a tile is one row's
      {{{1, 64}, {0, 64}}},              // the first is
      {{{0, 64}, {0, 0}}},               // a row that is_visible nothing
      {{{0, 0}}},                        // no row does
      {{{0, 10}, {90, 100}}},            // ranges apart
  };
  for (const Ranges& ranges : cases) {
    const VisibleRange range = ranges.visible_range();
    const auto rows = static_cast<int64_t>(ranges.rows.size());
    for (const int32_t count : {16, 32, 64}) {
      for (int32_t first = 0; first < 128; first += count) {
        bool unseen = false;
        bool mixed = false;
        for (int32_t token = first; token < first + count; ++token) {
          const int64_t seen = ranges.seen_by(token);
          unseen = unseen || seen < rows;
          mixed = mixed || (seen > 0 && seen < rows);
        }
        EXPECT_EQ(needs_mask(range, first, count), unseen) << first;
        // Tokens that are copied although no row sees them may be counted as mixed, never the other way round.
        EXPECT_TRUE(!mixed || is_mixed(range, first, count)) << first;
      }
    }
  }
}

TEST(Sm80Config, ADecodeStepNeverScansForNanAndInf) {
  for (const Ranges& ranges : {Ranges{{{0, 100}}}, Ranges{{{37, 100}}}, Ranges{{{37, 100}, {37, 100}}}}) {
    for (int32_t first = 0; first < 128; first += 16)
      EXPECT_FALSE(is_mixed(ranges.visible_range(), first, 16)) << first;
  }
}

}  // namespace
}  // namespace folio::kernels::cuda::sm80
