#pragma once

#include <cstddef>
#include <cstdint>

#include "scheduler/device/inputs.hpp"
#include "scheduler/split_rule.hpp"

/// The fast path of the device scheduler: dynamic schedules where every request has one segment and at most one row
/// tile, as in decode. It makes the same plan as schedule_batch and emit_work_tiles, in fewer and shorter steps and
/// in 32 bits. Row tiles are the requests, some without work. Every CTA divides the whole batch for itself and emits
/// a share of the work tiles, so one launch suffices. Batches with faults, or too large for 32 bits, are left to
/// schedule_batch.
namespace folio::inline v0::scheduler::device {

/// The host's input, kept compact: every cache line of it that is read has to be fetched.
struct SingleInput {
  const int32_t* cu_q;
  const int32_t* q_first_pos;  ///< or null
  const int32_t* kv_len;
  const int32_t* first_pos;  ///< or null
  int32_t* lengths;          ///< of the image, as the next four
  PlanImageHeader* header;
  WorkTile* work_tiles;
  CombineTile* combine_tiles;
  int32_t* combine_sources;
  MaskBounds bounds;
  int32_t num_requests;
  int32_t num_tokens;
  int32_t max_q_len;
  int32_t max_kv_len;
  int32_t group_size;
  int32_t min_rows;
  int32_t max_rows;
  int32_t tile_rows;
  FastDivisor kv_tokens;
  uint32_t tile_cost;
  uint32_t row_cost;
  uint32_t start_cost;
  uint32_t start_row_cost;
  int32_t start_free_rows;
  uint32_t max_kv_tiles;  ///< of a request: beyond it 32 bits might overflow
  FastDivisor num_kv_heads;
  FastDivisor num_workers;
  FastDivisor min_split_tiles;
  int32_t split_budget;
  int32_t common_rows;  ///< rows of most row tiles
  FastDivisor common_tile_cost;
};

/// One request's row tile, and the sums over the row tiles before it, per KV head.
struct SingleTile {
  uint32_t cost_before;
  int32_t row_begin;
  int32_t rows;  ///< 0: no row tile
  int32_t kv_begin;
  int32_t kv_end;
  uint32_t kv_tiles;
  int32_t splits;
  int32_t dynamic_tiles;
  int32_t sources;
  int32_t combine_tiles;
  int32_t partial_rows;
};

using SingleTileSpace = HeadTileSpaceOf<uint32_t>;
using SingleRule = SplitRuleOf<uint32_t>;
using SingleSpan = KvSpanOf<uint32_t>;

/// What one CTA keeps besides the image.
struct SingleTiles {
  SingleRule rule;
  SingleTile of[1];  ///< [requests]
  static FOLIO_HOST_DEVICE constexpr int64_t bytes(int64_t requests) {
    return int64_t{sizeof(SingleTiles)} + requests * int64_t{sizeof(SingleTile)};
  }
};

FOLIO_HOST_DEVICE inline uint32_t kv_tile_cost(const SingleInput& in, const SingleTile& tile) {
  return in.tile_cost + static_cast<uint32_t>(tile.rows) * in.row_cost;
}

FOLIO_HOST_DEVICE inline SingleSpan span_of(const SingleInput& in, const SingleTile& tile) {
  return {tile.cost_before, tile.kv_tiles,
          tile.rows == in.common_rows ? in.common_tile_cost : FastDivisor(kv_tile_cost(in, tile))};
}

/// Reads a request's lengths and makes its row tile, without the sums before it. With `writes`, writes the lengths to
/// the image. Returns whether the batch can stay on this path; otherwise schedule_batch writes everything again.
FOLIO_HOST_DEVICE inline bool read_single_tile(const SingleInput& in, int32_t r, bool writes, SingleTile& tile) {
  const int32_t q_begin = in.cu_q[r];
  const int32_t q_end = in.cu_q[r + 1];
  const int32_t kv_len = in.kv_len[r];
  const int32_t first_pos = in.first_pos != nullptr ? in.first_pos[r] : 0;
  const int32_t given_first = in.q_first_pos != nullptr ? in.q_first_pos[r] : 0;
  const int64_t last = int64_t{first_pos} + kv_len;  // behind the keys
  const int64_t first = in.q_first_pos != nullptr ? given_first : last - (int64_t{q_end} - q_begin);
  const int64_t end = first + q_end - q_begin;
  const bool in_order = q_begin >= 0 && q_begin <= q_end && q_end <= in.num_tokens && (r > 0 || q_begin == 0);
  const bool fits = kv_len >= 0 && kv_len <= in.max_kv_len && last < 0x7fffffff && end <= 0x7fffffff &&
                    first >= -int64_t{0x80000000} && q_end - q_begin <= in.max_q_len;
  tile = SingleTile{};
  if (!in_order || !fits) return false;
  if (writes) {
    int32_t* const lengths = in.lengths + r;
    const int32_t requests = in.num_requests;
    lengths[1] = q_end;
    lengths[requests + 1] = static_cast<int32_t>(first);
    lengths[2 * requests + 1] = kv_len;
    lengths[3 * requests + 1] = first_pos;
  }
  const int32_t rows = (q_end - q_begin) * in.group_size;
  if (rows == 0 || rows < in.min_rows || rows > in.max_rows) return true;
  const TokenRange range = visible_range({first_pos, kv_len, KvShard{}}, in.bounds, first, end - 1);
  const auto kv_begin = static_cast<uint32_t>(range.begin);
  const auto kv_end = static_cast<uint32_t>(range.end);
  tile.row_begin = q_begin * in.group_size;
  tile.rows = rows;
  tile.kv_begin = static_cast<int32_t>(kv_begin);
  tile.kv_end = static_cast<int32_t>(kv_end);
  tile.kv_tiles = kv_end == 0 ? 1 : (kv_end + in.kv_tokens - 1) / in.kv_tokens - kv_begin / in.kv_tokens;
  tile.splits = 1;
  return rows <= in.tile_rows && tile.kv_tiles <= in.max_kv_tiles;
}

FOLIO_HOST_DEVICE inline uint32_t cost_of(const SingleInput& in, const SingleTile& tile) {
  if (tile.rows == 0) return 0;
  const int32_t priced = tile.rows - in.start_free_rows;
  return in.start_cost + (priced > 0 ? static_cast<uint32_t>(priced) * in.start_row_cost : 0) +
         tile.kv_tiles * kv_tile_cost(in, tile);
}

/// One KV head's tile space of cost `total`.
FOLIO_HOST_DEVICE inline SingleTileSpace tile_space_of(const SingleInput& in, uint32_t total) {
  return {.total = total,
          .num_kv_heads = static_cast<int32_t>(in.num_kv_heads),
          .num_workers = in.num_workers,
          .min_split_tiles = in.min_split_tiles,
          .min_tile_cost = in.tile_cost + in.row_cost};
}

/// The rule that split_rule() gives, one split wave per thread.
template <typename Group>
FOLIO_HOST_DEVICE void choose_single_rule(const SingleInput& in, SingleTiles& tiles, uint32_t total, Group& group) {
  const auto heads = static_cast<int32_t>(in.num_kv_heads);
  const SingleTileSpace space = tile_space_of(in, total);
  SingleRule& rule = tiles.rule;
  uint32_t split_cost = in.num_workers == 1u ? total : 0;  // of a single split wave
  if (is_short(space)) {
    int32_t splits[kSplitTrials];
    group.sum_each(splits, in.num_requests, [&](int32_t trial) {
      return [&in, &tiles, &space, split_cost = FastDivisor(trial_split_cost(space, trial))](int32_t r) {
        const SingleTile& tile = tiles.of[r];
        if (tile.rows == 0) return 0;
        const uint32_t tile_cost = kv_tile_cost(in, tile);
        return static_cast<int32_t>(trial_splits(split_cost, space.min_split_tiles, tile.kv_tiles, tile_cost));
      };
    });
    FOLIO_UNROLL
    for (int32_t i = kSplitTrials - 1; i >= 0; --i) {
      if (static_cast<uint32_t>(splits[i] * heads) <= in.num_workers) split_cost = trial_split_cost(space, i);
    }
  }
  if (group.rank() == 0) {
    rule.min_split_tiles = space.min_split_tiles;
    rule.swizzle_heads = heads;
    if (split_cost > 0) {
      rule.split_waves[0] = {total, split_cost};
      rule.num_split_waves = 1;
    }
  }
  if (split_cost == 0) {
    FOLIO_KEEP_LOOP
    for (int32_t i = group.rank(); i < kMaxSplitWaves; i += group.size()) {
      rule.split_waves[i] = split_wave(space, i);
      if (is_last_split_wave(space, i) && (i == 0 || !is_last_split_wave(space, i - 1))) rule.num_split_waves = i + 1;
    }
  }
  group.sync();
}

/// Counts that are summed over row tiles, per KV head.
enum SingleCount { kDynamicTileCount, kSourceCount, kCombineTileCount, kRowCount, kSingleCounts };

FOLIO_HOST_DEVICE inline void add_counts(int32_t (&counts)[kSingleCounts], const SingleTile& tile) {
  const bool cut = tile.splits > 1;
  counts[kDynamicTileCount] += tile.splits;
  counts[kSourceCount] += cut ? tile.splits : 0;
  counts[kCombineTileCount] += cut ? 1 : 0;
  counts[kRowCount] += cut ? tile.splits * tile.rows : 0;
}

/// Counts a row tile's KV splits.
FOLIO_HOST_DEVICE inline void split_single_tile(const SingleInput& in, const SingleRule& rule, SingleTile& tile) {
  const SingleSpan span = span_of(in, tile);
  if (tile.rows > 0 && span.kv_tiles >= 2 * rule.min_split_tiles &&
      needs_split(rule, span.begin, span.kv_tiles * span.tile_cost)) {
    tile.splits = count_splits(rule, span);
  }
}

/// Counts every row tile's KV splits, and the sums before it. `total`: the sums of all.
template <typename Group>
FOLIO_HOST_DEVICE void split_single_tiles(const SingleInput& in, SingleTiles& tiles, int32_t (&total)[kSingleCounts],
                                          Group& group) {
  const Share share = share_of(group, in.num_requests);
  int32_t before[kSingleCounts] = {};
  FOLIO_KEEP_LOOP
  for (int32_t r = share.begin; r < share.end; ++r) {
    split_single_tile(in, tiles.rule, tiles.of[r]);
    add_counts(before, tiles.of[r]);
  }
  group.sum_before(before, total);
  if (total[kSourceCount] > in.split_budget) {
    // Row tiles beyond the budget, in claim order, stay whole.
    int32_t spent = before[kSourceCount];
    FOLIO_UNROLL
    for (int32_t& count : before) count = 0;
    FOLIO_KEEP_LOOP
    for (int32_t r = share.begin; r < share.end; ++r) {
      SingleTile& tile = tiles.of[r];
      if (tile.splits > 1) spent += tile.splits;
      if (tile.splits > 1 && spent > in.split_budget) tile.splits = 1;
      add_counts(before, tile);
    }
    group.sum_before(before, total);
  }
  FOLIO_KEEP_LOOP
  for (int32_t r = share.begin; r < share.end; ++r) {
    SingleTile& tile = tiles.of[r];
    tile.dynamic_tiles = before[kDynamicTileCount];
    tile.sources = before[kSourceCount];
    tile.combine_tiles = before[kCombineTileCount];
    tile.partial_rows = before[kRowCount];
    add_counts(before, tile);
  }
  group.sync();
}

/// Writes what depends on the whole batch to the image's header. `head_cost`: of one KV head's work.
FOLIO_HOST_DEVICE inline void write_counts(const SingleInput& in, const int32_t (&total)[kSingleCounts],
                                           uint32_t head_cost) {
  const auto heads = static_cast<int32_t>(in.num_kv_heads);
  in.lengths[0] = 0;
  PlanView& view = in.header->view;
  view.num_tokens = in.num_requests > 0 ? in.cu_q[in.num_requests] : 0;
  view.num_work_tiles = view.num_dynamic_tiles = total[kDynamicTileCount] * heads;
  view.num_combine_tiles = total[kCombineTileCount] * heads;
  view.num_partial_rows = total[kRowCount] * heads;
  view.work_cost = int64_t{head_cost} * heads;
  in.header->num_combine_sources = total[kSourceCount] * heads;
  in.header->status = PlanStatus{};
}

/// Divides the batch: fills `tiles` and, with `writes`, the image's lengths and counts. Returns the number of work
/// tiles, or -1 where the batch is left to schedule_batch.
template <typename Group>
FOLIO_HOST_DEVICE int32_t schedule_single_tiles(const SingleInput& in, SingleTiles& tiles, bool writes, Group& group) {
  const Share share = share_of(group, in.num_requests);
  bool well = true;
  int32_t cost_before[1] = {};
  FOLIO_KEEP_LOOP
  for (int32_t r = share.begin; r < share.end; ++r) {
    SingleTile tile;
    well = read_single_tile(in, r, writes, tile) && well;
    tile.cost_before = static_cast<uint32_t>(cost_before[0]);
    tiles.of[r] = tile;
    if (well) cost_before[0] += static_cast<int32_t>(cost_of(in, tile));
  }
  if (!group.all_of(well)) return -1;
  int32_t cost[1];
  group.sum_before(cost_before, cost);
  FOLIO_KEEP_LOOP
  for (int32_t r = share.begin; r < share.end; ++r) tiles.of[r].cost_before += static_cast<uint32_t>(cost_before[0]);
  choose_single_rule(in, tiles, static_cast<uint32_t>(cost[0]), group);
  int32_t total[kSingleCounts];
  split_single_tiles(in, tiles, total, group);
  if (writes && group.rank() == group.size() - 1)
    write_counts(in, total, static_cast<uint32_t>(cost[0]));  // the thread with the fewest work tiles to make
  return total[kDynamicTileCount] * static_cast<int32_t>(in.num_kv_heads);
}

/// The work tile of KV split `split` of request r's row tile: KV tiles `split_tiles`, if the row tile is split.
/// Writes its source and combine tile to the image.
FOLIO_HOST_DEVICE inline WorkTile make_work_tile(const SingleInput& in, const SingleTile& tile, int32_t r, int32_t head,
                                                 int32_t split, const TokenRange& split_tiles) {
  const auto heads = static_cast<int32_t>(in.num_kv_heads);
  WorkTile work_tile{.segment = 0,
                     .kv_row = r,
                     .kv_head = head,
                     .request = r,
                     .row_begin = tile.row_begin,
                     .row_end = tile.row_begin + tile.rows,
                     .kv_begin = tile.kv_begin,
                     .kv_end = tile.kv_end,
                     .partial = -1,
                     .flags = kStart | kFinish,
                     .combine_tile = -1};
  if (tile.splits == 1) return work_tile;
  const uint32_t first = static_cast<uint32_t>(tile.kv_begin) / in.kv_tokens;
  const auto begin = static_cast<int32_t>((first + static_cast<uint32_t>(split_tiles.begin)) * in.kv_tokens);
  const uint32_t end = (first + static_cast<uint32_t>(split_tiles.end)) * in.kv_tokens;
  if (begin > tile.kv_begin) work_tile.kv_begin = begin;
  if (end < static_cast<uint32_t>(tile.kv_end)) work_tile.kv_end = static_cast<int32_t>(end);
  work_tile.partial = tile.partial_rows * heads + (head * tile.splits + split) * tile.rows;
  const int32_t source_begin = tile.sources * heads + head * tile.splits;
  in.combine_sources[source_begin + split] = work_tile.partial;
  if (split != 0) return work_tile;
  in.combine_tiles[tile.combine_tiles * heads + head] = {.kv_head = head,
                                                         .request = r,
                                                         .row_begin = tile.row_begin,
                                                         .row_end = tile.row_begin + tile.rows,
                                                         .source_begin = source_begin,
                                                         .source_end = source_begin + tile.splits};
  return work_tile;
}

/// Work tile `index`.
FOLIO_HOST_DEVICE inline WorkTile make_single_work_tile(const SingleInput& in, const SingleTiles& tiles,
                                                        int32_t index) {
  const auto heads = static_cast<int32_t>(in.num_kv_heads);
  const auto dynamic_tile = static_cast<int32_t>(static_cast<uint32_t>(index) / in.num_kv_heads);
  const SingleTile* const of = tiles.of;
  const int32_t r = last_at_or_below(in.num_requests, dynamic_tile, [of](int32_t i) { return of[i].dynamic_tiles; });
  const SingleTile& tile = of[r];
  const int32_t split = dynamic_tile - tile.dynamic_tiles;
  const TokenRange split_tiles = tile.splits > 1 ? split_of(tiles.rule, span_of(in, tile), split) : TokenRange{};
  return make_work_tile(in, tile, r, index - dynamic_tile * heads, split, split_tiles);
}

}  // namespace folio::inline v0::scheduler::device
