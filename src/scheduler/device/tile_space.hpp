#pragma once

#include <cstdint>

#include "scheduler/device/inputs.hpp"
#include "scheduler/static_scheduler.hpp"

/// Row tiles and their costs, computed where they are needed instead of being stored: tile_space.cc's arithmetic.
namespace folio::inline v0::scheduler::device {

struct RowTile {
  int32_t request;
  int32_t row_begin;
  int32_t row_end;
  int64_t p_lo;  ///< positions of the first and last row's queries
  int64_t p_hi;
  FOLIO_HOST_DEVICE int32_t rows() const { return row_end - row_begin; }
};

/// What a row tile visits, over all its ranges.
struct TileWork {
  int64_t num_kv_tiles = 0;
  int32_t num_work_tiles = 0;
  int64_t granularity = 0;  ///< cost of the costliest split granule
};

/// The split granule of an output tile that contains a KV tile.
struct SplitBounds {
  int64_t below = 0;  ///< first KV tile
  int64_t above = 0;  ///< behind its last
};

/// The row tile that begins `offset` rows after its request's first.
FOLIO_HOST_DEVICE inline RowTile make_row_tile(const Job& job, int32_t request, int32_t offset) {
  const int32_t group_size = job.in.group_size;
  const int32_t first = job.cu_q[request] * group_size;
  const int32_t end = job.cu_q[request + 1] * group_size;
  RowTile rows;
  rows.request = request;
  rows.row_begin = first + offset;
  rows.row_end = end - rows.row_begin < job.in.tile.rows ? end : rows.row_begin + job.in.tile.rows;
  rows.p_lo = int64_t{job.q_first_pos[request]} + offset / group_size;
  rows.p_hi = int64_t{job.q_first_pos[request]} + (rows.row_end - 1 - first) / group_size;
  return rows;
}

/// Row tile `tile` of the tile space, whose request stands at `place`.
FOLIO_HOST_DEVICE inline RowTile row_tile(const Job& job, int32_t place, int32_t tile) {
  const int32_t* const begin = job.scratch.tile_begin + place;
  const int32_t in_request = job.lpt() ? begin[1] - 1 - tile : tile - begin[0];
  return make_row_tile(job, job.request_at(place), in_request * job.in.tile.rows);
}

FOLIO_HOST_DEVICE inline int64_t kv_tile_cost(const Job& job, const RowTile& tile) {
  return job.in.tile_cost + int64_t{tile.rows()} * job.in.row_cost;
}

/// As RowTile::start_cost and RowTile::offset_of of scheduler/tile_space.hpp.
FOLIO_HOST_DEVICE inline int64_t start_cost(const Job& job, const RowTile& tile) {
  const int64_t priced = int64_t{tile.rows()} - job.in.start_free_rows;
  return job.in.start_cost + (priced > 0 ? priced * job.in.start_row_cost : 0);
}
FOLIO_HOST_DEVICE inline int64_t offset_in_output_tile(const Job& job, const RowTile& tile, int64_t kv_tile) {
  return kv_tile == 0 ? 0 : start_cost(job, tile) + kv_tile * kv_tile_cost(job, tile);
}

/// Keys of segment `s` that a row tile visits.
FOLIO_HOST_DEVICE inline TokenRange key_range(const Job& job, const RowTile& tile, int32_t s) {
  const Segment& segment = job.in.segments[s];
  const int64_t at = int64_t{s} * job.in.num_requests + tile.request;
  const SegmentSpan span{job.first_pos[at], job.kv_len[at], segment.shard};
  TokenRange range;
  if (segment.bounds.by_query) {
    const auto token = static_cast<int32_t>(job.cu_q[tile.request] + tile.p_lo - job.q_first_pos[tile.request]);
    range = visible_to_tokens(span, segment.bounds, job.visible_positions, token,
                              static_cast<int32_t>(token + tile.p_hi - tile.p_lo + 1), tile.p_lo);
  } else {
    range = visible_range(span, segment.bounds, tile.p_lo, tile.p_hi);
  }
  if (job.fixed_splits()) range.begin = narrow_div(range.begin, job.in.tile.kv_tokens) * job.in.tile.kv_tokens;
  return range;
}

FOLIO_HOST_DEVICE inline TileWork tile_work(const Job& job, const RowTile& tile) {
  const int64_t width = job.in.tile.kv_tokens;
  const int64_t split = job.in.fixed_split_tokens;
  TileWork work;
  int64_t granularity_tiles = 1;
  FOLIO_KEEP_LOOP
  for (int32_t s = 0; s < job.in.num_segments; ++s) {
    const TokenRange range = key_range(job, tile, s);
    if (range.empty()) continue;
    const int64_t kv_tiles = tiles_touched(range, width);
    work.num_kv_tiles += kv_tiles;
    if (split == 0) {
      work.num_work_tiles += 1;
    } else {
      work.num_work_tiles += static_cast<int32_t>(tiles_touched(range, split));
      const int64_t of_split = narrow_div(split, width);
      const int64_t tiles = kv_tiles < of_split ? kv_tiles : of_split;
      granularity_tiles = tiles > granularity_tiles ? tiles : granularity_tiles;
    }
  }
  if (work.num_work_tiles == 0) work = TileWork{.num_kv_tiles = 1, .num_work_tiles = 1};  // writes zeros
  work.granularity = offset_in_output_tile(job, tile, granularity_tiles);
  return work;
}

/// The fixed split that contains KV tile `kv_tile` of a row tile's output tile.
FOLIO_HOST_DEVICE inline SplitBounds split_around(const Job& job, const RowTile& tile, int64_t kv_tile) {
  const int64_t width = job.in.tile.kv_tokens;
  const int64_t split = narrow_div(job.in.fixed_split_tokens, width);
  int64_t before = 0;
  FOLIO_KEEP_LOOP
  for (int32_t s = 0; s < job.in.num_segments; ++s) {
    const TokenRange range = key_range(job, tile, s);
    const int64_t count = tiles_touched(range, width);
    if (kv_tile < before + count) {
      const int64_t first = narrow_div(range.begin, width);
      const int64_t index = narrow_div(first + kv_tile - before, split);
      const int64_t below = index * split - first;
      const int64_t above = (index + 1) * split - first;
      return {before + (below > 0 ? below : 0), before + (above < count ? above : count)};
    }
    before += count;
  }
  return {0, 1};  // a row tile without visible keys
}

/// At fixed splits: upper bound of the partial rows that a first cut near `kv_tile` makes.
FOLIO_HOST_DEVICE inline int64_t price_of_cut(const Job& job, const RowTile& tile, int64_t kv_tile) {
  const int64_t width = job.in.tile.kv_tokens;
  int64_t later_splits = 0;
  int64_t before = 0;
  FOLIO_KEEP_LOOP
  for (int32_t s = 0; s < job.in.num_segments; ++s) {
    const TokenRange range = key_range(job, tile, s);
    const int64_t count = tiles_touched(range, width);
    if (kv_tile < before + count) {
      const int64_t skipped = kv_tile > before ? (kv_tile - before) * width : 0;
      later_splits += tiles_touched({range.begin + skipped, range.end}, job.in.fixed_split_tokens);
    }
    before += count;
  }
  return (later_splits + 1) * tile.rows();
}

/// A boundary between KV tiles of an output tile, among its uncut work tiles.
struct PlaceInOutputTile {
  int32_t work_tile = 0;  ///< the work tile that contains it or begins there
  int32_t token = -1;     ///< the local token at which it cuts that work tile, or -1 at the work tile's begin
};

FOLIO_HOST_DEVICE inline PlaceInOutputTile place_in_output_tile(const Job& job, const RowTile& tile, int64_t kv_tile) {
  const int64_t width = job.in.tile.kv_tokens;
  PlaceInOutputTile place;
  int64_t before = 0;
  FOLIO_KEEP_LOOP
  for (int32_t s = 0; s < job.in.num_segments; ++s) {
    const TokenRange range = key_range(job, tile, s);
    if (range.empty()) continue;
    const int64_t count = tiles_touched(range, width);
    if (kv_tile < before + count) {
      const int64_t token = (narrow_div(range.begin, width) + kv_tile - before) * width;
      if (job.fixed_splits()) {  // cuts are where splits begin
        const int64_t split = job.in.fixed_split_tokens;
        place.work_tile +=
            kv_tile == before ? 0 : static_cast<int32_t>(narrow_div(token, split) - narrow_div(range.begin, split));
      } else if (kv_tile > before) {
        place.token = static_cast<int32_t>(token);
      }
      return place;
    }
    before += count;
    place.work_tile += job.fixed_splits() ? static_cast<int32_t>(tiles_touched(range, job.in.fixed_split_tokens)) : 1;
  }
  return place;
}

/// Segment and keys of work tile `work_tile` of an uncut output tile.
FOLIO_HOST_DEVICE inline TokenRange work_tile_keys(const Job& job, const RowTile& tile, int32_t work_tile,
                                                   int32_t& segment) {
  FOLIO_KEEP_LOOP
  for (int32_t s = 0; s < job.in.num_segments; ++s) {
    const TokenRange range = key_range(job, tile, s);
    if (range.empty()) continue;
    segment = s;
    if (!job.fixed_splits()) {
      if (work_tile == 0) return range;
      --work_tile;
      continue;
    }
    const int64_t split = job.in.fixed_split_tokens;
    const auto count = static_cast<int32_t>(tiles_touched(range, split));
    if (work_tile < count) {
      const int64_t first = (narrow_div(range.begin, split) + work_tile) * split;
      return {work_tile == 0 ? range.begin : first, first + split < range.end ? first + split : range.end};
    }
    work_tile -= count;
  }
  segment = 0;
  return {};
}

/// Sums over row tiles.
struct TileSpaceSums {
  int64_t cost = 0;
  int64_t granularity = 0;  ///< the largest
  int64_t work_tiles = 0;
};
struct AddTileSpaceSums {
  FOLIO_HOST_DEVICE TileSpaceSums operator()(const TileSpaceSums& a, const TileSpaceSums& b) const {
    return {a.cost + b.cost, a.granularity > b.granularity ? a.granularity : b.granularity,
            a.work_tiles + b.work_tiles};
  }
};

/// The place of the request that a row tile belongs to.
FOLIO_HOST_DEVICE inline int32_t request_of_tile(const Job& job, int32_t tile) {
  const int32_t* tile_begin = job.scratch.tile_begin;
  return last_at_or_below(job.in.num_requests, tile, [tile_begin](int32_t r) { return tile_begin[r]; });
}

struct LongerTile {
  FOLIO_HOST_DEVICE int64_t operator()(int64_t a, int64_t b) const { return a > b ? a : b; }
};

/// Cost of the costliest row tile of one KV head.
template <typename Group>
FOLIO_HOST_DEVICE int64_t longest_tile(const Job& job, Group& group) {
  const Share share = share_of(group, job.num_row_tiles());
  const int64_t* const cost_before = job.scratch.cost_before;
  int64_t mine = 0;
  FOLIO_KEEP_LOOP
  for (int32_t t = share.begin; t < share.end; ++t) mine = LongerTile()(mine, cost_before[t + 1] - cost_before[t]);
  int64_t longest = 0;
  group.exclusive_scan(mine, int64_t{0}, LongerTile(), longest);
  return longest;
}

/// Sums cost and work tiles before every row tile. Returns the tile space. Its order is request, head, row tile: KV
/// heads follow one another within a request only.
template <typename Group>
FOLIO_HOST_DEVICE TileSpace sum_row_tiles(const Job& job, Group& group) {
  const int32_t count = job.num_row_tiles();
  const Share share = share_of(group, count);
  TileSpaceSums sums;
  FOLIO_KEEP_LOOP
  for (int32_t t = share.begin; t < share.end; ++t) {
    const int32_t place = request_of_tile(job, t);
    const RowTile tile = row_tile(job, place, t);
    job.scratch.tile_request[t] = place;
    const TileWork work = tile_work(job, tile);
    job.scratch.cost_before[t] = sums.cost;
    job.scratch.work_tiles_before[t] = static_cast<int32_t>(sums.work_tiles);
    if (job.dynamic()) job.scratch.tile_splits[t].kv_tiles = static_cast<int32_t>(work.num_kv_tiles);
    sums = AddTileSpaceSums()(
        sums, {offset_in_output_tile(job, tile, work.num_kv_tiles), work.granularity, work.num_work_tiles});
  }
  TileSpaceSums total;
  const TileSpaceSums before = group.exclusive_scan(sums, TileSpaceSums{}, AddTileSpaceSums(), total);
  FOLIO_KEEP_LOOP
  for (int32_t t = share.begin; t < share.end; ++t) {
    job.scratch.cost_before[t] += before.cost;
    job.scratch.work_tiles_before[t] += static_cast<int32_t>(before.work_tiles);
  }
  if (group.rank() == 0) {
    job.scratch.cost_before[count] = total.cost;
    job.scratch.work_tiles_before[count] = static_cast<int32_t>(total.work_tiles);
  }
  group.sync();
  TileSpace space{
      .total = total.cost * job.in.num_kv_heads, .granularity = total.granularity, .num_workers = job.in.num_workers};
  if (job.in.max_splits > 0 && !job.dynamic()) {
    space.num_workers =
        workers_within_splits(space.num_workers, space.total, longest_tile(job, group), job.in.max_splits);
  }
  return space;
}

FOLIO_HOST_DEVICE FOLIO_CALLED inline int64_t divide(int64_t value, int64_t divisor) {
  return value / divisor;
}

}  // namespace folio::inline v0::scheduler::device
