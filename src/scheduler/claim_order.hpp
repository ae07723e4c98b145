#pragma once

#include <cstdint>

#include "folio/types/export.hpp"
#include "scheduler/claim_rule.hpp"
#include "scheduler/partition_rule.hpp"

/// In which order row tiles are claimed where the dearest come first (TileOrder::kLpt), and how those are cut
/// that would end long after the others. Host and device.
///
/// Requests stand in classes of what their last row tile costs, a class a half octave, and keep their order within one;
/// so nothing is sorted by comparisons. Row tiles of a request stand last to first, which under a causal mask is the
/// dearest first. Where a request's keys are more than the cache that all workers share has room for, all row tiles
/// of some KV heads come before those of the others: a section.
namespace folio::inline v0::scheduler {

inline constexpr int32_t kCostClasses = 8;

/// How many row tiles, or requests, there are of each class.
struct ClassCounts {
  int32_t of[kCostClasses] = {};
};

/// Twice the base-2 logarithm, rounded down: of the leading bit and the one after it.
FOLIO_HOST_DEVICE constexpr int32_t half_octave(int64_t cost) {
  if (cost < 2) return 0;
  const int32_t lead = 63 - leading_zeros(cost);
  return 2 * lead + static_cast<int32_t>(cost >> (lead - 1) & 1);
}

/// The dearest class is 0; the last has all that is a fraction of the dearest.
FOLIO_HOST_DEVICE constexpr int32_t cost_class(int32_t octave, int32_t dearest_octave) {
  const int32_t below = dearest_octave - octave;
  return below < kCostClasses - 1 ? below : kCostClasses - 1;
}

/// The dearest last row tile of any request.
struct Dearest {
  int64_t cost = 0;
  int64_t kv_tiles = 0;  ///< the most of any, which may be another's
};

FOLIO_HOST_DEVICE constexpr Dearest dearer(const Dearest& a, const Dearest& b) {
  return {a.cost > b.cost ? a.cost : b.cost, a.kv_tiles > b.kv_tiles ? a.kv_tiles : b.kv_tiles};
}

/// KV heads whose claims for the same rows and keys are neighbours: all of them, or those of a section. A section is
/// not worth it where the dearest row tiles of the last one would begin too late to be made up for.
FOLIO_HOST_DEVICE constexpr int32_t heads_of_section(const ClaimLine& line, const Dearest& dearest,
                                                     int64_t section_tiles) {
  const int32_t heads = line.num_kv_heads;
  const int64_t wanted = section_tiles <= 0 ? 1 : ceil_div(heads * dearest.kv_tiles, section_tiles);
  if (wanted <= 1) return heads;
  const auto sections = static_cast<int32_t>(wanted < heads ? wanted : heads);
  const auto heads_each = static_cast<int32_t>(ceil_div(heads, sections));
  const bool long_enough = line.total / 4 * heads_each >= dearest.cost * line.num_workers;
  return long_enough ? heads_each : heads;
}

/// Row tiles that workers begin together are a wave, as far as it is looked at.
inline constexpr int32_t kWavesLookedAt = 8;

/// The row tile, as a place in the order of claims, with which wave `wave` begins where nothing is cut.
FOLIO_HOST_DEVICE constexpr int64_t first_of_wave(const ClaimLine& line, int32_t wave) {
  return narrow_div(int64_t{wave} * line.num_workers, line.num_kv_heads);
}

/// What the first row tile of each wave costs; 0 where there is none.
struct Waves {
  int64_t cost[kWavesLookedAt] = {};
};

/// Whether workers of one speed end at about the same time if nothing is cut.
FOLIO_HOST_DEVICE constexpr bool ends_evenly(const ClaimLine& line, const Waves& waves) {
  int64_t end = 0;
  for (int32_t wave = 0; wave < kWavesLookedAt; ++wave) {
    const int64_t after = (wave + 1) * waves.cost[wave];
    end = after > end ? after : end;
  }
  return end <= line.share(0) + line.share(0) / 8;
}

/// Of the sizes of claim_rule.hpp, those up to an eighth more than a worker's share.
inline constexpr int32_t kDearTrials = 3;
static_assert(kDearTrials <= kPieceTrials);

/// The rule for a line of the dearest first: nothing is cut if that ends evenly; else one equal piece a worker, if that
/// can be had; else whole what is no dearer than a worker's share of what is left, and less at the end.
FOLIO_HOST_DEVICE constexpr ClaimRule dearest_first_rule(const ClaimLine& line, const Waves& waves,
                                                         const TrialPieces& trials) {
  if (line.num_workers == 1 || ends_evenly(line, waves)) return one_round(line, line.total);
  for (int32_t i = 0; i < kDearTrials; ++i) {
    if (int64_t{trials.of[i]} * line.num_kv_heads <= line.num_workers) return piece_trial(line, i);
  }
  constexpr int32_t kRounds = 4;
  ClaimRule rule;
  rule.least_tiles = line.least_tiles;
  const int64_t least = line.least_piece();
  int64_t begin = 0;
  for (int32_t round = 0; round < kRounds; ++round) {
    const bool last = round + 1 == kRounds;
    const int64_t piece = last ? line.share(begin) / 2 : line.share(begin);
    begin = last ? line.total : line.total - (line.total - begin) / 2;
    rule.rounds[round] = {begin, piece < least ? least : piece};
  }
  rule.num_rounds = kRounds;
  return rule;
}

}  // namespace folio::inline v0::scheduler
