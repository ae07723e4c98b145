#include "scheduler/mask_bounds.hpp"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace folio::inline v0::scheduler {
namespace {

constexpr KvShard kWhole{};
constexpr KvShard kMiddle{.world = 3, .rank = 1, .interleave = 2};

constexpr MaskBounds bounds_of(MaskKind mask, SegmentMask segment_mask, int32_t left, int32_t right) {
  return mask_bounds({.kind = mask, .window_left = left, .window_right = right}, segment_mask);
}

// Offsets 2, 3, 8, 9, 14, 15 ... lie on rank 1 of 3 with an interleave of 2.
static_assert(shard_offset(kMiddle, 0) == 2 && shard_offset(kMiddle, 1) == 3 && shard_offset(kMiddle, 2) == 8);
static_assert(shard_count_below(kMiddle, 2) == 0 && shard_count_below(kMiddle, 3) == 1 &&
              shard_count_below(kMiddle, 8) == 2);
static_assert(shard_count_below(kMiddle, -5) == 0 && shard_count_below(kWhole, 7) == 7);

// A query at 9 with a left window of 2: keys 7, 8, 9 are visible: w + 1 keys with itself.
static_assert(visible_range({0, 20, kWhole}, bounds_of(MaskKind::kCausal, SegmentMask::kAsConfig, 2, -1), 9, 9) ==
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
    ASSERT_EQ(visible_range(segment, bounds_of(mask, segment_mask, left, right), p_lo, p_hi), expected) << "case " << i;
  }
}

/// One rule after the other, by hand.
constexpr MaskRules rules(MaskRules mask_rules) {
  mask_rules.per_query = true;
  return mask_rules;
}
constexpr TokenRange keys(const MaskRules& of, const QueryMask& query, int64_t p) {
  int32_t positions[2]{};
  store_visible_positions(of, query, p, positions);
  return visible_to_token({0, 100, kWhole}, mask_bounds(of, SegmentMask::kAsConfig), positions, 0, p);
}
constexpr QueryMask image(int32_t begin, int32_t end) {
  return {.span_begin = begin, .span_end = end};
}

// Chunks of 8: a query at 19 sees 16 to 19, without causal 16 to 23. Chunks begin at kv_start; keys below are hidden.
static_assert(keys(rules({.attention_chunk = 8}), {}, 19) == TokenRange{16, 20});
static_assert(keys(rules({.kind = MaskKind::kNone, .attention_chunk = 8}), {}, 19) == TokenRange{16, 24});
static_assert(keys(rules({.attention_chunk = 8}), {.has_start = true, .kv_start = 3}, 19) == TokenRange{19, 20});
static_assert(keys(rules({.attention_chunk = 8}), {.has_start = true, .kv_start = 3}, 2) == TokenRange{});
static_assert(keys(rules({}), {.has_start = true, .kv_start = 3}, 5) == TokenRange{3, 6});
static_assert(keys(rules({.window_left = 1}), {.has_start = true, .kv_start = 3}, 5) == TokenRange{4, 6});
// A request that is not causal sees all keys of its window.
static_assert(keys(rules({}), {.causal = false}, 5) == TokenRange{0, 100});
static_assert(keys(rules({.window_left = 2, .window_right = 3}), {.causal = false}, 5) == TokenRange{3, 9});
static_assert(keys(rules({.window_left = 2, .window_right = 3}), {}, 5) == TokenRange{3, 6});
// An image of [10, 20): a query within it sees its end. The window clamps it, or ends where it does.
static_assert(keys(rules({}), image(10, 20), 12) == TokenRange{0, 20});
static_assert(keys(rules({.window_left = 1}), image(10, 20), 12) == TokenRange{11, 20});
static_assert(keys(rules({.window_left = 1, .window_right = 3}), image(10, 20), 12) == TokenRange{11, 16});
static_assert(keys(rules({.window_left = 1, .span_window_left = -1}), image(10, 20), 14) == TokenRange{10, 20});
static_assert(keys(rules({.window_left = 1, .span_window_left = 3}), image(10, 20), 14) == TokenRange{11, 20});
static_assert(keys(rules({.window_left = 5, .span_window_left = 3}), image(10, 20), 14) == TokenRange{9, 20});
// The query's chunk cuts the image, and so does the request's start.
static_assert(keys(rules({.attention_chunk = 8}), image(10, 20), 12) == TokenRange{8, 16});
static_assert(keys(rules({.span_window_left = -1}),
                   {.has_start = true, .kv_start = 11, .span_begin = 10, .span_end = 20}, 14) == TokenRange{11, 20});
// Elsewhere: nothing but what lies between, and nothing where it is empty or not in the chunk.
static_assert(keys(rules({}), image(10, 20), 5) == TokenRange{0, 20});
static_assert(keys(rules({}), image(20, 10), 5) == TokenRange{0, 6});
static_assert(keys(rules({.attention_chunk = 8}), image(10, 20), 5) == TokenRange{0, 6});
static_assert(keys(rules({}), image(-2147483647 - 1, 2147483647), 5) == TokenRange{0, 100});

// What lies before the start is in chunks of its own.
static_assert(keys(rules({.kind = MaskKind::kNone, .attention_chunk = 8}), {.has_start = true, .kv_start = 3}, 2) ==
              TokenRange{});
// A segment with everything visible has no rules.
static_assert(visible_to_token({0, 100, kWhole},
                               mask_bounds({.window_left = 1, .attention_chunk = 8}, SegmentMask::kAllVisible), nullptr,
                               0, 19) == TokenRange{0, 100});
static_assert(!MaskRules{}.has_more() && MaskRules{.attention_chunk = 1}.has_more() &&
              MaskRules{.per_query = true}.has_more());

// Two requests of 3 and 2 tokens, at positions 4 to 6 and 9 to 10.
constexpr int32_t kStarts[] = {1, 2};
constexpr uint8_t kFlags[] = {0, 1};
constexpr int32_t kSpans[] = {0, 0, 5, 30, 0, 0, 9, 12, 0, 0};
constexpr QueryMasks kAllMasks{kStarts, kFlags, kSpans};
constexpr TokenRange keys_of_tokens(const QueryMasks& masks, int32_t request, int32_t begin, int32_t end, int64_t p) {
  const MaskRules of = rules({.window_left = 3, .window_right = 2});
  int32_t positions[10]{};
  for (int32_t token = begin; token < end; ++token) {
    store_visible_positions(of, query_mask(masks, request, token), p + token - begin, positions + 2 * token);
  }
  return visible_to_tokens({0, 50, kWhole}, mask_bounds(of, SegmentMask::kAsConfig), positions, begin, end, p);
}
static_assert(keys_of_tokens(kAllMasks, 0, 0, 1, 4) == TokenRange{1, 7});
static_assert(keys_of_tokens(kAllMasks, 1, 3, 5, 9) == TokenRange{6, 12});
static_assert(keys_of_tokens({kStarts, nullptr, nullptr}, 0, 0, 3, 4) == TokenRange{1, 7});
static_assert(keys_of_tokens({kStarts, nullptr, nullptr}, 1, 3, 5, 4) == TokenRange{2, 6});
static_assert(keys_of_tokens({nullptr, kFlags, nullptr}, 0, 0, 3, 4) == TokenRange{1, 9});
static_assert(keys_of_tokens({nullptr, kFlags, nullptr}, 1, 3, 5, 9) == TokenRange{6, 11});
// The second of three tokens has a span that ends behind the others' keys; below kv_start nobody sees anything.
static_assert(keys_of_tokens({nullptr, nullptr, kSpans}, 0, 0, 3, 4) == TokenRange{1, 8});
static_assert(keys_of_tokens({nullptr, nullptr, kSpans}, 0, 2, 3, 6) == TokenRange{3, 7});
static_assert(keys_of_tokens({kStarts, nullptr, nullptr}, 1, 3, 5, -9) == TokenRange{});
static_assert(keys_of_tokens({kStarts, nullptr, nullptr}, 1, 3, 5, 1) == TokenRange{2, 3});

constexpr int64_t kFar = int64_t{1} << 31;

// Far away from the start, and with the largest chunk, nothing overflows.
static_assert(keys(rules({.attention_chunk = 2147483647}), {.has_start = true, .kv_start = -2147483647 - 1}, 50) ==
              TokenRange{0, 51});
static_assert(keys(rules({.attention_chunk = 1}), {.has_start = true, .kv_start = 2147483647}, -kFar) == TokenRange{});

// Positions and windows at the ends of 32 bits do not overflow.
static_assert(visible_range({kFar - 10, 5, kWhole},
                            bounds_of(MaskKind::kNone, SegmentMask::kAsConfig, 2147483647, 2147483647), -kFar,
                            -kFar) == TokenRange{});
static_assert(visible_range({0, kFar - 1, kWhole}, bounds_of(MaskKind::kCausal, SegmentMask::kAsConfig, -1, -1),
                            kFar - 1, kFar - 1) == TokenRange{0, kFar - 1});
static_assert(shard_count_below({.world = 2147483647, .rank = 0, .interleave = 2147483647}, 2 * kFar) == 2147483647);

static_assert(tiles_touched({3, 9}, 4) == 3 && tiles_touched({4, 8}, 4) == 1 && tiles_touched({}, 4) == 0);

}  // namespace
}  // namespace folio::inline v0::scheduler
