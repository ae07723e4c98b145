#include "planner/partition_rule.hpp"

#include <gtest/gtest.h>

namespace folio::inline v0::planner {
namespace {

constexpr KvShard kWhole{};
constexpr KvShard kMiddle{.world = 3, .rank = 1, .interleave = 2};

// Offsets 2, 3, 8, 9, 14, 15 ... lie on rank 1 of 3 with an interleave of 2.
static_assert(shard_offset(kMiddle, 0) == 2 && shard_offset(kMiddle, 1) == 3 && shard_offset(kMiddle, 2) == 8);
static_assert(shard_count_below(kMiddle, 2) == 0 && shard_count_below(kMiddle, 3) == 1 &&
              shard_count_below(kMiddle, 8) == 2);
static_assert(shard_count_below(kMiddle, -5) == 0 && shard_count_below(kWhole, 7) == 7);

// A query at 9 with a left window of 2 sees keys 7, 8, 9 and no more: w + 1 keys with itself.
static_assert(visible_range({0, 20, kWhole}, key_sight(MaskKind::kCausal, SegmentMask::kAsConfig, 2, -1), 9) ==
              TokenRange{7, 10});

TEST(PartitionRule, CountIsTheInverseOfTheOffset) {
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

}  // namespace
}  // namespace folio::inline v0::planner
