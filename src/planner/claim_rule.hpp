#pragma once

#include <cstdint>

#include "folio/types/export.hpp"
#include "planner/partition_rule.hpp"

/// How finely work is cut that workers claim piece by piece (Schedule::kClaimed). Pure functions of integers, which the
/// host's planner and the device's both run.
///
/// The work stands in one line, a KV head's worth of it (all heads have the same), in order of claiming. Most of it is
/// cut coarsely, whole units where they are no dearer than a share of a worker's load; the rest in rounds, each of half
/// of what is left, in pieces of half a worker's share of that ("factoring", Hummel, Schonberg and Flynn, 1992). So
/// workers that differ in speed end at about the same time, and the number of pieces grows with the workers and the
/// logarithm of the work, not with the work.
namespace folio::inline v0::planner {

/// Work from the line's last boundary up to `end`, in pieces of about `piece`: cost of one KV head.
struct ClaimRound {
  int64_t end = 0;
  int64_t piece = 0;
};

inline constexpr int32_t kMostClaimRounds = 7;

struct ClaimRule {
  ClaimRound rounds[kMostClaimRounds];
  int32_t num_rounds = 0;
  int64_t least_tiles = 1;  ///< KV tiles of a piece at least, unless there are no more
};

/// What the rule depends on.
struct ClaimLine {
  int64_t total = 0;  ///< cost of one KV head's work
  int32_t num_kv_heads = 1;
  int32_t num_workers = 1;
  int64_t least_tiles = 1;      ///< KV tiles that are worth a piece of their own
  int64_t least_tile_cost = 1;  ///< cost of the cheapest KV tile
};

FOLIO_HOST_DEVICE constexpr ClaimRule claim_rule(const ClaimLine& line) {
  ClaimRule rule;
  rule.least_tiles = line.least_tiles;
  const int64_t total = line.total;
  if (line.num_workers == 1) {
    rule.rounds[0] = {total, total};
    rule.num_rounds = 1;
    return rule;
  }
  const int64_t least = rule.least_tiles * line.least_tile_cost;
  // A worker's share of what is left from `begin` on.
  const auto share = [&line, total](int64_t begin) { return (total - begin) * line.num_kv_heads / line.num_workers; };
  // Coarse pieces of about 5,000 tokens, at most three to a worker; units beyond that are cut for the balance's sake.
  const int64_t main_part = total - total / 5;
  const int64_t main_share = share(0) - share(main_part);
  const int64_t wanted = 20 * least;
  const int64_t pieces = clamp_to((main_share + wanted / 2) / wanted, 1, 3);
  rule.rounds[0] = {main_part, main_share / pieces};
  int64_t begin = main_part;
  int32_t round = 1;
  for (; round < kMostClaimRounds; ++round) {
    const int64_t piece = share(begin) / 2;
    const bool last = piece <= least || round + 1 == kMostClaimRounds;
    rule.rounds[round] = {last ? total : total - (total - begin) / 2, piece};
    if (last) break;
    begin = rule.rounds[round].end;
  }
  rule.num_rounds = round + 1;
  for (int32_t i = 0; i < rule.num_rounds; ++i) {
    if (rule.rounds[i].piece < least) rule.rounds[i].piece = least;
  }
  return rule;
}

/// A row tile's keys in one segment, or all of its keys, in the line.
struct ClaimSpan {
  int64_t begin = 0;     ///< place in the line
  int64_t kv_tiles = 0;  ///< at least 1
  int64_t tile_cost = 1;
};

/// The dearest that is left whole where pieces of `piece` are wanted: a quarter more, rather than two of five eighths.
FOLIO_HOST_DEVICE constexpr int64_t dearest_piece(int64_t piece) {
  return piece + piece / 4;
}

FOLIO_HOST_DEVICE constexpr int32_t claim_round_at(const ClaimRule& rule, int64_t place) {
  int32_t round = 0;
  while (round + 1 < rule.num_rounds && place >= rule.rounds[round].end) ++round;
  return round;
}

/// Whether a unit of this cost, which begins at `place`, is to be cut at all.
FOLIO_HOST_DEVICE constexpr bool is_to_be_cut(const ClaimRule& rule, int64_t place, int64_t cost) {
  return cost > dearest_piece(rule.rounds[claim_round_at(rule, place)].piece);
}

/// Some neighbouring pieces of a span, of about the same size: those of one round.
struct ClaimRun {
  int64_t begin = 0;  ///< KV tiles of the span
  int64_t end = 0;
  int32_t pieces = 0;
};

/// Calls visit(ClaimRun) for the rounds that a span that is to be cut lies in, in order.
template <typename Visit>
FOLIO_HOST_DEVICE constexpr void for_each_claim_run(const ClaimRule& rule, const ClaimSpan& span, const Visit& visit) {
  int64_t begin = 0;
  for (int32_t round = claim_round_at(rule, span.begin); begin < span.kv_tiles; ++round) {
    const ClaimRound& here = rule.rounds[round];
    int64_t end = span.kv_tiles;
    if (round + 1 < rule.num_rounds) {
      const int64_t up_to = ceil_div(here.end - span.begin, span.tile_cost);
      if (up_to < end) end = up_to;
      // A remnant of less than half a piece is not worth one.
      if ((span.kv_tiles - end) * span.tile_cost * 2 < rule.rounds[round + 1].piece) end = span.kv_tiles;
      if (end < span.kv_tiles && (end - begin) * span.tile_cost * 2 < here.piece) continue;
    }
    const int64_t tiles = end - begin;
    const int64_t wanted = ceil_div(tiles * span.tile_cost, dearest_piece(here.piece));
    const int64_t most = tiles / rule.least_tiles;
    const int64_t pieces = wanted < most ? wanted : most;
    visit(ClaimRun{begin, end, static_cast<int32_t>(pieces < 1 ? 1 : pieces)});
    begin = end;
  }
}

/// How many pieces a span that is to be cut makes.
FOLIO_HOST_DEVICE constexpr int32_t count_pieces(const ClaimRule& rule, const ClaimSpan& span) {
  int32_t count = 0;
  for_each_claim_run(rule, span, [&count](const ClaimRun& run) { count += run.pieces; });
  return count;
}

/// KV tiles of piece number `index` of a span that is to be cut.
FOLIO_HOST_DEVICE constexpr TokenRange piece_of(const ClaimRule& rule, const ClaimSpan& span, int32_t index) {
  TokenRange tiles;
  for_each_claim_run(rule, span, [&tiles, &index](const ClaimRun& run) {
    if (index >= 0 && index < run.pieces) {
      const int64_t count = run.end - run.begin;
      tiles = {run.begin + count * index / run.pieces, run.begin + count * (index + 1) / run.pieces};
    }
    index -= run.pieces;
  });
  return tiles;
}

}  // namespace folio::inline v0::planner
