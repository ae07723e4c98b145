#pragma once

#include <cstdint>

#include "scheduler/device/batch.hpp"
#include "scheduler/device/dynamic_scheduler.hpp"
#include "scheduler/device/inputs.hpp"
#include "scheduler/device/static_scheduler.hpp"
#include "scheduler/device/tile_space.hpp"

/// Entry points of the device scheduler: schedule_batch, then emit_work_tiles.
namespace folio::inline v0::scheduler::device {

FOLIO_HOST_DEVICE inline SegmentLengths segment_lengths(const Job& job, int32_t s) {
  const PlanInput& in = job.in;
  const int64_t first = int64_t{s} * in.num_requests;
  return {.source = in.segments[s].source,
          .mask = in.segments[s].mask,
          .shard = in.segments[s].shard,
          .shared = false,
          .num_rows = in.num_requests,
          .kv_len = job.kv_len + first,
          .first_pos = job.first_pos + first,
          .row_of_request = nullptr,
          .key_offset = nullptr};
}

/// The parts of a plan's view that are known before planning: all but the counts.
FOLIO_HOST_DEVICE inline PlanView outline(const Job& job) {
  PlanView view;
  view.num_requests = job.in.num_requests;
  view.num_segments = job.in.num_segments;
  view.num_workers = job.in.num_workers;
  view.cu_q = job.cu_q;
  view.q_first_pos = job.q_first_pos;
  view.segments = job.segments;
  view.worker_indptr = job.dynamic() ? nullptr : job.worker_indptr;
  view.work_tiles = job.work_tiles;
  view.combine_tiles = job.combine_tiles;
  view.combine_sources = job.combine_sources;
  view.visible_positions = job.visible_positions;
  return view;
}

/// Writes the image's header and segments.
template <typename Group>
FOLIO_HOST_DEVICE void write_view(const Job& job, const WorkSums& total, int32_t num_dynamic_tiles, int64_t work_cost,
                                  Group& group) {
  FOLIO_KEEP_LOOP
  for (int32_t s = group.rank(); s < job.in.num_segments; s += group.size()) job.segments[s] = segment_lengths(job, s);
  if (group.rank() != 0) return;
  PlanView view = outline(job);
  view.num_tokens = job.cu_q[job.in.num_requests];
  view.num_work_tiles = total.work_tiles;
  view.num_dynamic_tiles = num_dynamic_tiles;
  view.num_combine_tiles = total.combine_tiles;
  view.num_partial_rows = total.partial_rows;
  view.work_cost = work_cost;
  job.header->view = view;
  job.header->num_combine_sources = total.sources;
}

/// Divides a batch's work: writes everything of the image but the work tiles. Every member of the group calls it. It
/// writes only the image and the job's scratch, whatever the lengths are, and `sticky`, if not null, where a request
/// could not be planned.
template <typename Group>
FOLIO_HOST_DEVICE void schedule_batch(const Job& job, PlanStatus* sticky, Group& group) {
  read_query_indptr(job, group);
  read_requests(job, group, sticky);
  const LongestTile longest = job.lpt() ? lpt_order(job, group) : LongestTile{};
  const TileSpace space = sum_row_tiles(job, group);
  if (job.dynamic()) {
    const DynamicSums a_head = split_row_tiles(job, space, longest, group);
    const int32_t heads = job.in.num_kv_heads;
    const WorkSums total{.work_tiles = (a_head.dynamic_tiles + a_head.continuations) * heads,
                         .partial_rows = static_cast<int32_t>(a_head.partial_rows) * heads,
                         .sources = a_head.sources * heads,
                         .combine_tiles = a_head.combine_tiles * heads};
    write_view(job, total, a_head.dynamic_tiles * heads, space.total, group);
    return;
  }
  choose_cuts(job, space, group);
  write_view(job, number_work(job, space, group), 0, 0, group);
}

/// Emits the work tiles of a batch that schedule_batch has divided, from its scratch; in a dynamic schedule also the
/// combine tiles. The calling threads take every `step`-th work tile, from `first` on.
FOLIO_HOST_DEVICE inline void emit_work_tiles(const Job& job, int32_t first, int32_t step) {
  if (job.dynamic()) {
    const RowTileSplits& all = job.scratch.tile_splits[job.num_row_tiles()];
    const int64_t num_work_tiles = int64_t{all.dynamic_tiles + all.continuations} * job.in.num_kv_heads;
    FOLIO_KEEP_LOOP
    for (int64_t i = first; i < num_work_tiles; i += step) emit_dynamic_tile(job, static_cast<int32_t>(i));
    return;
  }
  const int64_t num_work_tiles = job.worker_indptr[job.in.num_workers];
  FOLIO_KEEP_LOOP
  for (int64_t i = first; i < num_work_tiles; i += step) emit_static_tile(job, static_cast<int32_t>(i));
}

}  // namespace folio::inline v0::scheduler::device
