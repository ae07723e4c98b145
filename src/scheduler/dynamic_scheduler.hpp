#pragma once

#include <cstdint>

#include "folio/types/export.hpp"
#include "scheduler/split_rule.hpp"
#include "scheduler/tile_space.hpp"

/// The dynamic (persistent) tile scheduler: one list of work tiles that free workers claim from. This file holds its
/// entry point and the rule of TileOrder::kLpt, longest-processing-time first. Host and device run the same rule.
///
/// LPT order: requests stand in classes by the cost of their last row tile, a class per half octave, costliest first.
/// They keep their order within a class, so nothing is sorted by comparisons. A request's row tiles stand last to
/// first, which under a causal mask is longest first.
///
/// L2 head swizzle: where a request's keys exceed the L2, all row tiles of some KV heads come before those of the
/// others. Those heads are a swizzle group.
namespace folio::inline v0::scheduler {

inline constexpr int32_t kCostClasses = 8;

/// Row tiles, or requests, of each class.
struct ClassCounts {
  int32_t of[kCostClasses] = {};
};

/// Twice the base-2 logarithm, rounded down: the leading bit and the one after it.
FOLIO_HOST_DEVICE constexpr int32_t half_octave(int64_t cost) {
  if (cost < 2) return 0;
  const int32_t lead = 63 - leading_zeros(cost);
  return 2 * lead + static_cast<int32_t>(cost >> (lead - 1) & 1);
}

/// Class 0 is the costliest; the last class takes everything far below it.
FOLIO_HOST_DEVICE constexpr int32_t cost_class(int32_t octave, int32_t longest_octave) {
  const int32_t below = longest_octave - octave;
  return below < kCostClasses - 1 ? below : kCostClasses - 1;
}

/// The costliest last row tile of any request.
struct LongestTile {
  int64_t cost = 0;
  int64_t kv_tiles = 0;  ///< the most of any last row tile, maybe another's
};

FOLIO_HOST_DEVICE constexpr LongestTile longer(const LongestTile& a, const LongestTile& b) {
  return {a.cost > b.cost ? a.cost : b.cost, a.kv_tiles > b.kv_tiles ? a.kv_tiles : b.kv_tiles};
}

/// KV heads of a swizzle group: claimed side by side for the same rows and keys. All heads are one group, unless
/// their keys exceed the L2. Smaller groups do not pay where the last group's longest row tiles would begin too late
/// to be balanced.
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

/// A wave: row tiles that workers begin together. Only the first few waves are considered.
inline constexpr int32_t kMaxWaves = 8;

/// The row tile, by claim order, that wave `wave` begins with where nothing is split.
FOLIO_HOST_DEVICE constexpr int64_t first_of_wave(const HeadTileSpace& space, int32_t wave) {
  return narrow_div(int64_t{wave} * space.num_workers, space.num_kv_heads);
}

/// Cost of the first row tile of each wave; 0 where there is none.
struct Waves {
  int64_t cost[kMaxWaves] = {};
};

/// Whether workers of equal speed end at about the same time if nothing is split.
FOLIO_HOST_DEVICE constexpr bool ends_evenly(const HeadTileSpace& space, const Waves& waves) {
  int64_t end = 0;
  for (int32_t wave = 0; wave < kMaxWaves; ++wave) {
    const int64_t after = (wave + 1) * waves.cost[wave];
    end = after > end ? after : end;
  }
  return end <= space.share(0) + space.share(0) / 8;
}

/// Trial sizes of split_rule.hpp that LPT order uses: up to an eighth above a worker's share.
inline constexpr int32_t kLptTrials = 3;
static_assert(kLptTrials <= kSplitTrials);

/// The split rule of LPT order. Nothing is split if that ends evenly. Otherwise every worker gets one equal split, if
/// those exist. Otherwise splits cost up to a worker's share of what is left, and half of it in the last of four
/// split waves.
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

/// Budget of a dynamic schedule for splitting: KV splits, or partial rows at kBatchInvariant and above. Output tiles
/// beyond it, in claim order, stay whole.
int64_t split_budget(const SchedulerConfig& config);

/// Most KV heads of a claim. All heads together have so many times the budget in splits, of fewer rows each.
int32_t max_claimed_heads(const SchedulerConfig& config);

/// Orders and splits the output tiles, and emits work tiles, partial rows and combine tiles. Completes `arrays.view`.
void schedule_dynamic(const SchedulerConfig& config, const TileSpaceTotals& totals, PlanStorage::Arrays& arrays);

}  // namespace folio::inline v0::scheduler
