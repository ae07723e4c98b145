#include "scheduler/split_rule.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "scheduler/dynamic_scheduler.hpp"

namespace folio::inline v0::scheduler {
namespace {

HeadTileSpace some_line(std::mt19937& random) {
  HeadTileSpace space;
  space.num_kv_heads = 1 + static_cast<int32_t>(random() % 8);
  space.num_workers = 2 + static_cast<int32_t>(random() % 150);
  space.min_split_tiles = 1 + static_cast<int32_t>(random() % 16);
  space.min_tile_cost = 1 + static_cast<int32_t>(random() % 40);
  space.total = 1 + static_cast<int64_t>(random() % (random() % 2 == 0 ? 100000000 : 10000));
  return space;
}

TEST(SplitRule, SplitWaves_HalveTheRemainder_CoverTheTileSpace) {
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i) {
    const HeadTileSpace space = some_line(random);
    const SplitRule rule = factoring_rule(space);
    ASSERT_GE(rule.num_split_waves, 1);
    ASSERT_EQ(rule.split_waves[rule.num_split_waves - 1].end, space.total);
    int64_t begin = 0;
    for (int32_t r = 0; r < rule.num_split_waves; ++r) {
      const SplitWave& wave = rule.split_waves[r];
      ASSERT_GE(wave.split_cost, space.min_split_cost());
      ASSERT_LE(wave.split_cost, std::max(space.min_split_cost(), space.share(begin) * 5 / 8));
      if (r + 1 < rule.num_split_waves) {
        ASSERT_EQ(wave.end, space.total - (space.total - begin) / 2);
      }
      begin = wave.end;
    }
  }
}

TEST(SplitRule, SplitWaveAt_AnyPosition_IsTheFirstWaveThatEndsBehindIt) {
  std::mt19937 random(4);
  for (int i = 0; i < 5000; ++i) {
    const HeadTileSpace space = some_line(random);
    Waves waves;  // the first row tile is all there is: it does not end evenly
    waves.cost[0] = space.total;
    TrialSplits none;
    std::fill_n(none.of, kSplitTrials, INT32_MAX);
    for (const SplitRule& rule :
         {factoring_rule(space), lpt_rule(space, waves, none), one_split_wave(space, int64_t{7})}) {
      for (const int64_t end :
           {int64_t{0}, int64_t{1}, rule.split_waves[0].end, rule.split_waves[rule.num_split_waves / 2].end,
            space.total, static_cast<int64_t>(random() % static_cast<uint64_t>(space.total))}) {
        for (const int64_t place : {end - 1, end, end + 1}) {
          if (place < 0) continue;
          int32_t expected = 0;
          while (expected + 1 < rule.num_split_waves && place >= rule.split_waves[expected].end) ++expected;
          ASSERT_EQ(split_wave_at(rule, place), expected) << "place " << place << " of " << space.total;
        }
      }
    }
  }
}

TEST(FastDivisor, Quotient_EveryNumber_IsExact) {
  std::mt19937 random(5);
  const auto some = [&random](uint32_t i) {
    const auto number = static_cast<uint32_t>(random() >> (random() % 32));
    return i % 8 == 0 ? ~number : number;
  };
  for (uint32_t i = 0; i < 20000; ++i) {
    const uint32_t value = i < 100 ? i + 1 : std::max(some(i), 1u);
    const FastDivisor divisor = value;
    for (const uint32_t number : {0u, 1u, value - 1, value, value + 1, 2 * value - 1, 0x7fffffffu, 0xffffffffu,
                                  0xffffffffu / value * value, 0xffffffffu / value * value - 1, some(i), some(i + 1)}) {
      ASSERT_EQ(number / divisor, number / value) << number << " / " << value;
    }
  }
}

TEST(SplitRule, Splits_AnySpan_AreContiguousWithinTheirCostBounds) {
  std::mt19937 random(2);
  for (int i = 0; i < 5000; ++i) {
    const HeadTileSpace space = some_line(random);
    const SplitRule rule = factoring_rule(space);
    KvSpan span;
    span.tile_cost = space.min_tile_cost + static_cast<int64_t>(random() % 3) * space.min_tile_cost;
    span.begin = static_cast<int64_t>(random() % static_cast<uint64_t>(space.total));
    span.kv_tiles = std::max<int64_t>(1, (space.total - span.begin) / span.tile_cost / (1 + random() % 4));
    const int32_t count = count_splits(rule, span);
    ASSERT_GE(count, 1);
    int64_t next = 0;
    for (int32_t p = 0; p < count; ++p) {
      const TokenRange split = split_of(rule, span, p);
      ASSERT_EQ(split.begin, next);
      next = split.end;
      const int64_t tiles = split.end - split.begin;
      // A remnant of up to half a split of the next split wave may have been added, and a tile by rounding.
      const SplitWave& wave = rule.split_waves[split_wave_at(rule, span.begin + split.begin * span.tile_cost)];
      ASSERT_LE(tiles, std::max(2 * space.min_split_tiles, wave.split_cost * 3 / 2 / span.tile_cost + 1))
          << "case " << i;
      if (count > 1 && p > 0 && p + 1 < count) {
        ASSERT_GE(tiles * 2, std::min<int64_t>(space.min_split_tiles, 1)) << "case " << i;
      }
    }
    ASSERT_EQ(next, span.kv_tiles);
    ASSERT_TRUE(split_of(rule, span, count).empty());
  }
}

TEST(SplitRule, EqualSplits_ShortWork_OnePerWorker) {
  const HeadTileSpace space{
      .total = 4096, .num_kv_heads = 8, .num_workers = 132, .min_split_tiles = 16, .min_tile_cost = 16};  // share 248
  ASSERT_TRUE(is_short(space));
  TrialSplits trials;
  for (int32_t& num_splits : trials.of) num_splits = 17;  // 136 of 132 workers
  EXPECT_EQ(split_rule(space, trials).split_waves[0].split_cost, factoring_rule(space).split_waves[0].split_cost);
  trials.of[3] = 16;
  const SplitRule rule = split_rule(space, trials);
  EXPECT_EQ(rule.num_split_waves, 1);
  EXPECT_EQ(rule.split_waves[0].split_cost, trial_rule(space, 3).split_waves[0].split_cost);
  EXPECT_EQ(rule.split_waves[0].split_cost, 294);  // 19/16 of the share
  EXPECT_EQ(trial_splits<int64_t>(rule.split_waves[0].split_cost, rule.min_split_tiles, 300, 16), 17);
  EXPECT_EQ(trial_splits<int64_t>(rule.split_waves[0].split_cost, rule.min_split_tiles, 31, 16),
            1);  // of fewer than 32 tiles no two splits of 16 can be had
}

TEST(SplitRule, SplitWaves_OneWorker_OneWave) {
  HeadTileSpace space{.total = 1000000, .num_kv_heads = 8, .num_workers = 1, .min_split_tiles = 1, .min_tile_cost = 1};
  EXPECT_FALSE(is_short(space));
  EXPECT_EQ(factoring_rule(space).num_split_waves, 1);
  EXPECT_FALSE(needs_split<int64_t>(factoring_rule(space), 0, 1000000));
}

}  // namespace
}  // namespace folio::inline v0::scheduler
