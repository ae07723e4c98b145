#pragma once

#include <cstdint>

#include "folio/types/export.hpp"
#include "scheduler/claim_rule.hpp"
#include "scheduler/partition_rule.hpp"

/// In which order row tiles are claimed where the longest come first (TileOrder::kLpt), and how those are cut
/// that would end long after the others. Host and device.
///
/// Requests stand in classes of what their last row tile costs, a class a half octave, and keep their order within one;
/// so nothing is sorted by comparisons. Row tiles of a request stand last to first, which under a causal mask is the
/// longest first. Where a request's keys are more than the cache that all workers share has room for, all row tiles
/// of some KV heads come before those of the others: a swizzle group.
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

/// The longest class is 0; the last has all that is a fraction of the longest.
FOLIO_HOST_DEVICE constexpr int32_t cost_class(int32_t octave, int32_t dearest_octave) {
  const int32_t below = dearest_octave - octave;
  return below < kCostClasses - 1 ? below : kCostClasses - 1;
}

/// The longest last row tile of any request.
struct LongestTile {
  int64_t cost = 0;
  int64_t kv_tiles = 0;  ///< the most of any, which may be another's
};

FOLIO_HOST_DEVICE constexpr LongestTile longer(const LongestTile& a, const LongestTile& b) {
  return {a.cost > b.cost ? a.cost : b.cost, a.kv_tiles > b.kv_tiles ? a.kv_tiles : b.kv_tiles};
}

/// KV heads whose claims for the same rows and keys are neighbours: all of them, or those of a swizzle group. A swizzle
/// group is not worth it where the longest row tiles of the last one would begin too late to be made up for.
FOLIO_HOST_DEVICE constexpr int32_t choose_swizzle_heads(const HeadTileSpace& space, const LongestTile& longest,
                                                         int64_t swizzle_tiles) {
  const int32_t heads = space.num_kv_heads;
  const int64_t wanted = swizzle_tiles <= 0 ? 1 : ceil_div(heads * longest.kv_tiles, swizzle_tiles);
  if (wanted <= 1) return heads;
  const auto swizzle_groups = static_cast<int32_t>(wanted < heads ? wanted : heads);
  const auto heads_each = static_cast<int32_t>(ceil_div(heads, swizzle_groups));
  const bool long_enough = space.total / 4 * heads_each >= longest.cost * space.num_workers;
  return long_enough ? heads_each : heads;
}

/// Row tiles that workers begin together are a wave, as far as it is looked at.
inline constexpr int32_t kMaxWaves = 8;

/// The row tile, as a place in the order of claims, with which wave `wave` begins where nothing is cut.
FOLIO_HOST_DEVICE constexpr int64_t first_of_wave(const HeadTileSpace& space, int32_t wave) {
  return narrow_div(int64_t{wave} * space.num_workers, space.num_kv_heads);
}

/// What the first row tile of each wave costs; 0 where there is none.
struct Waves {
  int64_t cost[kMaxWaves] = {};
};

/// Whether workers of one speed end at about the same time if nothing is cut.
FOLIO_HOST_DEVICE constexpr bool ends_evenly(const HeadTileSpace& space, const Waves& waves) {
  int64_t end = 0;
  for (int32_t wave = 0; wave < kMaxWaves; ++wave) {
    const int64_t after = (wave + 1) * waves.cost[wave];
    end = after > end ? after : end;
  }
  return end <= space.share(0) + space.share(0) / 8;
}

/// Of the sizes of split_rule.hpp, those up to an eighth more than a worker's share.
inline constexpr int32_t kLptTrials = 3;
static_assert(kLptTrials <= kSplitTrials);

/// The rule for a line of longest first: nothing is cut if that ends evenly; else one equal split a worker, if that
/// can be had; else whole what is no longer than a worker's share of what is left, and less at the end.
FOLIO_HOST_DEVICE constexpr SplitRule lpt_rule(const HeadTileSpace& space, const Waves& waves,
                                               const TrialSplits& trials) {
  if (space.num_workers == 1 || ends_evenly(space, waves)) return one_split_wave(space, space.total);
  for (int32_t i = 0; i < kLptTrials; ++i) {
    if (int64_t{trials.of[i]} * space.num_kv_heads <= space.num_workers) return trial_rule(space, i);
  }
  constexpr int32_t kSplitWaves = 4;
  SplitRule rule;
  rule.min_split_tiles = space.min_split_tiles;
  const int64_t least = space.min_split_cost();
  int64_t begin = 0;
  for (int32_t wave = 0; wave < kSplitWaves; ++wave) {
    const bool last = wave + 1 == kSplitWaves;
    const int64_t split_cost = last ? space.share(begin) / 2 : space.share(begin);
    begin = last ? space.total : space.total - (space.total - begin) / 2;
    rule.split_waves[wave] = {begin, split_cost < least ? least : split_cost};
  }
  rule.num_split_waves = kSplitWaves;
  return rule;
}

}  // namespace folio::inline v0::scheduler
