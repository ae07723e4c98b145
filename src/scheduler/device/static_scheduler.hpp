#pragma once

#include <cstdint>

#include "scheduler/device/inputs.hpp"
#include "scheduler/device/tile_space.hpp"
#include "scheduler/static_scheduler.hpp"

/// The static schedule on the device, without shared segments: the same cuts and numbers as static_scheduler.cc
/// makes.
namespace folio::inline v0::scheduler::device {

/// Where the tile space may be cut around the ideal begin of `worker`'s range.
FOLIO_HOST_DEVICE inline void find_choices(const Job& job, const TileSpace& space, int32_t worker) {
  const DeviceScratch& scratch = job.scratch;
  CutSearch& cut = scratch.searches[worker];
  const int64_t heads = job.in.num_kv_heads;
  const int64_t position = ideal_cut(space, worker);
  // Within a request head follows head, so positions divide by the heads only across requests.
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
                 .divisible = job.in.max_splits != 1};
}

FOLIO_HOST_DEVICE inline int64_t choice(const CutChoices& choices, uint32_t index) {
  const int64_t ends = index == 0 ? choices.output_begin : choices.output_end;
  const int64_t granules = index == 2 ? choices.below : choices.above;
  return index < 2 ? ends : granules;
}

/// Which choice choose_cut took, by its position. It is always one of the worker's own choices. The previous cut lies
/// at or before the ideal position; then the granule's begin is nearer, or the cut is the granule's or the output
/// tile's end.
FOLIO_HOST_DEVICE inline uint32_t choice_taken(const CutChoices& choices, int64_t position) {
  if (position == choices.output_begin) return 0;
  if (position == choices.output_end) return 1;
  return position == choices.below ? 2 : 3;
}

/// Maps the four choices of one cut to those of a later cut: two bits each.
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

/// The choice of `worker` that follows from each choice of its predecessor.
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

/// Chooses the cuts where all output tiles may be cut. A cut depends on its predecessor's choice, one of four. The
/// four outcomes form a map, and maps compose in any grouping, so a scan replaces the sequential loop.
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

/// Chooses the cuts in order, where the budget of partial rows may not last for all.
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

/// An output tile, and where its work tiles begin in the uncut tile space.
struct OutputTileCoord {
  int32_t request;
  int32_t head;
  int32_t tile;
  int32_t work_tiles_before;
};

/// Uncut work tiles before an output tile.
FOLIO_HOST_DEVICE inline int32_t work_tiles_before_output(const Job& job, int32_t request, int32_t head, int32_t tile) {
  const DeviceScratch& scratch = job.scratch;
  const int32_t begin = scratch.work_tiles_before[scratch.tile_begin[request]];
  const int32_t end = scratch.work_tiles_before[scratch.tile_begin[request + 1]];
  return begin * job.in.num_kv_heads + head * (end - begin) + scratch.work_tiles_before[tile] - begin;
}

FOLIO_HOST_DEVICE inline int32_t num_work_tiles_of(const Job& job, int32_t tile) {
  return job.scratch.work_tiles_before[tile + 1] - job.scratch.work_tiles_before[tile];
}

/// The output tile of uncut work tile `work_tile`.
FOLIO_HOST_DEVICE inline OutputTileCoord output_tile_at(const Job& job, int32_t work_tile) {
  const DeviceScratch& scratch = job.scratch;
  OutputTileCoord output_tile;
  output_tile.request =
      scratch.tile_request[last_at_or_below(job.num_row_tiles(), work_tile / job.in.num_kv_heads,
                                            [&scratch](int32_t t) { return scratch.work_tiles_before[t]; })];
  const int32_t first = scratch.tile_begin[output_tile.request];
  const int32_t count = scratch.tile_begin[output_tile.request + 1] - first;
  const int32_t begin = scratch.work_tiles_before[first];
  const int32_t a_head = scratch.work_tiles_before[first + count] - begin;
  const int32_t in_request = work_tile - begin * job.in.num_kv_heads;
  output_tile.head = in_request / a_head;
  const int32_t in_head = in_request - output_tile.head * a_head;
  output_tile.tile = first;
  if (count > 1) {
    output_tile.tile += last_at_or_below(
        count, in_head, [&scratch, first, begin](int32_t t) { return scratch.work_tiles_before[first + t] - begin; });
  }
  output_tile.work_tiles_before = work_tile - in_head + scratch.work_tiles_before[output_tile.tile] - begin;
  return output_tile;
}

/// Where `worker` begins: in which output tile, at which of its work tiles.
FOLIO_HOST_DEVICE inline void place_cut(const Job& job, const TileSpace& space, int32_t worker) {
  CutPlace& place = job.scratch.places[worker];
  place.output_start = -1;
  place.token = -1;
  if (worker == 0 || worker == space.num_workers || space.total == 0) {
    place.position = worker == 0 ? 0 : space.total;
    place.work_tile = worker == 0 ? 0 : job.scratch.work_tiles_before[job.num_row_tiles()] * job.in.num_kv_heads;
    return;
  }
  const CutSearch& search = job.scratch.searches[worker];
  const int32_t output_start = work_tiles_before_output(job, search.request, search.head, search.tile);
  const int32_t output_end = output_start + num_work_tiles_of(job, search.tile);
  place.position = choice(search.choices, search.taken);
  place.work_tile = output_start;
  if (place.position == search.choices.output_end) {
    place.work_tile = output_end;
  } else if (place.position != search.choices.output_begin) {
    const RowTile tile = row_tile(job, search.request, search.tile);
    const PlaceInOutputTile in_output_tile =
        place_in_output_tile(job, tile, search.taken == 2 ? search.below : search.above);
    place.work_tile += in_output_tile.work_tile;
    place.token = in_output_tile.token;
    place.output_start = output_start;
    place.output_end = output_end;
    place.request = search.request;
    place.head = search.head;
    place.row_begin = tile.row_begin;
    place.row_end = tile.row_end;
  }
}

/// One worker's share of output tiles that are cut.
struct CutWork {
  int32_t work_tiles = 0;
  bool head_ends = false;   ///< it ends the output tile that it begins within
  bool tail = false;        ///< it begins an output tile that it does not end
  int32_t head_splits = 0;  ///< partial results of the output tile it begins within
  int32_t head_rows = 0;    ///< rows of each
  int32_t tail_rows = 0;
  FOLIO_HOST_DEVICE WorkSums sums() const {
    return {.work_tiles = work_tiles,
            .partial_rows = head_splits * head_rows + tail_rows,
            .sources = head_splits + (tail ? 1 : 0),
            .combine_tiles = head_ends ? 1 : 0};
  }
};

FOLIO_HOST_DEVICE inline CutWork cut_work(const Job& job, int32_t worker) {
  const CutPlace& cut = job.scratch.places[worker];
  const CutPlace& stop = job.scratch.places[worker + 1];
  CutWork work;
  if (cut.position == stop.position) return work;
  const int32_t work_tile_end = stop.work_tile + (stop.token >= 0 ? 1 : 0);
  const bool same_output_tile = cut.inside() && cut.output_start == stop.output_start;
  work.work_tiles = work_tile_end - cut.work_tile;
  work.head_ends = cut.inside() && !same_output_tile;
  work.tail = stop.inside() && !same_output_tile;
  if (cut.inside()) {
    // Each fixed split after a cut is a result of its own.
    work.head_splits = job.fixed_splits() ? (same_output_tile ? work_tile_end : cut.output_end) - cut.work_tile : 1;
    work.head_rows = cut.row_end - cut.row_begin;
  }
  if (work.tail) work.tail_rows = stop.row_end - stop.row_begin;
  return work;
}

struct AddWork {
  FOLIO_HOST_DEVICE WorkSums operator()(const WorkSums& a, const WorkSums& b) const {
    return {a.work_tiles + b.work_tiles, a.partial_rows + b.partial_rows, a.sources + b.sources,
            a.combine_tiles + b.combine_tiles};
  }
};

/// Emits the sources of one worker's cut output tiles, and the combine tile of the output tile that it ends.
FOLIO_HOST_DEVICE inline void emit_combine_tiles(const Job& job, int32_t worker, const CutWork& work,
                                                 const WorkSums& total) {
  CutPlace& cut = job.scratch.places[worker];
  const WorkSums& before = cut.before;
  cut.tail_partial = before.partial_rows + work.head_splits * work.head_rows;
  cut.tail_combine_tile = before.combine_tiles + (work.head_ends ? 1 : 0);
  FOLIO_KEEP_LOOP
  for (int32_t split = 0; split < work.head_splits; ++split) {
    job.combine_sources[before.sources + split] = before.partial_rows + split * work.head_rows;
  }
  const int32_t source_end = before.sources + work.head_splits;
  if (work.tail) job.combine_sources[source_end] = cut.tail_partial;
  if (!work.head_ends) return;
  // A combine tile's sources begin where the previous one's end.
  CombineTile& combine_tile = job.combine_tiles[before.combine_tiles];
  combine_tile.kv_head = cut.head;
  combine_tile.request = cut.request;
  combine_tile.row_begin = cut.row_begin;
  combine_tile.row_end = cut.row_end;
  combine_tile.source_end = source_end;
  if (before.combine_tiles == 0) combine_tile.source_begin = 0;
  if (before.combine_tiles + 1 < total.combine_tiles)
    job.combine_tiles[before.combine_tiles + 1].source_begin = source_end;
}

/// Numbers every worker's work tiles, partial rows and combine tiles, and emits the combine tiles. Returns the
/// totals.
template <typename Group>
FOLIO_HOST_DEVICE WorkSums number_work(const Job& job, const TileSpace& space, Group& group) {
  CutPlace* const places = job.scratch.places;
  FOLIO_KEEP_LOOP
  for (int32_t w = group.rank(); w <= space.num_workers; w += group.size()) place_cut(job, space, w);
  group.sync();
  const Share share = share_of(group, space.num_workers);
  WorkSums sums;
  FOLIO_KEEP_LOOP
  for (int32_t w = share.begin; w < share.end; ++w) sums = AddWork()(sums, cut_work(job, w).sums());
  WorkSums total;
  WorkSums before = group.exclusive_scan(sums, WorkSums{}, AddWork(), total);
  FOLIO_KEEP_LOOP
  for (int32_t w = share.begin; w < share.end; ++w) {
    const CutWork work = cut_work(job, w);
    places[w].before = before;
    job.worker_indptr[w] = before.work_tiles;
    emit_combine_tiles(job, w, work, total);
    before = AddWork()(before, work.sums());
  }
  // Workers that max_splits leaves without work end where the others do.
  FOLIO_KEEP_LOOP
  for (int32_t w = space.num_workers + group.rank(); w <= job.in.num_workers; w += group.size()) {
    job.worker_indptr[w] = total.work_tiles;
  }
  group.sync();
  return total;
}

/// Work tile number `index` of the plan.
FOLIO_HOST_DEVICE inline void emit_static_tile(const Job& job, int32_t index) {
  const int32_t* const worker_indptr = job.worker_indptr;
  const int32_t worker =
      last_at_or_below(job.in.num_workers, index, [worker_indptr](int32_t w) { return worker_indptr[w]; });
  const CutPlace& cut = job.scratch.places[worker];
  const CutPlace& stop = job.scratch.places[worker + 1];
  const int32_t in_worker = index - worker_indptr[worker];
  const int32_t uncut = cut.work_tile + in_worker;
  const bool first = in_worker == 0;
  const bool last = index + 1 == worker_indptr[worker + 1];
  const OutputTileCoord output_tile = output_tile_at(job, uncut);
  const int32_t in_output_tile = uncut - output_tile.work_tiles_before;
  const RowTile tile = row_tile(job, output_tile.request, output_tile.tile);
  int32_t segment = 0;
  TokenRange keys = work_tile_keys(job, tile, in_output_tile, segment);
  if (first && cut.token >= 0) keys.begin = cut.token;
  if (last && stop.token >= 0) keys.end = stop.token;
  const bool head = cut.output_start == output_tile.work_tiles_before;
  const bool tail = !head && stop.output_start == output_tile.work_tiles_before;
  bool starts = first || in_output_tile == 0;
  bool finishes = last || in_output_tile + 1 == num_work_tiles_of(job, output_tile.tile);
  int32_t partial = -1;
  int32_t combine_tile = -1;
  if (head && job.fixed_splits()) {
    starts = finishes = true;
    partial = cut.before.partial_rows + in_worker * tile.rows();
    combine_tile = cut.before.combine_tiles;
  } else if (finishes && (head || tail)) {
    partial = head ? cut.before.partial_rows : cut.tail_partial;
    combine_tile = head ? cut.before.combine_tiles : cut.tail_combine_tile;
  }
  job.work_tiles[index] = {
      .segment = segment,
      .kv_row = output_tile.request,
      .kv_head = output_tile.head,
      .request = output_tile.request,
      .row_begin = tile.row_begin,
      .row_end = tile.row_end,
      .kv_begin = static_cast<int32_t>(keys.begin),
      .kv_end = static_cast<int32_t>(keys.end),
      .partial = partial,
      .flags = (starts ? kStart : 0u) | (finishes ? kFinish : 0u) | (job.fixed_splits() ? kFold : 0u),
      .combine_tile = combine_tile};
}

}  // namespace folio::inline v0::scheduler::device
