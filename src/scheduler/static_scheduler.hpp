#pragma once

#include <cstdint>

#include "scheduler/tile_space.hpp"

/// The static tile scheduler: one contiguous range of the tile space per worker, as stream-K cuts it. The device
/// scheduler runs the same cut rule.
namespace folio::inline v0::scheduler {

/// Ideal begin of worker `worker`'s range, rounded down.
FOLIO_HOST_DEVICE constexpr int64_t ideal_cut(const TileSpace& space, int32_t worker) {
  return space.total * worker / space.num_workers;
}

/// Workers that divide a tile space so that no output tile is in more than `max_splits` of their ranges; `longest` is
/// the costliest one's cost. Every cut inside an output tile comes of an ideal cut inside it (or of the cut before,
/// again). Of those it has at most cost / share, rounded up, so a share is at least longest / (max_splits - 1). Without
/// any split cuts stay at output tiles' ends, and all workers take part.
FOLIO_HOST_DEVICE constexpr int32_t workers_within_splits(int32_t num_workers, int64_t total, int64_t longest,
                                                          int32_t max_splits) {
  // An output tile is in no more ranges than there are workers.
  if (max_splits < 2 || max_splits >= num_workers || longest == 0) return num_workers;
  const int64_t most = total * (max_splits - 1) / longest;
  return most < num_workers ? static_cast<int32_t>(most) : num_workers;
}

/// Where the tile space may be cut near an ideal position: the ends of the output tile that contains it, and the
/// split granule boundaries around it.
struct CutChoices {
  int64_t output_begin = 0;
  int64_t output_end = 0;
  int64_t below = 0;      ///< last split granule boundary at or before the ideal position
  int64_t above = 0;      ///< the first one after it
  bool divisible = true;  ///< false: only the output tile's ends
};

/// A cut and its distance from the ideal, times num_workers.
struct Cut {
  int64_t position = 0;
  int64_t deviation = 0;
};

/// Chooses where worker `worker` begins, given its predecessor's cut. An end of the output tile is preferred where
/// one lies less than a granule away, so that nothing is split needlessly. Otherwise the nearer granule boundary is
/// taken.
///
/// Invariant: |deviation| and its change from cut to cut stay below one granule. A worker's load is the mean plus
/// that change, so every load is less than one granule (the costliest) away from the mean. Where all granules cost
/// the same, loads differ by at most one granule. Indivisible output tiles are exempt: they go to the nearer end.
FOLIO_HOST_DEVICE constexpr Cut choose_cut(const TileSpace& space, int32_t worker, const Cut& previous,
                                           const CutChoices& choices) {
  const int64_t limit = space.granularity * space.num_workers;
  // Indivisible output tiles may push the deviation beyond the limit; it is clamped here to recover.
  const int64_t reference = clamp_to(previous.deviation, 1 - limit, limit - 1);
  const int64_t positions[4] = {choices.output_begin, choices.output_end, choices.below, choices.above};
  const int64_t ideal = space.total * worker;  // times num_workers, as deviations are
  const int64_t staying = previous.position * space.num_workers - ideal;
  Cut best;
  int best_rank = 3;
  int64_t best_distance = 0;
  for (int i = 0; i < 4; ++i) {
    if (i >= 2 && !choices.divisible) continue;
    const bool passed = positions[i] < previous.position;
    const int64_t position = passed ? previous.position : positions[i];
    const int64_t deviation = passed ? staying : positions[i] * space.num_workers - ideal;
    const int64_t distance = deviation < 0 ? -deviation : deviation;
    const int64_t change = deviation - reference;
    const bool within = distance < limit && change < limit && -change < limit;
    const int rank = within ? (i < 2 && !passed ? 0 : 1) : 2;
    if (rank < best_rank || (rank == best_rank && distance < best_distance)) {
      best = Cut{position, deviation};
      best_rank = rank;
      best_distance = distance;
    }
  }
  return best;
}

/// Budget of partial rows for cuts at kBatchInvariant and above, where a cut makes every later fixed split of its
/// output tile a partial result.
int64_t fixed_split_budget(const SchedulerConfig& config);

/// Cuts the tile space into one range per worker and emits work tiles, partial rows and combine tiles. Completes
/// `arrays.view`.
void schedule_static(const SchedulerConfig& config, const TileSpaceTotals& totals, PlanStorage::Arrays& arrays);

}  // namespace folio::inline v0::scheduler
