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
FOLIO_HOST_DEVICE void divide_batch(const Job& job, PlanStatus* sticky, Group& group) {
  read_query_indptr(job, group);
  read_requests(job, group, sticky);
  const Dearest dearest = job.dearest_first() ? order_requests(job, group) : Dearest{};
  const WorkLine line = sum_row_tiles(job, group);
  if (job.claimed()) {
    const ClaimSums a_head = divide_claims(job, line, dearest, group);
    const int32_t heads = job.in.num_kv_heads;
    const WorkSums total{.work_tiles = (a_head.claims + a_head.followers) * heads,
                         .partial_rows = static_cast<int32_t>(a_head.partial_rows) * heads,
                         .sources = a_head.sources * heads,
                         .merges = a_head.merges * heads};
    write_view(job, total, a_head.claims * heads, group);
    return;
  }
  choose_cuts(job, line, group);
  write_view(job, number_work(job, line, group), 0, group);
}

/// Makes the work tiles of a batch that divide_batch has divided, whose scratch the job has (and the merges, where work
/// tiles are claimed): every member of the group, or of several, one in `step`.
FOLIO_HOST_DEVICE inline void emit_items(const Job& job, int32_t first, int32_t step) {
  if (job.claimed()) {
    const ClaimPlace& all = job.scratch.claims[job.num_row_tiles()];
    const int64_t num_work_tiles = int64_t{all.claims + all.followers} * job.in.num_kv_heads;
    FOLIO_KEEP_LOOP
    for (int64_t i = first; i < num_work_tiles; i += step) emit_claimed_item(job, static_cast<int32_t>(i));
    return;
  }
  const int64_t num_work_tiles = job.worker_indptr[job.in.num_workers];
  FOLIO_KEEP_LOOP
  for (int64_t i = first; i < num_work_tiles; i += step) emit_item(job, static_cast<int32_t>(i));
}

}  // namespace folio::inline v0::scheduler::device
