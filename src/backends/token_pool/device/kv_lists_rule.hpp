#pragma once

#include <cstdint>

#include "backends/token_pool/device/kv_indices_rule.hpp"
#include "backends/token_pool/device/kv_range_rule.hpp"
#include "folio/types/export.hpp"

/// A wrapper's lists on a device, a request at a time: what is read for it, and what cannot be. Constexpr, so that the
/// host's tests run what a kernel runs.
namespace folio::inline v0::backends::token_pool {

/// What a plan was made from on the host, [R] each on the device: lists hold just these tokens, whatever the device's
/// lengths say.
struct PlannedRanges {
  const int32_t* cu_q = nullptr;  ///< [R + 1]
  const int32_t* lens = nullptr;  ///< null: plans are made from the device's lengths
  const int32_t* first_pos = nullptr;
  const int32_t* table_starts = nullptr;
};

/// The lists of a wrapper, from lengths on the device: what KvLists::build does on the host.
struct ListsJob {
  KvRangeJob ranges;
  PlannedRanges planned;
  SlotTable table;
  const int32_t* rows = nullptr;             ///< [R], of the table
  const int32_t* given_kv_indptr = nullptr;  ///< lists that exist already: only lengths are taken from them
  int64_t seq_lens_sum = -1;                 ///< what the device's seq_lens must add up to; -1: unknown
  int64_t num_slots = 0;                     ///< of the pool; 0: unknown
  int32_t* cu_q = nullptr;                   ///< [R + 1]
  int32_t* kv_indptr = nullptr;              ///< [R + 1]; null: not written
  int32_t* kv_last_page_len = nullptr;       ///< [R]; null: not written
  int32_t* kv_lens = nullptr;                ///< [R]
  int32_t* whole_lens = nullptr;             ///< [R], over ranks: keys on all of them; null: not written
  int32_t* first_pos = nullptr;              ///< [R]
  int32_t* table_starts = nullptr;           ///< [R]; kNoRow: the request's entries are the dummy page
  int32_t* kv_indices = nullptr;
  int64_t capacity = 0;          ///< entries of kv_indices; those beyond are not written
  ListReport* report = nullptr;  ///< null: nothing is reported
};

inline constexpr int32_t kNoRow = -1;

/// What a request's list has.
struct ListedRange {
  KvRange range;
  ListReport found;
};

/// What is wrong with where a range lies.
FOLIO_HOST_DEVICE constexpr ListReport place_fault(const ListsJob& job, int32_t r, const KvRange& range) {
  ListReport found;
  found.request = r;
  const auto fault = [&found](KvRangeFault what, int64_t value, int64_t bound) {
    found.fault = what;
    found.value = value;
    found.bound = bound;
    return found;
  };
  if (range.len < 0 || range.first_pos < 0 || range.q_len < 0) return fault(KvRangeFault::kLength, range.len, 0);
  if (job.given_kv_indptr != nullptr) {
    const int32_t end = job.given_kv_indptr[r + 1];
    if (job.planned.lens != nullptr || (end >= range.len && end <= job.capacity)) return found;
    return fault(KvRangeFault::kCapacity, end, job.capacity);
  }
  found.row = job.rows[r];
  if (range.table_start < 0) return fault(KvRangeFault::kStart, range.table_start, 0);
  if (range.table_start % job.ranges.page_size != 0) {
    return fault(KvRangeFault::kAlignment, range.table_start, job.ranges.page_size);
  }
  if (!job.table.has_row(found.row)) return fault(KvRangeFault::kRow, found.row, job.table.num_rows);
  const int64_t end = int64_t{range.table_start} + range.len;
  const int64_t columns = job.table.columns_of(found.row);
  return end > columns ? fault(KvRangeFault::kEnd, end, columns) : found;
}

/// A request that cannot be served has no keys; or, where a plan has been made already, as many as the plan says, all
/// of the dummy page: its queries see nothing of other requests.
FOLIO_HOST_DEVICE constexpr ListedRange listed_range(const ListsJob& job, int32_t r) {
  ListedRange listed;
  KvRange& range = listed.range;
  if (job.given_kv_indptr != nullptr) {
    range.q_len = 1;
    range.len = job.given_kv_indptr[r + 1] - job.given_kv_indptr[r];
  } else {
    range = kv_range(job.ranges, r);
  }
  const bool planned = job.planned.lens != nullptr;
  const KvRange found = range;
  if (planned) {
    range.q_len = job.planned.cu_q[r + 1] - job.planned.cu_q[r];
    range.len = job.planned.lens[r];
    range.first_pos = job.planned.first_pos[r];
    range.table_start = job.planned.table_starts[r];
  }
  listed.found = place_fault(job, r, range);
  if (listed.found.fault != KvRangeFault::kNone) {
    if (planned) {
      range.table_start = kNoRow;
    } else {
      range.q_len = range.q_len < 0 ? 0 : range.q_len;
      range.len = range.whole_len = range.first_pos = range.table_start = 0;
    }
  } else if (planned && (found.q_len != range.q_len || found.len != range.len || found.first_pos != range.first_pos ||
                         found.table_start != range.table_start)) {
    listed.found.fault = KvRangeFault::kHostLengths;
    listed.found.value = found.len;
    listed.found.bound = range.len;
  }
  return listed;
}

/// Writes a thread's share of a request's entries, as write_checked_entries.
template <typename Report>
FOLIO_HOST_DEVICE constexpr void write_listed(const ListsJob& job, int32_t r, int32_t lane, int32_t lanes,
                                              Report&& report) {
  KvIndicesJob entries;
  entries.table = job.table;
  entries.rows = job.rows;
  entries.lens = job.kv_lens;
  entries.indptr = job.kv_indptr;
  entries.starts = job.table_starts;
  entries.page_size = job.ranges.page_size;
  entries.num_slots = job.num_slots;
  entries.out = job.kv_indices;
  if (job.table_starts[r] < 0) {
    write_dummy_page(entries, entries.indptr[r], entries.indptr[r] + entries.num_entries(r), lane, lanes);
  } else {
    write_checked_entries(entries, r, lane, lanes, report);
  }
}

}  // namespace folio::inline v0::backends::token_pool
