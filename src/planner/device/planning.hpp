#pragma once

#include <cstddef>
#include <cstdint>

#include "planner/device/claims.hpp"
#include "planner/device/cuts.hpp"
#include "planner/device/emit.hpp"
#include "planner/device/job.hpp"
#include "planner/device/lengths.hpp"
#include "planner/device/order.hpp"

namespace folio::inline v0::planner::device {

/// The image's header and segments: everything but the work itself.
template <typename Group>
FOLIO_HOST_DEVICE void write_view(const Job& job, const WorkSums& total, int32_t num_claims, Group& group) {
  const PlanInput& in = job.in;
  FOLIO_KEEP_LOOP
  for (int32_t s = group.rank(); s < in.num_segments; s += group.size()) {
    const int64_t first = int64_t{s} * in.num_requests;
    job.segments[s] = {.source = in.segments[s].source,
                       .mask = in.segments[s].mask,
                       .shard = in.segments[s].shard,
                       .shared = false,
                       .num_rows = in.num_requests,
                       .kv_len = job.kv_len + first,
                       .first_pos = job.first_pos + first,
                       .row_of_request = nullptr,
                       .key_offset = nullptr};
  }
  if (group.rank() != 0) return;
  PlanView view;
  view.num_requests = in.num_requests;
  view.num_tokens = job.cu_q[in.num_requests];
  view.num_segments = in.num_segments;
  view.num_workers = in.num_workers;
  view.num_items = total.items;
  view.num_claims = num_claims;
  view.num_merges = total.merges;
  view.num_partial_rows = total.partial_rows;
  view.cu_q = job.cu_q;
  view.q_first_pos = job.q_first_pos;
  view.segments = job.segments;
  view.worker_indptr = job.claimed() ? nullptr : job.worker_indptr;
  view.items = job.items;
  view.merges = job.merges;
  view.merge_sources = job.merge_sources;
  job.header->view = view;
  job.header->num_merge_sources = total.sources;
}

/// Divides a batch's work: everything of the image but the items. Every member of the group calls it. Nothing outside
/// the image and the job's scratch is written, whatever the lengths are, except `sticky`, if it is not null, where a
/// request could not be planned.
template <typename Group>
FOLIO_HOST_DEVICE void divide_batch(const Job& job, PlanStatus* sticky, Group& group) {
  read_query_indptr(job, group);
  read_requests(job, group, sticky);
  const Dearest dearest = job.dearest_first() ? order_requests(job, group) : Dearest{};
  const WorkLine line = sum_row_tiles(job, group);
  if (job.claimed()) {
    const ClaimSums a_head = divide_claims(job, line, dearest, group);
    const int32_t heads = job.in.num_kv_heads;
    const WorkSums total{.items = (a_head.claims + a_head.followers) * heads,
                         .partial_rows = static_cast<int32_t>(a_head.partial_rows) * heads,
                         .sources = a_head.sources * heads,
                         .merges = a_head.merges * heads};
    write_view(job, total, a_head.claims * heads, group);
    return;
  }
  choose_cuts(job, line, group);
  write_view(job, number_work(job, line, group), 0, group);
}

/// Makes the items of a batch that divide_batch has divided, whose scratch the job has (and the merges, where items are
/// claimed): every member of the group, or of several, one in `step`.
FOLIO_HOST_DEVICE inline void emit_items(const Job& job, int32_t first, int32_t step) {
  if (job.claimed()) {
    const ClaimPlace& all = job.scratch.claims[job.num_row_tiles()];
    const int64_t num_items = int64_t{all.claims + all.followers} * job.in.num_kv_heads;
    FOLIO_KEEP_LOOP
    for (int64_t i = first; i < num_items; i += step) emit_claimed_item(job, static_cast<int32_t>(i));
    return;
  }
  const int64_t num_items = job.worker_indptr[job.in.num_workers];
  FOLIO_KEEP_LOOP
  for (int64_t i = first; i < num_items; i += step) emit_item(job, static_cast<int32_t>(i));
}

}  // namespace folio::inline v0::planner::device
