#pragma once

#include <cstdint>

#include "scheduler/claim_order.hpp"
#include "scheduler/claim_parts.hpp"
#include "scheduler/device/cuts.hpp"
#include "scheduler/device/job.hpp"
#include "scheduler/device/row_tile.hpp"

/// Dynamic schedules: what schedule_dynamic.cc computes, for requests alone.
namespace folio::inline v0::scheduler::device {

/// What some row tiles make of everything, per KV head.
struct DynamicSums {
  int64_t partial_rows = 0;
  int32_t dynamic_tiles = 0;
  int32_t continuations = 0;
  int32_t sources = 0;
  int32_t combine_tiles = 0;
};
struct AddDynamicSums {
  FOLIO_HOST_DEVICE DynamicSums operator()(const DynamicSums& a, const DynamicSums& b) const {
    return {a.partial_rows + b.partial_rows, a.dynamic_tiles + b.dynamic_tiles, a.continuations + b.continuations,
            a.sources + b.sources, a.combine_tiles + b.combine_tiles};
  }
};

/// The keys of a row tile, segment by segment.
struct RangesOfTile {
  const Job& job;
  const RowTile& tile;
  FOLIO_HOST_DEVICE TokenRange operator()(int32_t s) const { return key_range(job, tile, s); }
};

FOLIO_HOST_DEVICE inline OutputTile output_tile_of(const Job& job, const RowTile& tile, int32_t index) {
  return {.begin = job.scratch.cost_before[index],
          .kv_tiles = job.scratch.dynamic_tiles[index].kv_tiles,
          .tile_cost = kv_tile_cost(job, tile),
          .kv_tokens = job.in.tile.kv_tokens,
          .split_tokens = job.in.fixed_split_tokens,
          .num_ranges = job.in.num_segments};
}

/// Splits of a row tile as the rule would have them, of which `work tiles` are work tiles where it is whole.
FOLIO_HOST_DEVICE inline DynamicSums dynamic_sums(int32_t splits, int32_t work_tiles, int32_t rows) {
  if (splits == 1)
    return {.partial_rows = 0, .dynamic_tiles = 1, .continuations = work_tiles - 1, .sources = 0, .combine_tiles = 0};
  return {.partial_rows = int64_t{splits} * rows,
          .dynamic_tiles = splits,
          .continuations = 0,
          .sources = splits,
          .combine_tiles = 1};
}

/// What cutting costs, in the budget's terms.
FOLIO_HOST_DEVICE inline int64_t split_price(const Job& job, const DynamicSums& sums) {
  return job.fixed_splits() ? sums.partial_rows : sums.sources;
}

FOLIO_HOST_DEVICE inline DynamicSums sums_of_tile(const Job& job, int32_t t) {
  const DeviceScratch& scratch = job.scratch;
  return dynamic_sums(scratch.dynamic_tiles[t].splits, scratch.work_tiles_before[t + 1] - scratch.work_tiles_before[t],
                      row_tile(job, scratch.tile_request[t], t).rows());
}

/// What the first row tile of every wave costs. By everyone, for itself.
FOLIO_HOST_DEVICE inline Waves find_waves(const Job& job, const HeadTileSpace& space) {
  const int64_t* const cost_before = job.scratch.cost_before;
  Waves waves;
  FOLIO_KEEP_LOOP
  for (int32_t wave = 0; wave < kMaxWaves; ++wave) {
    const int64_t first = first_of_wave(space, wave);
    if (first < job.num_row_tiles()) waves.cost[wave] = cost_before[first + 1] - cost_before[first];
  }
  return waves;
}

/// The rule for this batch, in the scratch.
template <typename Group>
FOLIO_HOST_DEVICE void choose_rule(const Job& job, const TileSpace& work, const LongestTile& longest, Group& group) {
  const int64_t heads = job.in.num_kv_heads;
  const bool lpt = job.lpt();
  const HeadTileSpace space{.total = divide(work.total, heads),
                            .num_kv_heads = job.in.num_kv_heads,
                            .num_workers = job.in.num_workers,
                            .min_split_tiles = job.in.min_split_tiles,
                            .min_tile_cost = int64_t{job.in.tile_cost} + job.in.row_cost};
  const Waves waves = lpt ? find_waves(job, space) : Waves{};
  TrialSplits total;
  if (lpt ? !ends_evenly(space, waves) : is_short(space)) {
    const Share share = share_of(group, job.num_row_tiles());
    TrialSplits trials;
    FOLIO_KEEP_LOOP
    for (int32_t i = 0; i < kSplitTrials; ++i) {
      const int64_t split_cost = trial_split_cost(space, i);
      int64_t splits = 0;
      FOLIO_KEEP_LOOP
      for (int32_t t = share.begin; t < share.end; ++t) {
        const RowTile tile = row_tile(job, job.scratch.tile_request[t], t);
        splits += trial_splits(split_cost, space.min_split_tiles, int64_t{job.scratch.dynamic_tiles[t].kv_tiles},
                               kv_tile_cost(job, tile));
      }
      trials.of[i] = static_cast<int32_t>(splits < 0x7fffffff ? splits : 0x7fffffff);
    }
    group.exclusive_scan(trials, TrialSplits{}, AddTrials(), total);
  }
  if (group.rank() == 0) {
    SplitRule& rule = *job.scratch.rule;
    rule = lpt ? lpt_rule(space, waves, total) : split_rule(space, total);
    rule.swizzle_heads = lpt ? choose_swizzle_heads(space, longest, job.in.swizzle_tiles) : job.in.num_kv_heads;
  }
  group.sync();
}

/// Splits, claims, partial rows and combine tiles of every row tile. Returns the sums of all, per KV head.
template <typename Group>
FOLIO_HOST_DEVICE DynamicSums split_row_tiles(const Job& job, const TileSpace& space, const LongestTile& longest,
                                              Group& group) {
  const int32_t count = job.num_row_tiles();
  const Share share = share_of(group, count);
  RowTileSplits* const places = job.scratch.dynamic_tiles;
  choose_rule(job, space, longest, group);
  DynamicSums sums;
  FOLIO_KEEP_LOOP
  for (int32_t t = share.begin; t < share.end; ++t) {
    const RowTile tile = row_tile(job, job.scratch.tile_request[t], t);
    places[t].splits = count_kv_splits(*job.scratch.rule, output_tile_of(job, tile, t), RangesOfTile{job, tile});
    sums = AddDynamicSums()(sums, sums_of_tile(job, t));
  }
  DynamicSums total;
  DynamicSums before = group.exclusive_scan(sums, DynamicSums{}, AddDynamicSums(), total);
  if (split_price(job, total) > job.in.split_budget) {
    // What comes later in the tile space than the budget lasts stays whole.
    sums = DynamicSums{};
    FOLIO_KEEP_LOOP
    for (int32_t t = share.begin; t < share.end; ++t) {
      before = AddDynamicSums()(before, sums_of_tile(job, t));
      if (split_price(job, before) > job.in.split_budget) places[t].splits = 1;
      sums = AddDynamicSums()(sums, sums_of_tile(job, t));
    }
    before = group.exclusive_scan(sums, DynamicSums{}, AddDynamicSums(), total);
  }
  FOLIO_KEEP_LOOP
  for (int32_t t = share.begin; t < share.end; ++t) {
    places[t].dynamic_tiles = before.dynamic_tiles;
    places[t].continuations = before.continuations;
    places[t].sources = before.sources;
    places[t].combine_tiles = before.combine_tiles;
    places[t].partial_rows = static_cast<int32_t>(before.partial_rows);
    before = AddDynamicSums()(before, sums_of_tile(job, t));
  }
  if (group.rank() == 0) {
    places[count].dynamic_tiles = total.dynamic_tiles;
    places[count].continuations = total.continuations;
  }
  group.sync();
  return total;
}

/// One of a plan's work tiles: which of which row tile's.
struct WorkTileCoord {
  int32_t tile;
  int32_t head;
  int32_t split;           ///< of a row tile that is cut
  int32_t in_output_tile;  ///< of one that is whole: number of the work tile
};

FOLIO_HOST_DEVICE inline WorkTileCoord find_work_tile(const Job& job, int32_t index) {
  const int32_t heads = job.in.num_kv_heads;
  const int32_t count = job.num_row_tiles();
  const RowTileSplits* const places = job.scratch.dynamic_tiles;
  const int32_t num_dynamic_tiles = places[count].dynamic_tiles * heads;
  if (index < num_dynamic_tiles) {
    // Sections of KV heads one after the other, each with all claims.
    const int32_t together = job.scratch.rule->swizzle_heads;
    const int32_t swizzle_group = together == heads ? 0 : index / (places[count].dynamic_tiles * together);
    const int32_t first_head = swizzle_group * together;
    const int32_t here = together < heads - first_head ? together : heads - first_head;
    const int32_t in_swizzle_group = index - places[count].dynamic_tiles * first_head;
    const int32_t dynamic_tile = in_swizzle_group / here;
    const int32_t tile = last_at_or_below(count, dynamic_tile, [places](int32_t t) { return places[t].dynamic_tiles; });
    return {tile, first_head + in_swizzle_group - dynamic_tile * here, dynamic_tile - places[tile].dynamic_tiles, 0};
  }
  const int32_t continuation = index - num_dynamic_tiles;
  const int32_t tile =
      last_at_or_below(count, continuation / heads, [places](int32_t t) { return places[t].continuations; });
  const int32_t a_head = places[tile + 1].continuations - places[tile].continuations;
  const int32_t in_tile = continuation - places[tile].continuations * heads;
  return {tile, in_tile / a_head, 0, in_tile % a_head + 1};
}

/// The combine tile of a row tile's head, and one of its sources, at the split that has them.
FOLIO_HOST_DEVICE inline void emit_combine_tile(const Job& job, const WorkTileCoord& at, const RowTile& tile,
                                                int32_t partial) {
  const RowTileSplits& place = job.scratch.dynamic_tiles[at.tile];
  const int32_t heads = job.in.num_kv_heads;
  const int32_t source_begin = place.sources * heads + at.head * place.splits;
  job.combine_sources[source_begin + at.split] = partial;
  if (at.split != 0) return;
  job.combine_tiles[place.combine_tiles * heads + at.head] = {.kv_head = at.head,
                                                              .request = tile.request,
                                                              .row_begin = tile.row_begin,
                                                              .row_end = tile.row_end,
                                                              .source_begin = source_begin,
                                                              .source_end = source_begin + place.splits};
}

/// Work tile number `index` of a dynamic schedule, and what it has of combine tiles.
FOLIO_HOST_DEVICE inline void emit_dynamic_tile(const Job& job, int32_t index) {
  const WorkTileCoord at = find_work_tile(job, index);
  const RowTileSplits& place = job.scratch.dynamic_tiles[at.tile];
  const RowTile tile = row_tile(job, job.scratch.tile_request[at.tile], at.tile);
  const OutputTile output_tile = output_tile_of(job, tile, at.tile);
  const RangesOfTile ranges{job, tile};
  const bool fixed = job.fixed_splits();
  KvSplit split;
  int32_t partial = -1;
  bool starts = true;
  bool finishes = true;
  if (place.splits > 1) {
    split = kv_split_at(*job.scratch.rule, output_tile, ranges, at.split);
    partial = place.partial_rows * job.in.num_kv_heads + (at.head * place.splits + at.split) * tile.rows();
    emit_combine_tile(job, at, tile, partial);
  } else {
    const int32_t work_tiles = job.scratch.work_tiles_before[at.tile + 1] - job.scratch.work_tiles_before[at.tile];
    split = unsplit_tile_at(output_tile, ranges, at.in_output_tile);
    starts = at.in_output_tile == 0;
    finishes = at.in_output_tile + 1 == work_tiles;
    if (!finishes) {
      const int32_t first = job.scratch.dynamic_tiles[job.num_row_tiles()].dynamic_tiles + place.continuations;
      partial = first * job.in.num_kv_heads + at.head * (work_tiles - 1) + at.in_output_tile;
    }
  }
  job.work_tiles[index] = {.segment = split.range,
                           .kv_row = tile.request,
                           .kv_head = at.head,
                           .request = tile.request,
                           .row_begin = tile.row_begin,
                           .row_end = tile.row_end,
                           .kv_begin = static_cast<int32_t>(split.keys.begin),
                           .kv_end = static_cast<int32_t>(split.keys.end),
                           .partial = partial,
                           .flags = (starts ? kStart : 0u) | (finishes ? kFinish : 0u) | (fixed ? kFold : 0u),
                           .combine_tile = -1};
}

}  // namespace folio::inline v0::scheduler::device
