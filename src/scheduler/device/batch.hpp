#pragma once

#include <cstdint>

#include "scheduler/device/inputs.hpp"

/// Reads a batch's lengths on the device, whatever they are. Afterwards the image holds lengths that planning and
/// kernels can rely on; no later phase reads the caller's arrays.
namespace folio::inline v0::scheduler::device {

inline constexpr int64_t kMaxInt32 = 0x7fffffff;
inline constexpr int64_t kMinInt32 = -kMaxInt32 - 1;

struct Maximum {
  FOLIO_HOST_DEVICE int32_t operator()(int32_t a, int32_t b) const { return a > b ? a : b; }
};

/// Over some requests: their row tiles, and the lowest request at fault.
struct RequestSums {
  int32_t row_tiles;
  int32_t at_fault;
};
struct AddTiles {
  FOLIO_HOST_DEVICE int32_t operator()(int32_t a, int32_t b) const { return a + b; }
};
struct AddRequests {
  FOLIO_HOST_DEVICE RequestSums operator()(const RequestSums& a, const RequestSums& b) const {
    return {a.row_tiles + b.row_tiles, a.at_fault < b.at_fault ? a.at_fault : b.at_fault};
  }
};

/// cu_q[i] as it was given: read_query_indptr reads the caller's array once.
FOLIO_HOST_DEVICE inline int32_t given_cu_q(const Job& job, int32_t i) {
  return job.scratch.tile_begin[i];
}

/// cu_q[request + 1], corrected. An entry outside the batch becomes 0, which changes no maximum. A last entry that is
/// too large becomes num_tokens.
FOLIO_HOST_DEVICE inline int32_t believable_end(const Job& job, int32_t request) {
  const PlanInput& in = job.in;
  const int32_t end = given_cu_q(job, request + 1);
  if (end < 0) return 0;
  if (end <= in.num_tokens) return end;
  return request + 1 == in.num_requests ? in.num_tokens : 0;
}

/// Writes an ascending cu_q: each entry is the largest corrected one so far. What was given stays in the scratch, in
/// the place of tile_begin, until read_requests has compared it.
template <typename Group>
FOLIO_HOST_DEVICE void read_query_indptr(const Job& job, Group& group) {
  const Share share = share_of(group, job.in.num_requests);
  int32_t largest = 0;
  FOLIO_KEEP_LOOP
  for (int32_t r = share.begin; r < share.end; ++r) {
    job.scratch.tile_begin[r + 1] = job.in.cu_q[r + 1];
    largest = Maximum()(largest, believable_end(job, r));
  }
  if (group.rank() == 0 && job.in.num_requests > 0) job.scratch.tile_begin[0] = job.in.cu_q[0];
  int32_t total = 0;
  largest = group.exclusive_scan(largest, int32_t{0}, Maximum(), total);
  FOLIO_KEEP_LOOP
  for (int32_t r = share.begin; r < share.end; ++r) {
    largest = Maximum()(largest, believable_end(job, r));
    job.cu_q[r + 1] = largest;
  }
  if (group.rank() == 0) job.cu_q[0] = 0;
  group.sync();
}

FOLIO_HOST_DEVICE inline int32_t to_int32(int64_t value) {
  return static_cast<int32_t>(clamp_to(value, kMinInt32, kMaxInt32));
}

/// Where the image has request r's lengths of segment s.
FOLIO_HOST_DEVICE inline int64_t length_at(const PlanInput& in, int32_t s, int32_t r) {
  return int64_t{s} * in.num_requests + r;
}

/// Copies the request's lengths to the image, with each segment's first position. The caller's arrays are read here
/// only: one that changes while it is planned is found by its copy, or not at all.
FOLIO_HOST_DEVICE inline void copy_lengths(const Job& job, int32_t r) {
  const PlanInput& in = job.in;
  int64_t end = 0;
  FOLIO_KEEP_LOOP
  for (int32_t s = 0; s < in.num_segments; ++s) {
    const Segment& segment = in.segments[s];
    const int32_t kv_len = segment.kv_len[r];
    const int32_t first_pos = segment.first_pos != nullptr ? segment.first_pos[r] : to_int32(end);
    job.kv_len[length_at(in, s, r)] = kv_len;
    job.first_pos[length_at(in, s, r)] = first_pos;
    end = int64_t{first_pos} + kv_len;
  }
}

/// Checks what the host scheduler checks, in the same order, of the image's copies. The request's queries are
/// [q_begin, q_end).
FOLIO_HOST_DEVICE inline PlanStatus check_request(const Job& job, int32_t r, int32_t q_begin, int32_t q_end,
                                                  int64_t& first_query) {
  const PlanInput& in = job.in;
  const int64_t given_first_query = in.q_first_pos != nullptr ? in.q_first_pos[r] : 0;  // loads before branches
  const int32_t given_end = given_cu_q(job, r + 1);
  if (given_cu_q(job, r) != q_begin || given_end != q_end) return {PlanProblem::kIndptr, r, -1, given_end};
  const int64_t q_len = int64_t{q_end} - q_begin;
  if (q_len > in.max_q_len) return {PlanProblem::kQueries, r, -1, to_int32(q_len)};
  int64_t keys = 0;
  int64_t end = 0;
  FOLIO_KEEP_LOOP
  for (int32_t s = 0; s < in.num_segments; ++s) {
    const int32_t kv_len = job.kv_len[length_at(in, s, r)];
    const int64_t first_pos = job.first_pos[length_at(in, s, r)];
    if (kv_len < 0) return {PlanProblem::kKeys, r, s, kv_len};
    const int64_t last = kv_len == 0 ? 0 : shard_offset(in.segments[s].shard, kv_len - 1);
    if (first_pos + last >= kMaxInt32) return {PlanProblem::kPositions, r, s, to_int32(first_pos)};
    keys += kv_len;
    end = first_pos + kv_len;
  }
  if (keys > in.max_kv_len) return {PlanProblem::kKeys, r, -1, to_int32(keys)};
  first_query = in.q_first_pos != nullptr ? given_first_query : end - q_len;
  if (first_query + q_len > kMaxInt32 || first_query < kMinInt32) {
    return {PlanProblem::kPositions, r, -1, to_int32(first_query)};
  }
  return {};
}

/// Gives request r no keys in the image.
FOLIO_HOST_DEVICE inline void clear_lengths(const Job& job, int32_t r) {
  FOLIO_KEEP_LOOP
  for (int32_t s = 0; s < job.in.num_segments; ++s) {
    job.kv_len[length_at(job.in, s, r)] = 0;
    job.first_pos[length_at(job.in, s, r)] = 0;
  }
}

/// Writes a fault for the host to find, unless it has not read the last one yet. It sees the problem only once the
/// rest is there.
FOLIO_HOST_DEVICE inline void publish(const PlanStatus& fault, PlanStatus* sticky) {
  volatile PlanStatus& out = *sticky;
  if (out.problem != PlanProblem::kNone) return;
  out.request = fault.request;
  out.segment = fault.segment;
  out.value = fault.value;
#if defined(__CUDA_ARCH__)
  __threadfence_system();
#endif
  out.problem = fault.problem;
}

FOLIO_HOST_DEVICE inline int32_t row_tiles_of(const Job& job, int32_t request) {
  const int32_t rows = (job.cu_q[request + 1] - job.cu_q[request]) * job.in.group_size;
  if (rows < job.in.min_rows || rows > job.in.max_rows) return 0;
  return rows / job.in.tile.rows + (rows % job.in.tile.rows != 0 ? 1 : 0);
}

/// Writes what every query sees, once all positions are known. The caller's arrays have any values.
template <typename Group>
FOLIO_HOST_DEVICE void find_visible_positions(const Job& job, const Group& group) {
  const int32_t* const cu_q = job.cu_q;
  const int32_t tokens = cu_q[job.in.num_requests];
  FOLIO_KEEP_LOOP
  for (int32_t token = group.rank(); token < tokens; token += group.size()) {
    const int32_t r = last_at_or_below(job.in.num_requests, token, [cu_q](int32_t i) { return cu_q[i]; });
    store_visible_positions(job.in.rules, query_mask(job.in.masks, r, token),
                            int64_t{job.q_first_pos[r]} + (token - cu_q[r]),
                            job.visible_positions + 2 * int64_t{token});
  }
}

/// Writes all lengths and the status of the lowest request at fault. Counts the row tiles before each request.
template <typename Group>
FOLIO_HOST_DEVICE void read_requests(const Job& job, Group& group, PlanStatus* sticky) {
  const PlanInput& in = job.in;
  const Share share = share_of(group, in.num_requests);
  PlanStatus first_fault;
  RequestSums sums{0, in.num_requests};
  FOLIO_KEEP_LOOP
  for (int32_t r = share.begin; r < share.end; ++r) {
    int64_t first_query = 0;
    copy_lengths(job, r);
    const PlanStatus status = check_request(job, r, job.cu_q[r], job.cu_q[r + 1], first_query);
    const bool planned = status.problem == PlanProblem::kNone;
    if (!planned && sums.at_fault == in.num_requests) {
      first_fault = status;
      sums.at_fault = r;
    }
    if (!planned) clear_lengths(job, r);
    job.q_first_pos[r] = planned ? static_cast<int32_t>(first_query) : 0;
    sums.row_tiles += row_tiles_of(job, r);
  }
  RequestSums total{};
  int32_t before = group.exclusive_scan(sums, RequestSums{0, in.num_requests}, AddRequests(), total).row_tiles;
  FOLIO_KEEP_LOOP
  for (int32_t r = share.begin; r < share.end; ++r) {
    job.scratch.tile_begin[r] = before;
    before += row_tiles_of(job, r);
  }
  if (sums.at_fault < in.num_requests && sums.at_fault == total.at_fault) {
    job.header->status = first_fault;
    if (sticky != nullptr) publish(first_fault, sticky);
  }
  if (group.rank() == 0) {
    job.scratch.tile_begin[in.num_requests] = total.row_tiles;
    if (total.at_fault == in.num_requests) job.header->status = PlanStatus{};
  }
  if (job.visible_positions != nullptr) find_visible_positions(job, group);
  group.sync();
}

}  // namespace folio::inline v0::scheduler::device
