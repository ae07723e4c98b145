#pragma once

#include <cstdint>

#include "folio/types/export.hpp"
#include "planner/partition_rule.hpp"

/// How finely work is cut that workers claim piece by piece (Schedule::kClaimed). Pure functions of integers, which the
/// host's planner and the device's both run.
///
/// The work stands in one line, a KV head's worth of it (all heads have the same), in order of claiming. It is cut in
/// rounds, each of half of what is left, in pieces of about half a worker's share of that ("factoring": Hummel,
/// Schonberg and Flynn, 1992). Units that are no dearer stay whole. So workers that differ in speed end at about the
/// same time, and the number of pieces grows with the workers and the logarithm of the work, not with the work. Where a
/// worker's share is short, what a second piece costs to begin is more than any balance gains: then every worker gets
/// one piece, if equal pieces can be had.
namespace folio::inline v0::planner {

/// Work from the line's last boundary up to `end`, in pieces of up to `piece`: cost of one KV head.
struct ClaimRound {
  int64_t end = 0;
  int64_t piece = 0;
};

inline constexpr int32_t kMostClaimRounds = 7;

struct ClaimRule {
  ClaimRound rounds[kMostClaimRounds];
  int32_t num_rounds = 0;
  int64_t least_tiles = 1;     ///< KV tiles of a piece at least, unless there are no more
  int32_t heads_together = 1;  ///< KV heads whose claims of the same keys are neighbours
};

/// What the rule depends on.
struct ClaimLine {
  int64_t total = 0;  ///< cost of one KV head's work
  int32_t num_kv_heads = 1;
  int32_t num_workers = 1;
  int64_t least_tiles = 1;      ///< KV tiles that are worth a piece of their own
  int64_t least_tile_cost = 1;  ///< cost of the cheapest KV tile
  FOLIO_HOST_DEVICE constexpr int64_t least_piece() const { return least_tiles * least_tile_cost; }
  /// A worker's share of what is left from `begin` on.
  FOLIO_HOST_DEVICE constexpr int64_t share(int64_t begin) const {
    return (total - begin) * num_kv_heads / num_workers;
  }
};

FOLIO_HOST_DEVICE constexpr ClaimRule one_round(const ClaimLine& line, int64_t piece) {
  ClaimRule rule;
  rule.rounds[0] = {line.total, piece};
  rule.num_rounds = 1;
  rule.least_tiles = line.least_tiles;
  return rule;
}

/// Half a worker's share of what is left when round `index` begins.
FOLIO_HOST_DEVICE constexpr int64_t half_share(const ClaimLine& line, int32_t index) {
  return (line.total >> index) * line.num_kv_heads / line.num_workers / 2;
}

/// Whether round `index`, which all before it leave something to, is the last.
FOLIO_HOST_DEVICE constexpr bool is_last_round(const ClaimLine& line, int32_t index) {
  return index + 1 == kMostClaimRounds || half_share(line, index) <= line.least_piece();
}

FOLIO_HOST_DEVICE constexpr ClaimRound claim_round(const ClaimLine& line, int32_t index) {
  const int64_t piece = half_share(line, index);
  const int64_t least = line.least_piece();
  const int64_t end = is_last_round(line, index) ? line.total : line.total - (line.total >> index) / 2;
  // A quarter more: what is a little dearer than a piece is not worth two of little more than half.
  return {end, piece < least ? least : piece + piece / 4};
}

FOLIO_HOST_DEVICE constexpr ClaimRule claim_rounds(const ClaimLine& line) {
  if (line.num_workers == 1) return one_round(line, line.total);
  ClaimRule rule;
  rule.least_tiles = line.least_tiles;
  bool last = false;
  while (!last) {
    last = is_last_round(line, rule.num_rounds);
    rule.rounds[rule.num_rounds] = claim_round(line, rule.num_rounds);
    ++rule.num_rounds;
  }
  return rule;
}

/// Sizes that are tried for one equal piece a worker: sixteenths of a worker's share.
inline constexpr int32_t kPieceTrials = 5;

/// Whether one piece a worker is to be tried at all.
FOLIO_HOST_DEVICE constexpr bool is_short(const ClaimLine& line) {
  return line.num_workers > 1 && line.share(0) <= 4 * line.least_piece();
}

FOLIO_HOST_DEVICE constexpr ClaimRule piece_trial(const ClaimLine& line, int32_t trial) {
  const int64_t share = line.share(0);
  const int64_t piece = share + share * trial / 16;
  const int64_t least = line.least_piece();
  return one_round(line, piece < least ? least : piece);
}

/// Pieces of a unit at one trial, whatever its ranges are.
FOLIO_HOST_DEVICE constexpr int64_t trial_parts(const ClaimRule& trial, int64_t kv_tiles, int64_t tile_cost) {
  const int64_t wanted = ceil_div(kv_tiles * tile_cost, trial.rounds[0].piece);
  const int64_t most = kv_tiles / trial.least_tiles;
  const int64_t parts = wanted < most ? wanted : most;
  return parts < 1 ? 1 : parts;
}

/// Pieces that the whole batch makes of one KV head's work, for each trial.
struct TrialPieces {
  int32_t of[kPieceTrials] = {};
};

struct AddTrials {
  FOLIO_HOST_DEVICE constexpr TrialPieces operator()(const TrialPieces& a, const TrialPieces& b) const {
    TrialPieces both;
    for (int32_t i = 0; i < kPieceTrials; ++i) {
      const int64_t sum = int64_t{a.of[i]} + b.of[i];
      both.of[i] = static_cast<int32_t>(sum < 0x7fffffff ? sum : 0x7fffffff);
    }
    return both;
  }
};

/// The rule, given what the trials came to; they are not looked at where the line is not short.
FOLIO_HOST_DEVICE constexpr ClaimRule claim_rule(const ClaimLine& line, const TrialPieces& trials) {
  if (is_short(line)) {
    for (int32_t i = 0; i < kPieceTrials; ++i) {
      if (int64_t{trials.of[i]} * line.num_kv_heads <= line.num_workers) return piece_trial(line, i);
    }
  }
  return claim_rounds(line);
}

/// A row tile's keys in one segment, or all of its keys, in the line.
struct ClaimSpan {
  int64_t begin = 0;     ///< place in the line
  int64_t kv_tiles = 0;  ///< at least 1
  int64_t tile_cost = 1;
};

FOLIO_HOST_DEVICE constexpr int32_t claim_round_at(const ClaimRule& rule, int64_t place) {
  int32_t round = 0;
  while (round + 1 < rule.num_rounds && place >= rule.rounds[round].end) ++round;
  return round;
}

/// Whether a unit of this cost, which begins at `place`, is to be cut at all.
FOLIO_HOST_DEVICE constexpr bool is_to_be_cut(const ClaimRule& rule, int64_t place, int64_t cost) {
  return cost > rule.rounds[claim_round_at(rule, place)].piece;
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
    const int64_t wanted = ceil_div(tiles * span.tile_cost, here.piece);
    const int64_t most = tiles / rule.least_tiles;
    const int64_t pieces = wanted < most ? wanted : most;
    visit(ClaimRun{begin, end, static_cast<int32_t>(pieces < 1 ? 1 : pieces)});
    begin = end;
  }
}

/// How many pieces a span that is to be cut makes.
FOLIO_HOST_DEVICE FOLIO_CALLED constexpr int32_t count_pieces(const ClaimRule& rule, const ClaimSpan& span) {
  int32_t count = 0;
  for_each_claim_run(rule, span, [&count](const ClaimRun& run) { count += run.pieces; });
  return count;
}

/// KV tiles of piece number `index` of a span that is to be cut.
FOLIO_HOST_DEVICE FOLIO_CALLED constexpr TokenRange piece_of(const ClaimRule& rule, const ClaimSpan& span,
                                                             int32_t index) {
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
