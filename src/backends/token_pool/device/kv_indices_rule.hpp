#pragma once

#include <cstdint>

#include "backends/token_pool/device/list_report.hpp"
#include "folio/types/export.hpp"

/// Gathering from the request table: what may be read, what is read, where it goes. Constexpr bodies for one request at
/// a time, so that a device kernel, a CTA a request, runs what the host runs; `lane` of `lanes` is a thread's
/// share of a request's entries.
namespace folio::inline v0::backends::token_pool {

/// Padding requests read this row, whose positions all have the dummy slot (ReqToTokenPool): with pages, the dummy
/// page.
inline constexpr int32_t kPaddingRow = 0;
inline constexpr int32_t kDummySlot = 0;

/// A dense table of slots. 64-bit addressing: a table may have more than 2^31 entries.
struct SlotTable {
  const int32_t* slots = nullptr;  ///< of row 0
  int64_t row_stride = 0;
  int64_t num_columns = 0;  ///< that a row has for itself
  int64_t num_entries = 0;  ///< addressable from `slots`: the last row may be cut short
  int32_t num_rows = 0;

  FOLIO_HOST_DEVICE constexpr int32_t at(int32_t row, int64_t position) const {
    return slots[row * row_stride + position];
  }
  FOLIO_HOST_DEVICE constexpr bool has_row(int32_t row) const { return row >= 0 && row < num_rows; }
  /// Positions of a row that exist: [0, columns_of(row)).
  FOLIO_HOST_DEVICE constexpr int64_t columns_of(int32_t row) const {
    const int64_t left = num_entries - row * row_stride;
    return left < 0 ? 0 : (left < num_columns ? left : num_columns);
  }
};

/// Building one list of entries per request.
struct KvIndicesJob {
  SlotTable table;
  const int32_t* rows = nullptr;
  const int32_t* lens = nullptr;
  const int32_t* indptr = nullptr;
  const int32_t* starts = nullptr;  ///< or null
  int32_t page_size = 1;
  int64_t num_slots = 0;  ///< 0: not checked
  int32_t* out = nullptr;
  int64_t capacity = 0;

  FOLIO_HOST_DEVICE constexpr int64_t start(int32_t request) const { return starts == nullptr ? 0 : starts[request]; }
  FOLIO_HOST_DEVICE constexpr int64_t end(int32_t request) const { return start(request) + lens[request]; }
  FOLIO_HOST_DEVICE constexpr int64_t num_entries(int32_t request) const {
    return (int64_t{lens[request]} + page_size - 1) / page_size;
  }
};

/// All that can be said without looking at slots.
FOLIO_HOST_DEVICE constexpr KvRangeFault range_fault(const KvIndicesJob& job, int32_t request) {
  const int32_t row = job.rows[request];
  if (!job.table.has_row(row)) return KvRangeFault::kRow;
  if (job.lens[request] < 0) return KvRangeFault::kLength;
  if (job.start(request) < 0) return KvRangeFault::kStart;
  if (job.start(request) % job.page_size != 0) return KvRangeFault::kAlignment;
  if (job.end(request) > job.table.columns_of(row)) return KvRangeFault::kEnd;
  const int64_t begin = job.indptr[request];
  if (begin < 0 || job.indptr[request + 1] - begin != job.num_entries(request)) return KvRangeFault::kOffset;
  if (job.indptr[request + 1] > job.capacity) return KvRangeFault::kCapacity;
  return KvRangeFault::kNone;
}

/// Whether the slots behind entry `entry` are what they should be. Only after range_fault found nothing.
FOLIO_HOST_DEVICE constexpr KvRangeFault entry_fault(const KvIndicesJob& job, int32_t request, int64_t entry) {
  const int32_t row = job.rows[request];
  const int64_t first = job.start(request) + entry * job.page_size;
  const int64_t past = first + job.page_size < job.end(request) ? first + job.page_size : job.end(request);
  const int64_t slot = job.table.at(row, first);
  const int64_t last_slot = job.table.at(row, past - 1);
  if (job.num_slots > 0 && (slot < 0 || slot >= job.num_slots || last_slot < 0 || last_slot >= job.num_slots)) {
    return KvRangeFault::kSlot;
  }
  if (job.page_size == 1) return KvRangeFault::kNone;
  if (row == kPaddingRow && slot == kDummySlot && last_slot == kDummySlot)
    return KvRangeFault::kNone;  // the dummy page
  if (slot < 0 || slot % job.page_size != 0 || last_slot - slot != past - 1 - first) return KvRangeFault::kPage;
  return KvRangeFault::kNone;
}

/// Writes a thread's share of a request's entries. Only after range_fault found nothing.
FOLIO_HOST_DEVICE constexpr void write_entries(const KvIndicesJob& job, int32_t request, int32_t lane, int32_t lanes) {
  const int32_t row = job.rows[request];
  const int64_t start = job.start(request);
  const int64_t count = job.num_entries(request);
  int32_t* const out = job.out + job.indptr[request];
  if (job.page_size == 1) {
    for (int64_t j = lane; j < count; j += lanes) out[j] = job.table.at(row, start + j);
  } else {
    for (int64_t j = lane; j < count; j += lanes) out[j] = job.table.at(row, start + j * job.page_size) / job.page_size;
  }
}

/// Threads' share of entries [begin, end): the dummy page.
FOLIO_HOST_DEVICE constexpr void write_dummy_page(const KvIndicesJob& job, int64_t begin, int64_t end, int32_t lane,
                                                  int32_t lanes) {
  for (int64_t j = begin + lane; j < end; j += lanes) job.out[j] = kDummySlot;
}

/// As write_entries. What is no page of the pool becomes the dummy page, and is told `report`.
template <typename Report>
FOLIO_HOST_DEVICE constexpr void write_checked_entries(const KvIndicesJob& job, int32_t request, int32_t lane,
                                                       int32_t lanes, Report&& report) {
  const int32_t row = job.rows[request];
  const int64_t count = job.num_entries(request);
  int32_t* const out = job.out + job.indptr[request];
  for (int64_t j = lane; j < count; j += lanes) {
    const KvRangeFault fault = entry_fault(job, request, j);
    const int64_t position = job.start(request) + j * job.page_size;
    const int32_t slot = job.table.at(row, position);
    if (fault != KvRangeFault::kNone) report(ListReport{0, fault, request, row, position, slot});
    out[j] = fault == KvRangeFault::kNone ? slot / job.page_size : kDummySlot;
  }
}

/// What is wrong with a request, and with which numbers. range_fault's.
FOLIO_HOST_DEVICE constexpr ListReport range_report(const KvIndicesJob& job, int32_t request, KvRangeFault fault) {
  ListReport found{0, fault, request, job.rows[request], 0, 0};
  switch (fault) {
    case KvRangeFault::kRow: found.value = found.row, found.bound = job.table.num_rows; break;
    case KvRangeFault::kLength: found.value = job.lens[request]; break;
    case KvRangeFault::kStart: found.value = job.start(request); break;
    case KvRangeFault::kAlignment: found.value = job.start(request), found.bound = job.page_size; break;
    case KvRangeFault::kEnd: found.value = job.end(request), found.bound = job.table.columns_of(found.row); break;
    case KvRangeFault::kOffset:
      found.value = int64_t{job.indptr[request + 1]} - job.indptr[request], found.bound = job.num_entries(request);
      break;
    case KvRangeFault::kCapacity: found.value = job.indptr[request + 1], found.bound = job.capacity; break;
    default: break;
  }
  return found;
}

/// One request of create_kv_indices where nothing can be thrown: a request that cannot be served has the dummy page
/// wherever its entries would be, as far as the output goes.
template <typename Report>
FOLIO_HOST_DEVICE constexpr void create_entries(const KvIndicesJob& job, int32_t request, int32_t lane, int32_t lanes,
                                                Report&& report) {
  const KvRangeFault fault = range_fault(job, request);
  if (fault == KvRangeFault::kNone) {
    write_checked_entries(job, request, lane, lanes, report);
    return;
  }
  if (lane == 0) report(range_report(job, request, fault));
  const int64_t begin = job.indptr[request] < 0 ? 0 : job.indptr[request];
  const int64_t end = job.indptr[request + 1] < job.capacity ? job.indptr[request + 1] : job.capacity;
  write_dummy_page(job, begin, end, lane, lanes);
}

/// The first position that a query at `position` sees, at a page's begin.
FOLIO_HOST_DEVICE constexpr int64_t window_start(int64_t position, int32_t window_left, int32_t page_size) {
  if (window_left < 0 || position <= window_left) return 0;
  return (position - window_left) / page_size * page_size;
}

}  // namespace folio::inline v0::backends::token_pool
