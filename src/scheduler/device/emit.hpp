#pragma once

#include <cstdint>

#include "scheduler/device/job.hpp"
#include "scheduler/device/row_tile.hpp"

/// Items, partial rows and merges, numbered as emit_work.cc numbers them.
namespace folio::inline v0::scheduler::device {

/// A chain among the uncut line's work tiles.
struct Chain {
  int32_t request;
  int32_t head;
  int32_t tile;
  int32_t items_before;
};

/// Items of the uncut line before a chain's.
FOLIO_HOST_DEVICE inline int32_t items_before_chain(const Job& job, int32_t request, int32_t head, int32_t tile) {
  const DeviceScratch& scratch = job.scratch;
  const int32_t begin = scratch.items_before[scratch.tile_begin[request]];
  const int32_t end = scratch.items_before[scratch.tile_begin[request + 1]];
  return begin * job.in.num_kv_heads + head * (end - begin) + scratch.items_before[tile] - begin;
}

FOLIO_HOST_DEVICE inline int32_t items_of_tile(const Job& job, int32_t tile) {
  return job.scratch.items_before[tile + 1] - job.scratch.items_before[tile];
}

/// The chain of item number `item` of the uncut line.
FOLIO_HOST_DEVICE inline Chain chain_of_item(const Job& job, int32_t item) {
  const DeviceScratch& scratch = job.scratch;
  Chain chain;
  chain.request = scratch.tile_request[last_at_or_below(job.num_row_tiles(), item / job.in.num_kv_heads,
                                                        [&scratch](int32_t t) { return scratch.items_before[t]; })];
  const int32_t first = scratch.tile_begin[chain.request];
  const int32_t count = scratch.tile_begin[chain.request + 1] - first;
  const int32_t begin = scratch.items_before[first];
  const int32_t a_head = scratch.items_before[first + count] - begin;
  const int32_t in_request = item - begin * job.in.num_kv_heads;
  chain.head = in_request / a_head;
  const int32_t in_head = in_request - chain.head * a_head;
  chain.tile = first;
  if (count > 1) {
    chain.tile += last_at_or_below(
        count, in_head, [&scratch, first, begin](int32_t t) { return scratch.items_before[first + t] - begin; });
  }
  chain.items_before = item - in_head + scratch.items_before[chain.tile] - begin;
  return chain;
}

/// Where the part of `worker` begins: in which chain, at which of its work tiles.
FOLIO_HOST_DEVICE inline void place_cut(const Job& job, const WorkLine& line, int32_t worker) {
  CutPlace& place = job.scratch.places[worker];
  place.chain_items = -1;
  place.token = -1;
  if (worker == 0 || worker == line.num_workers || line.total == 0) {
    place.position = worker == 0 ? 0 : line.total;
    place.item = worker == 0 ? 0 : job.scratch.items_before[job.num_row_tiles()] * job.in.num_kv_heads;
    return;
  }
  const CutSearch& search = job.scratch.searches[worker];
  const int32_t chain_items = items_before_chain(job, search.request, search.head, search.tile);
  const int32_t chain_end = chain_items + items_of_tile(job, search.tile);
  place.position = choice(search.choices, search.taken);
  place.item = chain_items;
  if (place.position == search.choices.chain_end) {
    place.item = chain_end;
  } else if (place.position != search.choices.chain_begin) {
    const RowTile tile = row_tile(job, search.request, search.tile);
    const PlaceInChain in_chain = place_in_chain(job, tile, search.taken == 2 ? search.below : search.above);
    place.item += in_chain.item;
    place.token = in_chain.token;
    place.chain_items = chain_items;
    place.chain_end = chain_end;
    place.request = search.request;
    place.head = search.head;
    place.row_begin = tile.row_begin;
    place.row_end = tile.row_end;
  }
}

/// What one worker does of chains that are cut.
struct CutWork {
  int32_t work_tiles = 0;
  bool head_ends = false;  ///< it ends the chain that it begins within
  bool tail = false;       ///< it begins a chain that it does not end
  int32_t head_parts = 0;  ///< partial results of the chain it begins within
  int32_t head_rows = 0;   ///< rows of each
  int32_t tail_rows = 0;
  FOLIO_HOST_DEVICE WorkSums sums() const {
    return {.work_tiles = work_tiles,
            .partial_rows = head_parts * head_rows + tail_rows,
            .sources = head_parts + (tail ? 1 : 0),
            .merges = head_ends ? 1 : 0};
  }
};

FOLIO_HOST_DEVICE inline CutWork cut_work(const Job& job, int32_t worker) {
  const CutPlace& cut = job.scratch.places[worker];
  const CutPlace& stop = job.scratch.places[worker + 1];
  CutWork work;
  if (cut.position == stop.position) return work;
  const int32_t item_end = stop.item + (stop.token >= 0 ? 1 : 0);
  const bool same_chain = cut.inside() && cut.chain_items == stop.chain_items;
  work.work_tiles = item_end - cut.item;
  work.head_ends = cut.inside() && !same_chain;
  work.tail = stop.inside() && !same_chain;
  if (cut.inside()) {
    // At fixed splits each split after a cut is a result of its own.
    work.head_parts = job.fixed_splits() ? (same_chain ? item_end : cut.chain_end) - cut.item : 1;
    work.head_rows = cut.row_end - cut.row_begin;
  }
  if (work.tail) work.tail_rows = stop.row_end - stop.row_begin;
  return work;
}

struct AddWork {
  FOLIO_HOST_DEVICE WorkSums operator()(const WorkSums& a, const WorkSums& b) const {
    return {a.work_tiles + b.work_tiles, a.partial_rows + b.partial_rows, a.sources + b.sources, a.merges + b.merges};
  }
};

/// The sources of one worker's cut chains, and the merge of the chain that it ends.
FOLIO_HOST_DEVICE inline void emit_merges(const Job& job, int32_t worker, const CutWork& work, const WorkSums& total) {
  CutPlace& cut = job.scratch.places[worker];
  const WorkSums& before = cut.before;
  cut.tail_partial = before.partial_rows + work.head_parts * work.head_rows;
  cut.tail_merge = before.merges + (work.head_ends ? 1 : 0);
  FOLIO_KEEP_LOOP
  for (int32_t part = 0; part < work.head_parts; ++part) {
    job.combine_sources[before.sources + part] = before.partial_rows + part * work.head_rows;
  }
  const int32_t source_end = before.sources + work.head_parts;
  if (work.tail) job.combine_sources[source_end] = cut.tail_partial;
  if (!work.head_ends) return;
  // A merge's sources begin where the previous one's end, which is known here.
  CombineTile& merge = job.merges[before.merges];
  merge.kv_head = cut.head;
  merge.request = cut.request;
  merge.row_begin = cut.row_begin;
  merge.row_end = cut.row_end;
  merge.source_end = source_end;
  if (before.merges == 0) merge.source_begin = 0;
  if (before.merges + 1 < total.merges) job.merges[before.merges + 1].source_begin = source_end;
}

/// Numbers every worker's work tiles, partial rows and merges, and emits the merges. Returns the sums of all.
template <typename Group>
FOLIO_HOST_DEVICE WorkSums number_work(const Job& job, const WorkLine& line, Group& group) {
  CutPlace* const places = job.scratch.places;
  FOLIO_KEEP_LOOP
  for (int32_t w = group.rank(); w <= line.num_workers; w += group.size()) place_cut(job, line, w);
  group.sync();
  const Share share = share_of(group, line.num_workers);
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
    emit_merges(job, w, work, total);
    before = AddWork()(before, work.sums());
  }
  if (group.rank() == 0) job.worker_indptr[line.num_workers] = total.work_tiles;
  group.sync();
  return total;
}

/// Item number `index` of the plan.
FOLIO_HOST_DEVICE inline void emit_item(const Job& job, int32_t index) {
  const int32_t* const worker_indptr = job.worker_indptr;
  const int32_t worker =
      last_at_or_below(job.in.num_workers, index, [worker_indptr](int32_t w) { return worker_indptr[w]; });
  const CutPlace& cut = job.scratch.places[worker];
  const CutPlace& stop = job.scratch.places[worker + 1];
  const int32_t in_worker = index - worker_indptr[worker];
  const int32_t uncut = cut.item + in_worker;
  const bool first = in_worker == 0;
  const bool last = index + 1 == worker_indptr[worker + 1];
  const Chain chain = chain_of_item(job, uncut);
  const int32_t in_chain = uncut - chain.items_before;
  const RowTile tile = row_tile(job, chain.request, chain.tile);
  int32_t segment = 0;
  TokenRange keys = item_keys(job, tile, in_chain, segment);
  if (first && cut.token >= 0) keys.begin = cut.token;
  if (last && stop.token >= 0) keys.end = stop.token;
  const bool head = cut.chain_items == chain.items_before;
  const bool tail = !head && stop.chain_items == chain.items_before;
  bool starts = first || in_chain == 0;
  bool finishes = last || in_chain + 1 == items_of_tile(job, chain.tile);
  int32_t partial = -1;
  int32_t merge = -1;
  if (head && job.fixed_splits()) {
    starts = finishes = true;
    partial = cut.before.partial_rows + in_worker * tile.rows();
    merge = cut.before.merges;
  } else if (finishes && (head || tail)) {
    partial = head ? cut.before.partial_rows : cut.tail_partial;
    merge = head ? cut.before.merges : cut.tail_merge;
  }
  job.work_tiles[index] = {
      .segment = segment,
      .kv_row = chain.request,
      .kv_head = chain.head,
      .request = chain.request,
      .row_begin = tile.row_begin,
      .row_end = tile.row_end,
      .kv_begin = static_cast<int32_t>(keys.begin),
      .kv_end = static_cast<int32_t>(keys.end),
      .partial = partial,
      .flags = (starts ? kStart : 0u) | (finishes ? kFinish : 0u) | (job.fixed_splits() ? kFold : 0u),
      .merge = merge};
}

}  // namespace folio::inline v0::scheduler::device
