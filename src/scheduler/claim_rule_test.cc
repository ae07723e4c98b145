#include "scheduler/claim_rule.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "scheduler/claim_order.hpp"

namespace folio::inline v0::scheduler {
namespace {

ClaimLine some_line(std::mt19937& random) {
  ClaimLine line;
  line.num_kv_heads = 1 + static_cast<int32_t>(random() % 8);
  line.num_workers = 2 + static_cast<int32_t>(random() % 150);
  line.least_tiles = 1 + static_cast<int32_t>(random() % 16);
  line.least_tile_cost = 1 + static_cast<int32_t>(random() % 40);
  line.total = 1 + static_cast<int64_t>(random() % (random() % 2 == 0 ? 100000000 : 10000));
  return line;
}

TEST(ClaimRule, RoundsHalveWhatIsLeftAndCoverTheLine) {
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i) {
    const ClaimLine line = some_line(random);
    const ClaimRule rule = claim_rounds(line);
    ASSERT_GE(rule.num_rounds, 1);
    ASSERT_EQ(rule.rounds[rule.num_rounds - 1].end, line.total);
    int64_t begin = 0;
    for (int32_t r = 0; r < rule.num_rounds; ++r) {
      const ClaimRound& round = rule.rounds[r];
      ASSERT_GE(round.piece, line.least_piece());
      ASSERT_LE(round.piece, std::max(line.least_piece(), line.share(begin) * 5 / 8));
      if (r + 1 < rule.num_rounds) {
        ASSERT_EQ(round.end, line.total - (line.total - begin) / 2);
      }
      begin = round.end;
    }
  }
}

TEST(ClaimRule, APlacesRoundIsTheFirstThatEndsBehindIt) {
  std::mt19937 random(4);
  for (int i = 0; i < 5000; ++i) {
    const ClaimLine line = some_line(random);
    Waves waves;  // the first row tile is all there is: it does not end evenly
    waves.cost[0] = line.total;
    TrialPieces none;
    std::fill_n(none.of, kPieceTrials, INT32_MAX);
    for (const ClaimRule& rule :
         {claim_rounds(line), dearest_first_rule(line, waves, none), one_round(line, int64_t{7})}) {
      for (const int64_t end : {int64_t{0}, int64_t{1}, rule.rounds[0].end, rule.rounds[rule.num_rounds / 2].end,
                                line.total, static_cast<int64_t>(random() % static_cast<uint64_t>(line.total))}) {
        for (const int64_t place : {end - 1, end, end + 1}) {
          if (place < 0) continue;
          int32_t expected = 0;
          while (expected + 1 < rule.num_rounds && place >= rule.rounds[expected].end) ++expected;
          ASSERT_EQ(claim_round_at(rule, place), expected) << "place " << place << " of " << line.total;
        }
      }
    }
  }
}

TEST(Divisor32, DividesEveryNumber) {
  std::mt19937 random(5);
  const auto some = [&random](uint32_t i) {
    const auto number = static_cast<uint32_t>(random() >> (random() % 32));
    return i % 8 == 0 ? ~number : number;
  };
  for (uint32_t i = 0; i < 20000; ++i) {
    const uint32_t value = i < 100 ? i + 1 : std::max(some(i), 1u);
    const Divisor32 divisor = value;
    for (const uint32_t number : {0u, 1u, value - 1, value, value + 1, 2 * value - 1, 0x7fffffffu, 0xffffffffu,
                                  0xffffffffu / value * value, 0xffffffffu / value * value - 1, some(i), some(i + 1)}) {
      ASSERT_EQ(number / divisor, number / value) << number << " / " << value;
    }
  }
}

TEST(ClaimRule, PiecesFollowOneAnotherAndAreNeitherTooDearNorTooSmall) {
  std::mt19937 random(2);
  for (int i = 0; i < 5000; ++i) {
    const ClaimLine line = some_line(random);
    const ClaimRule rule = claim_rounds(line);
    ClaimSpan span;
    span.tile_cost = line.least_tile_cost + static_cast<int64_t>(random() % 3) * line.least_tile_cost;
    span.begin = static_cast<int64_t>(random() % static_cast<uint64_t>(line.total));
    span.kv_tiles = std::max<int64_t>(1, (line.total - span.begin) / span.tile_cost / (1 + random() % 4));
    const int32_t count = count_pieces(rule, span);
    ASSERT_GE(count, 1);
    int64_t next = 0;
    for (int32_t p = 0; p < count; ++p) {
      const TokenRange piece = piece_of(rule, span, p);
      ASSERT_EQ(piece.begin, next);
      next = piece.end;
      const int64_t tiles = piece.end - piece.begin;
      // A remnant of up to half a piece of the next round may have been added, and a tile by rounding.
      const ClaimRound& round = rule.rounds[claim_round_at(rule, span.begin + piece.begin * span.tile_cost)];
      ASSERT_LE(tiles, std::max(2 * line.least_tiles, round.piece * 3 / 2 / span.tile_cost + 1)) << "case " << i;
      if (count > 1 && p > 0 && p + 1 < count) {
        ASSERT_GE(tiles * 2, std::min<int64_t>(line.least_tiles, 1)) << "case " << i;
      }
    }
    ASSERT_EQ(next, span.kv_tiles);
    ASSERT_TRUE(piece_of(rule, span, count).empty());
  }
}

TEST(ClaimRule, OnePieceAWorkerWhereTheWorkIsShortAndDividesThatWay) {
  const ClaimLine line{
      .total = 4096, .num_kv_heads = 8, .num_workers = 132, .least_tiles = 16, .least_tile_cost = 16};  // share 248
  ASSERT_TRUE(is_short(line));
  TrialPieces trials;
  for (int32_t& pieces : trials.of) pieces = 17;  // 136 of 132 workers
  EXPECT_EQ(claim_rule(line, trials).rounds[0].piece, claim_rounds(line).rounds[0].piece);
  trials.of[3] = 16;
  const ClaimRule rule = claim_rule(line, trials);
  EXPECT_EQ(rule.num_rounds, 1);
  EXPECT_EQ(rule.rounds[0].piece, piece_trial(line, 3).rounds[0].piece);
  EXPECT_EQ(rule.rounds[0].piece, 294);  // 19/16 of the share
  EXPECT_EQ(trial_parts<int64_t>(rule.rounds[0].piece, rule.least_tiles, 300, 16), 17);
  EXPECT_EQ(trial_parts<int64_t>(rule.rounds[0].piece, rule.least_tiles, 31, 16),
            1);  // of fewer than 32 tiles no two pieces of 16 can be had
}

TEST(ClaimRule, OneWorkerHasOneRoundOfEverything) {
  ClaimLine line{.total = 1000000, .num_kv_heads = 8, .num_workers = 1, .least_tiles = 1, .least_tile_cost = 1};
  EXPECT_FALSE(is_short(line));
  EXPECT_EQ(claim_rounds(line).num_rounds, 1);
  EXPECT_FALSE(is_to_be_cut<int64_t>(claim_rounds(line), 0, 1000000));
}

}  // namespace
}  // namespace folio::inline v0::scheduler
