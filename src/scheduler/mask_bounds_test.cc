#include "scheduler/mask_bounds.hpp"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace folio::inline v0::scheduler {
namespace {

constexpr KvShard kWhole{};
constexpr KvShard kMiddle{.world = 3, .rank = 1, .interleave = 2};

// Offsets 2, 3, 8, 9, 14, 15 ... lie on rank 1 of 3 with an interleave of 2.
static_assert(shard_offset(kMiddle, 0) == 2 && shard_offset(kMiddle, 1) == 3 && shard_offset(kMiddle, 2) == 8);
static_assert(shard_count_below(kMiddle, 2) == 0 && shard_count_below(kMiddle, 3) == 1 &&
              shard_count_below(kMiddle, 8) == 2);
static_assert(shard_count_below(kMiddle, -5) == 0 && shard_count_below(kWhole, 7) == 7);

// A query at 9 with a left window of 2: keys 7, 8, 9 are visible: w + 1 keys with itself.
static_assert(visible_range({0, 20, kWhole}, mask_bounds(MaskKind::kCausal, SegmentMask::kAsConfig, 2, -1), 9) ==
              TokenRange{7, 10});

TEST(MaskBounds, ShardCount_AnyOffset_InvertsShardOffset) {
  for (int32_t world = 1; world <= 4; ++world) {
    for (int32_t rank = 0; rank < world; ++rank) {
      for (int32_t interleave = 1; interleave <= 5; ++interleave) {
        const KvShard shard{.world = world, .rank = rank, .interleave = interleave};
        int64_t count = 0;
        for (int64_t offset = 0; offset < 200; ++offset) {
          ASSERT_EQ(shard_count_below(shard, offset), count);
          if ((offset / interleave) % world != rank) continue;
          ASSERT_EQ(shard_offset(shard, count), offset);
          ++count;
        }
      }
    }
  }
}

struct ShardLengths {
  int32_t world;
  int32_t interleave;
  int32_t length;
  std::vector<int64_t> per_rank;
};

// vLLM's tests of get_dcp_local_seq_lens, and further cases by hand.
TEST(MaskBounds, ShardLengths_VllmsCases_AreEqual) {
  const std::vector<ShardLengths> cases = {
      {2, 1, 1, {1, 0}},
      {2, 1, 2, {1, 1}},
      {2, 1, 128, {64, 64}},
      {2, 1, 129, {65, 64}},
      {2, 1, 256, {128, 128}},
      {2, 1, 257, {129, 128}},
      {2, 128, 1, {1, 0}},
      {2, 128, 2, {2, 0}},
      {2, 128, 128, {128, 0}},
      {2, 128, 129, {128, 1}},
      {2, 128, 256, {128, 128}},
      {2, 128, 257, {129, 128}},
      {4, 128, 1, {1, 0, 0, 0}},
      {4, 128, 2, {2, 0, 0, 0}},
      {4, 128, 128, {128, 0, 0, 0}},
      {4, 128, 129, {128, 1, 0, 0}},
      {4, 128, 256, {128, 128, 0, 0}},
      {4, 128, 257, {128, 128, 1, 0}},
      {2, 4, 1, {1, 0}},
      {2, 4, 4, {4, 0}},
      {2, 4, 5, {4, 1}},
      {2, 4, 8, {4, 4}},
      {2, 4, 9, {5, 4}},
      {2, 4, 100, {52, 48}},
      {4, 2, 3, {2, 1, 0, 0}},
      {4, 2, 7, {2, 2, 2, 1}},
      {4, 2, 9, {3, 2, 2, 2}},
      {4, 2, 100, {26, 26, 24, 24}},
  };
  for (const ShardLengths& one : cases) {
    int64_t sum = 0;
    for (int32_t rank = 0; rank < one.world; ++rank) {
      const int64_t count =
          shard_count_below({.world = one.world, .rank = rank, .interleave = one.interleave}, one.length);
      EXPECT_EQ(count, one.per_rank[static_cast<size_t>(rank)])
          << one.length << " tokens, rank " << rank << " of " << one.world << ", interleave " << one.interleave;
      sum += count;
    }
    EXPECT_EQ(sum, one.length);
  }
}

/// Whether a key at `key` is visible to a query at `query`, by the definition.
bool is_visible(MaskKind mask, SegmentMask segment_mask, int32_t left, int32_t right, int64_t query, int64_t key) {
  if (segment_mask == SegmentMask::kAllVisible) return true;
  if (mask == MaskKind::kCausal && key > query) return false;
  return (left < 0 || key >= query - left) && (right < 0 || key <= query + right);
}

TEST(MaskBounds, VisibleRange_RandomMasks_MatchesTheDefinition) {
  std::mt19937 random(9);
  const auto pick = [&random](int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(random);
  };
  for (int i = 0; i < 20000; ++i) {
    KvShard shard{.world = pick(1, 4), .rank = 0, .interleave = pick(1, 5)};
    shard.rank = pick(0, shard.world - 1);
    const SegmentSpan segment{.first_pos = pick(-5, 20), .kv_len = pick(0, 30), .shard = shard};
    const auto mask = static_cast<MaskKind>(pick(0, 2));
    const auto segment_mask = pick(0, 5) == 0 ? SegmentMask::kAllVisible : SegmentMask::kAsConfig;
    const int32_t left = pick(-1, 15);
    const int32_t right = pick(-1, 15);
    const int32_t p_lo = pick(-10, 60);
    const int32_t p_hi = p_lo + pick(0, 6);
    TokenRange expected;
    for (int64_t j = 0; j < segment.kv_len; ++j) {
      bool seen = false;
      for (int64_t p = p_lo; p <= p_hi; ++p) {
        seen |= is_visible(mask, segment_mask, left, right, p, segment.first_pos + shard_offset(shard, j));
      }
      if (!seen) continue;
      if (expected.empty()) expected.begin = j;
      expected.end = j + 1;
    }
    ASSERT_EQ(visible_range(segment, mask_bounds(mask, segment_mask, left, right), p_lo, p_hi), expected)
        << "case " << i;
  }
}

constexpr int64_t kFar = int64_t{1} << 31;

// Positions and windows at the ends of 32 bits do not overflow.
static_assert(visible_range({kFar - 10, 5, kWhole},
                            mask_bounds(MaskKind::kNone, SegmentMask::kAsConfig, 2147483647, 2147483647),
                            -kFar) == TokenRange{});
static_assert(visible_range({0, kFar - 1, kWhole}, mask_bounds(MaskKind::kCausal, SegmentMask::kAsConfig, -1, -1),
                            kFar - 1) == TokenRange{0, kFar - 1});
static_assert(shard_count_below({.world = 2147483647, .rank = 0, .interleave = 2147483647}, 2 * kFar) == 2147483647);

static_assert(tiles_touched({3, 9}, 4) == 3 && tiles_touched({4, 8}, 4) == 1 && tiles_touched({}, 4) == 0);

}  // namespace
}  // namespace folio::inline v0::scheduler
