#pragma once

#include <cstdint>

#include "scheduler/device/job.hpp"
#include "scheduler/device/row_tile.hpp"

/// The tile space and its cuts: what build_tile_space and cut_tile_space compute, for requests alone.
namespace folio::inline v0::scheduler::device {

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

/// The place of the request that a row tile is of.
FOLIO_HOST_DEVICE inline int32_t request_of_tile(const Job& job, int32_t tile) {
  const int32_t* tile_begin = job.scratch.tile_begin;
  return last_at_or_below(job.in.num_requests, tile, [tile_begin](int32_t r) { return tile_begin[r]; });
}

/// Sums of cost and work tiles before every row tile. Returns the tile space, which is the KV heads' one after the
/// other only within a request: request by request, head by head, row tile by row tile.
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
    if (job.dynamic()) job.scratch.dynamic_tiles[t].kv_tiles = static_cast<int32_t>(work.num_kv_tiles);
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
  return {
      .total = total.cost * job.in.num_kv_heads, .granularity = total.granularity, .num_workers = job.in.num_workers};
}

FOLIO_HOST_DEVICE FOLIO_CALLED inline int64_t divide(int64_t value, int64_t divisor) {
  return value / divisor;
}

/// Where the tile space may be cut around the ideal cut before `worker`'s split.
FOLIO_HOST_DEVICE inline void find_choices(const Job& job, const TileSpace& space, int32_t worker) {
  const DeviceScratch& scratch = job.scratch;
  CutSearch& cut = scratch.searches[worker];
  const int64_t heads = job.in.num_kv_heads;
  const int64_t position = ideal_cut(space, worker);
  // Within a request the heads follow one another; a request's share of the tile space is that of all its row tiles.
  cut.request = scratch.tile_request[last_at_or_below(job.num_row_tiles(), divide(position, heads),
                                                      [&scratch](int32_t t) { return scratch.cost_before[t]; })];
  const int32_t first = scratch.tile_begin[cut.request];
  const int32_t count = scratch.tile_begin[cut.request + 1] - first;
  const int64_t cost_before = scratch.cost_before[first];
  const int64_t head_cost = scratch.cost_before[first + count] - cost_before;
  const int64_t in_request = position - cost_before * heads;
  cut.head = static_cast<int32_t>(divide(in_request, head_cost));
  const int64_t in_head = in_request - cut.head * head_cost;
  cut.tile = first + last_at_or_below(count, in_head, [&scratch, first, cost_before](int32_t t) {
               return scratch.cost_before[first + t] - cost_before;
             });
  const RowTile tile = row_tile(job, cut.request, cut.tile);
  const int64_t offset = scratch.cost_before[cut.tile] - cost_before;
  const int64_t past_start = in_head - offset - start_cost(job, tile);
  const int64_t kv_tile = past_start <= 0 ? 0 : divide(past_start, kv_tile_cost(job, tile));
  const bool fixed = job.fixed_splits();
  const SplitBounds granularity = fixed ? split_around(job, tile, kv_tile) : SplitBounds{kv_tile, kv_tile + 1};
  cut.below = granularity.below;
  cut.above = granularity.above;
  cut.price = fixed ? price_of_cut(job, tile, kv_tile) : 0;
  const int64_t output_begin = cost_before * heads + cut.head * head_cost + offset;
  cut.choices = {.output_begin = output_begin,
                 .output_end = output_begin + scratch.cost_before[cut.tile + 1] - scratch.cost_before[cut.tile],
                 .below = output_begin + offset_in_output_tile(job, tile, granularity.below),
                 .above = output_begin + offset_in_output_tile(job, tile, granularity.above),
                 .divisible = true};
}

FOLIO_HOST_DEVICE inline int64_t choice(const CutChoices& choices, uint32_t index) {
  const int64_t ends = index == 0 ? choices.output_begin : choices.output_end;
  const int64_t grains = index == 2 ? choices.below : choices.above;
  return index < 2 ? ends : grains;
}

/// The choice whose position choose_cut takes. It is always one of the worker's own: the previous cut lies at or before
/// the ideal place, and then the split granule's begin is nearer, or is the split granule's or the output tile's end.
FOLIO_HOST_DEVICE inline uint32_t choice_taken(const CutChoices& choices, int64_t position) {
  if (position == choices.output_begin) return 0;
  if (position == choices.output_end) return 1;
  return position == choices.below ? 2 : 3;
}

/// A map of the four choices of one cut to those of a later one: two bits for each.
using ChoiceMap = uint32_t;
FOLIO_HOST_DEVICE constexpr ChoiceMap same_choice() {
  return 0b11100100;
}
FOLIO_HOST_DEVICE inline uint32_t mapped(ChoiceMap map, uint32_t choice_before) {
  return map >> 2 * choice_before & 3u;
}
struct Compose {
  FOLIO_HOST_DEVICE ChoiceMap operator()(ChoiceMap first, ChoiceMap then) const {
    ChoiceMap both = 0;
    FOLIO_KEEP_LOOP
    for (uint32_t i = 0; i < 4; ++i) both |= mapped(then, mapped(first, i)) << 2 * i;
    return both;
  }
};

/// Which choice of `worker` follows from each of its predecessor's.
FOLIO_HOST_DEVICE inline ChoiceMap followed_choices(const CutSearch* searches, const TileSpace& space, int32_t worker) {
  const CutChoices choices = searches[worker].choices;
  const CutChoices before = searches[worker - 1].choices;
  ChoiceMap map = 0;
  FOLIO_KEEP_LOOP
  for (uint32_t i = 0; i < 4; ++i) {
    Cut previous;
    if (worker > 1) {
      previous.position = choice(before, i);
      previous.deviation = previous.position * space.num_workers - space.total * (worker - 1);
    }
    map |= choice_taken(choices, choose_cut(space, worker, previous, choices).position) << 2 * i;
  }
  return map;
}

/// Chooses the cuts where all output tiles may be cut. A cut depends on the one before, of which there are four: what
/// follows from each of the four is a map, and maps are composed in any grouping, so that nothing is sequential.
template <typename Group>
FOLIO_HOST_DEVICE void choose_in_parallel(const Job& job, const TileSpace& space, Group& group) {
  CutSearch* const searches = job.scratch.searches;
  const Share share = share_of(group, space.num_workers);
  const int32_t begin = share.begin > 1 ? share.begin : 1;
  ChoiceMap map = same_choice();
  FOLIO_KEEP_LOOP
  for (int32_t w = begin; w < share.end; ++w) {
    searches[w].followed = followed_choices(searches, space, w);
    map = Compose()(map, searches[w].followed);
  }
  ChoiceMap all = 0;
  const ChoiceMap before = group.exclusive_scan(map, same_choice(), Compose(), all);
  uint32_t taken = mapped(before, 0);
  FOLIO_KEEP_LOOP
  for (int32_t w = begin; w < share.end; ++w) {
    taken = mapped(searches[w].followed, taken);
    searches[w].taken = taken;
  }
}

/// Chooses the cuts one after the other, where the budget of partial rows may not suffice for all.
FOLIO_HOST_DEVICE inline void choose_in_order(const Job& job, const TileSpace& space) {
  int64_t budget = job.in.fixed_split_budget;
  int64_t paid_output_tile = -1;  // by its begin
  Cut previous;
  FOLIO_KEEP_LOOP
  for (int32_t w = 1; w < space.num_workers; ++w) {
    CutSearch& cut = job.scratch.searches[w];
    const bool is_cut = cut.choices.output_begin == paid_output_tile;
    cut.choices.divisible = is_cut || cut.price <= budget;
    previous = choose_cut(space, w, previous, cut.choices);
    cut.taken = choice_taken(cut.choices, previous.position);
    const bool inside = previous.position != cut.choices.output_begin && previous.position != cut.choices.output_end;
    if (!inside || is_cut) continue;
    budget -= cut.price;
    paid_output_tile = cut.choices.output_begin;
  }
}

struct AddPrices {
  FOLIO_HOST_DEVICE int64_t operator()(int64_t a, int64_t b) const { return a + b; }
};

/// Chooses every worker's cut: CutSearch of workers 1 and up.
template <typename Group>
FOLIO_HOST_DEVICE void choose_cuts(const Job& job, const TileSpace& space, Group& group) {
  if (space.total == 0) return;
  int64_t prices = 0;
  FOLIO_KEEP_LOOP
  for (int32_t w = 1 + group.rank(); w < space.num_workers; w += group.size()) {
    find_choices(job, space, w);
    prices += job.scratch.searches[w].price;
  }
  int64_t total = 0;
  if (job.fixed_splits()) {
    group.exclusive_scan(prices, int64_t{0}, AddPrices(), total);
  } else {
    group.sync();
  }
  if (total <= job.in.fixed_split_budget) {
    choose_in_parallel(job, space, group);
  } else if (group.rank() == 0) {
    choose_in_order(job, space);
  }
  group.sync();
}

}  // namespace folio::inline v0::scheduler::device
