#pragma once

#include <cstdint>

#include "scheduler/device/batch.hpp"
#include "scheduler/device/inputs.hpp"
#include "scheduler/device/tile_space.hpp"
#include "scheduler/dynamic_scheduler.hpp"
#include "scheduler/split_rule.hpp"

/// The dynamic schedule on the device, without shared segments: the same plan as dynamic_scheduler.cc makes.
namespace folio::inline v0::scheduler::device {

struct Longer {
  FOLIO_HOST_DEVICE LongestTile operator()(const LongestTile& a, const LongestTile& b) const { return longer(a, b); }
};

struct AddClasses {
  FOLIO_HOST_DEVICE ClassCounts operator()(const ClassCounts& a, const ClassCounts& b) const {
    ClassCounts both;
    FOLIO_KEEP_LOOP
    for (int32_t i = 0; i < kCostClasses; ++i) both.of[i] = a.of[i] + b.of[i];
    return both;
  }
};

/// Puts requests into LPT order. From then on DeviceScratch::tile_begin is by place in that order. Returns the
/// longest last row tile.
template <typename Group>
FOLIO_HOST_DEVICE LongestTile lpt_order(const Job& job, Group& group) {
  const DeviceScratch& scratch = job.scratch;
  const Share share = share_of(group, job.in.num_requests);
  LongestTile mine;
  FOLIO_KEEP_LOOP
  for (int32_t r = share.begin; r < share.end; ++r) {
    scratch.request_octave[r] = -1;
    const int32_t tiles = row_tiles_of(job, r);
    if (tiles == 0) continue;
    const RowTile last = make_row_tile(job, r, (tiles - 1) * job.in.tile.rows);
    const int64_t kv_tiles = tile_work(job, last).num_kv_tiles;
    const LongestTile here{offset_in_output_tile(job, last, kv_tiles), kv_tiles};
    scratch.request_octave[r] = half_octave(here.cost);
    mine = longer(mine, here);
  }
  LongestTile longest;
  group.exclusive_scan(mine, LongestTile{}, Longer(), longest);
  const int32_t octave = half_octave(longest.cost);
  // Requests without rows go to the last class; their place does not matter.
  const auto class_of = [&scratch, octave](int32_t r) { return cost_class(scratch.request_octave[r], octave); };
  ClassCounts counts;
  FOLIO_KEEP_LOOP
  for (int32_t r = share.begin; r < share.end; ++r) ++counts.of[class_of(r)];
  ClassCounts all;
  ClassCounts next = group.exclusive_scan(counts, ClassCounts{}, AddClasses(), all);
  int32_t of_longer = 0;
  FOLIO_KEEP_LOOP
  for (int32_t i = 0; i < kCostClasses; ++i) {
    next.of[i] += of_longer;
    of_longer += all.of[i];
  }
  FOLIO_KEEP_LOOP
  for (int32_t r = share.begin; r < share.end; ++r) scratch.request_at[next.of[class_of(r)]++] = r;
  group.sync();
  int32_t tiles = 0;
  FOLIO_KEEP_LOOP
  for (int32_t place = share.begin; place < share.end; ++place) tiles += row_tiles_of(job, scratch.request_at[place]);
  int32_t total = 0;
  int32_t before = group.exclusive_scan(tiles, int32_t{0}, AddTiles(), total);
  FOLIO_KEEP_LOOP
  for (int32_t place = share.begin; place < share.end; ++place) {
    scratch.tile_begin[place] = before;
    before += row_tiles_of(job, scratch.request_at[place]);
  }
  group.sync();
  return longest;
}

/// Sums over some row tiles, per KV head.
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

/// The key ranges of a row tile, one per segment.
struct RangesOfTile {
  const Job& job;
  const RowTile& tile;
  FOLIO_HOST_DEVICE TokenRange operator()(int32_t s) const { return key_range(job, tile, s); }
};

FOLIO_HOST_DEVICE inline OutputTile output_tile_of(const Job& job, const RowTile& tile, int32_t index) {
  return {.begin = job.scratch.cost_before[index],
          .kv_tiles = job.scratch.tile_splits[index].kv_tiles,
          .tile_cost = kv_tile_cost(job, tile),
          .kv_tokens = job.in.tile.kv_tokens,
          .split_tokens = job.in.fixed_split_tokens,
          .num_ranges = job.in.num_segments,
          .max_splits = job.in.max_splits};
}

/// Sums of one row tile: with `splits` KV splits, or unsplit with `work_tiles` work tiles.
FOLIO_HOST_DEVICE inline DynamicSums dynamic_sums(int32_t splits, int32_t work_tiles, int32_t rows) {
  if (splits == 1)
    return {.partial_rows = 0, .dynamic_tiles = 1, .continuations = work_tiles - 1, .sources = 0, .combine_tiles = 0};
  return {.partial_rows = int64_t{splits} * rows,
          .dynamic_tiles = splits,
          .continuations = 0,
          .sources = splits,
          .combine_tiles = 1};
}

/// What splitting costs, in the budget's unit.
FOLIO_HOST_DEVICE inline int64_t split_price(const Job& job, const DynamicSums& sums) {
  return job.fixed_splits() ? sums.partial_rows : sums.sources;
}

FOLIO_HOST_DEVICE inline DynamicSums sums_of_tile(const Job& job, int32_t t) {
  const DeviceScratch& scratch = job.scratch;
  return dynamic_sums(scratch.tile_splits[t].splits, scratch.work_tiles_before[t + 1] - scratch.work_tiles_before[t],
                      row_tile(job, scratch.tile_request[t], t).rows());
}

/// Cost of the first row tile of every wave. Every thread computes it.
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

/// Writes the batch's split rule to the scratch.
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
        splits += trial_splits(split_cost, space.min_split_tiles, int64_t{job.scratch.tile_splits[t].kv_tiles},
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

/// Counts every row tile's KV splits and numbers its work tiles, partial rows, sources and combine tiles. Returns the
/// totals per KV head.
template <typename Group>
FOLIO_HOST_DEVICE DynamicSums split_row_tiles(const Job& job, const TileSpace& space, const LongestTile& longest,
                                              Group& group) {
  const int32_t count = job.num_row_tiles();
  const Share share = share_of(group, count);
  RowTileSplits* const places = job.scratch.tile_splits;
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
    // Row tiles beyond the budget, in claim order, stay whole.
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

/// Which work tile of which output tile a plan's work tile is.
struct WorkTileCoord {
  int32_t tile;
  int32_t head;
  int32_t split;           ///< KV split, if the row tile is split
  int32_t in_output_tile;  ///< number of the work tile, if it is not split
};

FOLIO_HOST_DEVICE inline WorkTileCoord find_work_tile(const Job& job, int32_t index) {
  const int32_t heads = job.in.num_kv_heads;
  const int32_t count = job.num_row_tiles();
  const RowTileSplits* const places = job.scratch.tile_splits;
  const int32_t num_dynamic_tiles = places[count].dynamic_tiles * heads;
  if (index < num_dynamic_tiles) {
    // Swizzle groups follow one another, each with all dynamic tiles of its heads.
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

/// Emits one source of an output tile that is split; split 0 also emits the combine tile.
FOLIO_HOST_DEVICE inline void emit_combine_tile(const Job& job, const WorkTileCoord& at, const RowTile& tile,
                                                int32_t partial) {
  const RowTileSplits& place = job.scratch.tile_splits[at.tile];
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

/// Emits work tile `index` of a dynamic schedule, with its source and combine tile.
FOLIO_HOST_DEVICE inline void emit_dynamic_tile(const Job& job, int32_t index) {
  const WorkTileCoord at = find_work_tile(job, index);
  const RowTileSplits& place = job.scratch.tile_splits[at.tile];
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
      const int32_t first = job.scratch.tile_splits[job.num_row_tiles()].dynamic_tiles + place.continuations;
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
