#pragma once

#include <cstdint>

#include "folio/types/export.hpp"
#include "scheduler/divisor32.hpp"
#include "scheduler/partition_rule.hpp"

/// How finely work is cut that workers claim piece by piece (Schedule::kDynamic). Pure functions of integers, which the
/// host's scheduler and the device's both run.
///
/// The work stands in one line, a KV head's worth of it (all heads have the same), in order of claiming. It is cut in
/// rounds, each of half of what is left, in pieces of about half a worker's share of that ("factoring": Hummel,
/// Schonberg and Flynn, 1992). Units that are no dearer stay whole. So workers that differ in speed end at about the
/// same time, and the number of pieces grows with the workers and the logarithm of the work, not with the work. Where a
/// worker's share is short, what a second piece costs to begin is more than any balance gains: then every worker gets
/// one piece, if equal pieces can be had.
namespace folio::inline v0::scheduler {

/// Work from the line's last boundary up to `end`, in pieces of up to `piece`: cost of one KV head.
template <typename Int>
struct ClaimRoundOf {
  Int end = 0;
  DivisorOf<Int> piece = 0;
};

inline constexpr int32_t kMostClaimRounds = 7;

template <typename Int>
struct ClaimRuleOf {
  ClaimRoundOf<Int> rounds[kMostClaimRounds];
  int32_t num_rounds = 0;
  DivisorOf<Int> least_tiles = 1;  ///< KV tiles of a piece at least, unless there are no more
  int32_t heads_together = 1;      ///< KV heads whose claims of the same keys are neighbours
};

/// What the rule depends on.
template <typename Int>
struct ClaimLineOf {
  Int total = 0;  ///< cost of one KV head's work
  int32_t num_kv_heads = 1;
  DivisorOf<Int> num_workers = 1;
  DivisorOf<Int> least_tiles = 1;  ///< KV tiles that are worth a piece of their own
  Int least_tile_cost = 1;         ///< cost of the cheapest KV tile
  FOLIO_HOST_DEVICE constexpr Int least_piece() const { return least_tiles * least_tile_cost; }
  /// A worker's share of what is left from `begin` on.
  FOLIO_HOST_DEVICE constexpr Int share(Int begin) const {
    return (total - begin) * static_cast<Int>(num_kv_heads) / num_workers;
  }
};

template <typename Int>
FOLIO_HOST_DEVICE constexpr ClaimRuleOf<Int> one_round(const ClaimLineOf<Int>& line, Int piece) {
  ClaimRuleOf<Int> rule;
  rule.rounds[0] = {line.total, piece};
  rule.num_rounds = 1;
  rule.least_tiles = line.least_tiles;
  return rule;
}

/// Half a worker's share of what is left when round `index` begins.
template <typename Int>
FOLIO_HOST_DEVICE constexpr Int half_share(const ClaimLineOf<Int>& line, int32_t index) {
  return line.share(line.total - (line.total >> index)) / 2;
}

/// Whether round `index`, which all before it leave something to, is the last.
template <typename Int>
FOLIO_HOST_DEVICE constexpr bool is_last_round(const ClaimLineOf<Int>& line, int32_t index) {
  return index + 1 == kMostClaimRounds || half_share(line, index) <= line.least_piece();
}

template <typename Int>
FOLIO_HOST_DEVICE constexpr ClaimRoundOf<Int> claim_round(const ClaimLineOf<Int>& line, int32_t index) {
  const Int piece = half_share(line, index);
  const Int least = line.least_piece();
  const Int end = is_last_round(line, index) ? line.total : line.total - (line.total >> index) / 2;
  // A quarter more: what is a little dearer than a piece is not worth two of little more than half.
  return {end, piece < least ? least : piece + piece / 4};
}

template <typename Int>
FOLIO_HOST_DEVICE constexpr ClaimRuleOf<Int> claim_rounds(const ClaimLineOf<Int>& line) {
  if (line.num_workers == 1) return one_round(line, line.total);
  ClaimRuleOf<Int> rule;
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
template <typename Int>
FOLIO_HOST_DEVICE constexpr bool is_short(const ClaimLineOf<Int>& line) {
  return line.num_workers > 1 && line.share(0) <= 4 * line.least_piece();
}

template <typename Int>
FOLIO_HOST_DEVICE constexpr Int trial_piece(const ClaimLineOf<Int>& line, int32_t trial) {
  const Int share = line.share(0);
  const Int piece = share + share * static_cast<Int>(trial) / 16;
  const Int least = line.least_piece();
  return piece < least ? least : piece;
}
template <typename Int>
FOLIO_HOST_DEVICE constexpr ClaimRuleOf<Int> piece_trial(const ClaimLineOf<Int>& line, int32_t trial) {
  return one_round(line, trial_piece(line, trial));
}

/// Pieces of a unit at one trial, whatever its ranges are.
template <typename Int>
FOLIO_HOST_DEVICE constexpr Int trial_parts(const DivisorOf<Int>& piece, const DivisorOf<Int>& least_tiles,
                                            Int kv_tiles, Int tile_cost) {
  const Int wanted = ceil_div(kv_tiles * tile_cost, piece);
  const Int most = kv_tiles / least_tiles;
  const Int parts = wanted < most ? wanted : most;
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
template <typename Int>
FOLIO_HOST_DEVICE constexpr ClaimRuleOf<Int> claim_rule(const ClaimLineOf<Int>& line, const TrialPieces& trials) {
  if (is_short(line)) {
    for (int32_t i = 0; i < kPieceTrials; ++i) {
      if (int64_t{trials.of[i]} * line.num_kv_heads <= line.num_workers) return piece_trial(line, i);
    }
  }
  return claim_rounds(line);
}

/// A row tile's keys in one segment, or all of its keys, in the line.
template <typename Int>
struct ClaimSpanOf {
  Int begin = 0;     ///< place in the line
  Int kv_tiles = 0;  ///< at least 1
  DivisorOf<Int> tile_cost = 1;
};

/// Zeros in front of a number's leading bit.
FOLIO_HOST_DEVICE constexpr int32_t leading_zeros(uint32_t number) {
#if defined(__CUDA_ARCH__)
  return __clz(static_cast<int>(number));
#else
  return __builtin_clz(number);
#endif
}
FOLIO_HOST_DEVICE constexpr int32_t leading_zeros(int64_t number) {
#if defined(__CUDA_ARCH__)
  return __clzll(number);
#else
  return __builtin_clzll(static_cast<unsigned long long>(number));
#endif
}

/// The round that a place of the line is in. Every round leaves half, rounded down, of what it finds: round r lies
/// where at most total >> r is left, but more than total >> (r + 1).
template <typename Int>
FOLIO_HOST_DEVICE constexpr int32_t claim_round_at(const ClaimRuleOf<Int>& rule, Int place) {
  const int32_t last = rule.num_rounds - 1;
  const Int total = rule.rounds[last].end;
  if (last == 0 || place >= total) return last;
  const Int left = total - place;
  int32_t round = leading_zeros(left) - leading_zeros(total);
  if ((total >> round) < left) --round;
  return round < last ? round : last;
}

/// Whether a unit of this cost, which begins at `place`, is to be cut at all.
template <typename Int>
FOLIO_HOST_DEVICE constexpr bool is_to_be_cut(const ClaimRuleOf<Int>& rule, Int place, Int cost) {
  return cost > rule.rounds[claim_round_at(rule, place)].piece;
}

/// Some neighbouring pieces of a span, of about the same size: those of one round.
template <typename Int>
struct ClaimRunOf {
  Int begin = 0;  ///< KV tiles of the span
  Int end = 0;
  int32_t pieces = 0;
};

/// Calls visit(ClaimRunOf) for the rounds that a span that is to be cut lies in, in order.
template <typename Int, typename Visit>
FOLIO_HOST_DEVICE constexpr void for_each_claim_run(const ClaimRuleOf<Int>& rule, const ClaimSpanOf<Int>& span,
                                                    const Visit& visit) {
  Int begin = 0;
  for (int32_t round = claim_round_at(rule, span.begin); begin < span.kv_tiles; ++round) {
    const ClaimRoundOf<Int>& here = rule.rounds[round];
    Int end = span.kv_tiles;
    if (round + 1 < rule.num_rounds) {
      const Int up_to = ceil_div(here.end - span.begin, span.tile_cost);
      if (up_to < end) end = up_to;
      // A remnant of less than half a piece is not worth one.
      if ((span.kv_tiles - end) * span.tile_cost * 2 < rule.rounds[round + 1].piece) end = span.kv_tiles;
      if (end < span.kv_tiles && (end - begin) * span.tile_cost * 2 < here.piece) continue;
    }
    const Int tiles = end - begin;
    const Int wanted = ceil_div(tiles * span.tile_cost, here.piece);
    const Int most = tiles / rule.least_tiles;
    const Int pieces = wanted < most ? wanted : most;
    visit(ClaimRunOf<Int>{begin, end, static_cast<int32_t>(pieces < 1 ? 1 : pieces)});
    begin = end;
  }
}

/// How many pieces a span that is to be cut makes.
template <typename Int>
FOLIO_HOST_DEVICE constexpr int32_t count_pieces(const ClaimRuleOf<Int>& rule, const ClaimSpanOf<Int>& span) {
  int32_t count = 0;
  for_each_claim_run(rule, span, [&count](const ClaimRunOf<Int>& run) { count += run.pieces; });
  return count;
}

/// KV tiles of piece number `index` of a span that is to be cut.
template <typename Int>
FOLIO_HOST_DEVICE constexpr TokenRange piece_of(const ClaimRuleOf<Int>& rule, const ClaimSpanOf<Int>& span,
                                                int32_t index) {
  TokenRange tiles;
  for_each_claim_run(rule, span, [&tiles, &index](const ClaimRunOf<Int>& run) {
    if (index >= 0 && index < run.pieces) {
      const Int count = run.end - run.begin;
      const auto place = static_cast<Int>(index);
      const DivisorOf<Int> pieces = static_cast<Int>(run.pieces);
      tiles = {run.begin + count * place / pieces, run.begin + count * (place + 1) / pieces};
    }
    index -= run.pieces;
  });
  return tiles;
}

using ClaimRound = ClaimRoundOf<int64_t>;
using ClaimRule = ClaimRuleOf<int64_t>;
using ClaimLine = ClaimLineOf<int64_t>;
using ClaimSpan = ClaimSpanOf<int64_t>;

FOLIO_HOST_DEVICE FOLIO_CALLED constexpr int32_t count_pieces(const ClaimRule& rule, const ClaimSpan& span) {
  return count_pieces<int64_t>(rule, span);
}
FOLIO_HOST_DEVICE FOLIO_CALLED constexpr TokenRange piece_of(const ClaimRule& rule, const ClaimSpan& span,
                                                             int32_t index) {
  return piece_of<int64_t>(rule, span, index);
}

}  // namespace folio::inline v0::scheduler
