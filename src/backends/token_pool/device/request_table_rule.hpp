#pragma once

#include <cstdint>

#include "backends/token_pool/device/kv_indices_rule.hpp"
#include "backends/token_pool/device/list_report.hpp"
#include "folio/types/export.hpp"

/// Writing new tokens' slots into the request table, one request at a time: constexpr, so that the host checks and
/// writes by the rule of a kernel, a column of CTAs a request.
namespace folio::inline v0::backends::token_pool {

/// A batch's new slots, the requests' one after the other.
struct TableWriteJob {
  int32_t* table = nullptr;  ///< [num_rows, num_columns]
  int32_t num_rows = 0;
  int32_t num_columns = 0;
  const int32_t* rows = nullptr;   ///< [B]
  const int32_t* first = nullptr;  ///< [B], the first position written; or null: `ends` has those behind the last
  const int32_t* ends = nullptr;
  const int32_t* lens = nullptr;  ///< [B], slots; or null: `tokens_per_request`
  int32_t tokens_per_request = 1;
  int32_t num_requests = 0;
  const int32_t* offsets = nullptr;  ///< [B], where each request's slots begin; or null: sums of `taken`
  const int32_t* slots = nullptr;    ///< or null: `wide_slots`
  const int64_t* wide_slots = nullptr;
  int64_t num_slots = 0;  ///< that are given

  FOLIO_HOST_DEVICE constexpr int64_t len(int32_t r) const { return lens == nullptr ? tokens_per_request : lens[r]; }
  /// Slots that the request takes of those given.
  FOLIO_HOST_DEVICE constexpr int64_t taken(int32_t r) const { return len(r) < 0 ? 0 : len(r); }
  FOLIO_HOST_DEVICE constexpr int64_t begin(int32_t r) const {
    return first != nullptr ? int64_t{first[r]} : ends[r] - len(r);
  }
  FOLIO_HOST_DEVICE constexpr int64_t slot(int64_t i) const {
    return slots != nullptr ? int64_t{slots[i]} : wide_slots[i];
  }
};

/// What is wrong with a request whose slots begin at `offset`; nothing with padding, which writes nothing.
FOLIO_HOST_DEVICE constexpr ListReport write_fault(const TableWriteJob& job, int32_t r, int64_t offset) {
  const int32_t row = job.rows[r];
  const int64_t len = job.len(r);
  if (len < 0) return {0, KvRangeFault::kLength, r, row, len, 0};
  if (row == kPaddingRow) return {};
  if (row < 0 || row >= job.num_rows) return {0, KvRangeFault::kRow, r, row, row, job.num_rows};
  if (job.begin(r) < 0) return {0, KvRangeFault::kWriteStart, r, row, job.begin(r), 0};
  const int64_t end = job.begin(r) + len;
  if (end > job.num_columns) return {0, KvRangeFault::kWriteEnd, r, row, end, job.num_columns};
  if (offset + len > job.num_slots) return {0, KvRangeFault::kWriteSlots, r, row, offset + len, job.num_slots};
  return {};
}

FOLIO_HOST_DEVICE constexpr bool is_slot(int64_t slot) {
  return slot >= INT32_MIN && slot <= INT32_MAX;
}

/// Writes a thread's share of a request's slots; only after write_fault found nothing. One that 32 bits do not hold is
/// left out, and told `report`.
template <typename Report>
FOLIO_HOST_DEVICE constexpr void write_slots(const TableWriteJob& job, int32_t r, int64_t offset, int32_t lane,
                                             int32_t lanes, Report&& report) {
  const int32_t row = job.rows[r];
  if (row == kPaddingRow) return;
  const int64_t begin = job.begin(r);
  const int64_t len = job.len(r);
  int32_t* const out = job.table + int64_t{row} * job.num_columns + begin;
  for (int64_t j = lane; j < len; j += lanes) {
    const int64_t slot = job.slot(offset + j);
    if (is_slot(slot)) {
      out[j] = static_cast<int32_t>(slot);
    } else {
      report(ListReport{0, KvRangeFault::kWriteSlot, r, row, begin + j, slot});
    }
  }
}

/// One request where nothing can be thrown: one that cannot be written is left out.
template <typename Report>
FOLIO_HOST_DEVICE constexpr void write_request(const TableWriteJob& job, int32_t r, int64_t offset, int32_t lane,
                                               int32_t lanes, Report&& report) {
  const ListReport found = write_fault(job, r, offset);
  if (found.fault == KvRangeFault::kNone) {
    write_slots(job, r, offset, lane, lanes, report);
  } else if (lane == 0) {
    report(found);
  }
}

}  // namespace folio::inline v0::backends::token_pool
