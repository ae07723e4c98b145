#pragma once

#include <cstddef>
#include <cstdint>

#include "scheduler/device/claims.hpp"
#include "scheduler/device/cuts.hpp"
#include "scheduler/device/emit.hpp"
#include "scheduler/device/job.hpp"
#include "scheduler/device/lengths.hpp"
#include "scheduler/device/order.hpp"
#include "scheduler/device/write_view.hpp"

namespace folio::inline v0::scheduler::device {

/// Divides a batch's work: everything of the image but the work tiles. Every member of the group calls it. Nothing
/// outside the image and the job's scratch is written, whatever the lengths are, except `sticky`, if it is not null,
/// where a request could not be planned.
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
    write_view(job, total, a_head.dynamic_tiles * heads, group);
    return;
  }
  choose_cuts(job, space, group);
  write_view(job, number_work(job, space, group), 0, group);
}

/// Makes the work tiles of a batch that schedule_batch has divided, whose scratch the job has (and the combine tiles,
/// where work tiles are claimed): every member of the group, or of several, one in `step`.
FOLIO_HOST_DEVICE inline void emit_work_tiles(const Job& job, int32_t first, int32_t step) {
  if (job.dynamic()) {
    const RowTileSplits& all = job.scratch.dynamic_tiles[job.num_row_tiles()];
    const int64_t num_work_tiles = int64_t{all.dynamic_tiles + all.continuations} * job.in.num_kv_heads;
    FOLIO_KEEP_LOOP
    for (int64_t i = first; i < num_work_tiles; i += step) emit_dynamic_tile(job, static_cast<int32_t>(i));
    return;
  }
  const int64_t num_work_tiles = job.worker_indptr[job.in.num_workers];
  FOLIO_KEEP_LOOP
  for (int64_t i = first; i < num_work_tiles; i += step) emit_item(job, static_cast<int32_t>(i));
}

}  // namespace folio::inline v0::scheduler::device
