#pragma once

#include <cstdint>

#include "scheduler/device/job.hpp"
#include "scheduler/device/row_tile.hpp"

/// Work tiles, partial rows and combine tiles, numbered as emit_tiles.cc numbers them.
namespace folio::inline v0::scheduler::device {

/// An output tile among the uncut tile space's work tiles.
struct OutputTileCoord {
  int32_t request;
  int32_t head;
  int32_t tile;
  int32_t work_tiles_before;
};

/// Work tiles of the uncut line before an output tile's.
FOLIO_HOST_DEVICE inline int32_t work_tiles_before_output(const Job& job, int32_t request, int32_t head, int32_t tile) {
  const DeviceScratch& scratch = job.scratch;
  const int32_t begin = scratch.work_tiles_before[scratch.tile_begin[request]];
  const int32_t end = scratch.work_tiles_before[scratch.tile_begin[request + 1]];
  return begin * job.in.num_kv_heads + head * (end - begin) + scratch.work_tiles_before[tile] - begin;
}

FOLIO_HOST_DEVICE inline int32_t num_work_tiles_of(const Job& job, int32_t tile) {
  return job.scratch.work_tiles_before[tile + 1] - job.scratch.work_tiles_before[tile];
}

/// The output tile of work tile number `work tile` of the uncut line.
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

/// Where the split of `worker` begins: in which output tile, at which of its work tiles.
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

/// What one worker does of output tiles that are cut.
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
    // At fixed splits each split after a cut is a result of its own.
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

/// The sources of one worker's cut output tiles, and the combine tile of the output tile that it ends.
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
  // A combine tile's sources begin where the previous one's end, which is known here.
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

/// Numbers every worker's work tiles, partial rows and combine tiles, and emits the combine tiles. Returns the sums of
/// all.
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
  if (group.rank() == 0) job.worker_indptr[space.num_workers] = total.work_tiles;
  group.sync();
  return total;
}

/// Work tile number `index` of the plan.
FOLIO_HOST_DEVICE inline void emit_item(const Job& job, int32_t index) {
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
