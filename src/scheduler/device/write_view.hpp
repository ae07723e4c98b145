#pragma once

#include <cstdint>

#include "scheduler/device/job.hpp"

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

/// What is known of a plan before it is made: all but the counts of tokens and of what it consists of.
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
  return view;
}

/// The image's header and segments: everything but the work itself.
template <typename Group>
FOLIO_HOST_DEVICE void write_view(const Job& job, const WorkSums& total, int32_t num_dynamic_tiles, Group& group) {
  FOLIO_KEEP_LOOP
  for (int32_t s = group.rank(); s < job.in.num_segments; s += group.size()) job.segments[s] = segment_lengths(job, s);
  if (group.rank() != 0) return;
  PlanView view = outline(job);
  view.num_tokens = job.cu_q[job.in.num_requests];
  view.num_work_tiles = total.work_tiles;
  view.num_dynamic_tiles = num_dynamic_tiles;
  view.num_combine_tiles = total.combine_tiles;
  view.num_partial_rows = total.partial_rows;
  job.header->view = view;
  job.header->num_combine_sources = total.sources;
}

}  // namespace folio::inline v0::scheduler::device
