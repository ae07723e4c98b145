#pragma once

#include <cstdint>

#include "backends/token_pool/device/kv_indices_rule.hpp"
#include "folio/backends/token_pool/draft_kv_indices.hpp"
#include "folio/types/export.hpp"

/// Where branches of drafts lie in the request table and in the output: bodies for one branch at one step, which a
/// device kernel, a CTA a branch and step, runs too.
namespace folio::inline v0::backends::token_pool {

/// The position of a branch's first draft token in its request's row, which has `end` tokens. With pages of one token a
/// branch's pages are its num_steps slots; of one branch they go on where the request ends.
FOLIO_HOST_DEVICE constexpr int64_t branch_begin(const DraftBranches& branches, int64_t end, int32_t branch) {
  const int64_t last = end % branches.page_size;
  const int64_t pages = (last + branches.num_steps + branches.page_size - 1) / branches.page_size;
  return end - last + branch * pages * branches.page_size + last;
}

/// Entries of the branches before branch `branch` of request `request`, whose predecessors have `sum_before` tokens.
FOLIO_HOST_DEVICE constexpr int64_t branch_offset(const DraftBranches& branches, int64_t sum_before, int64_t len,
                                                  int32_t request, int32_t branch, int32_t step) {
  return branches.topk * (sum_before + int64_t{request} * step) + branch * (len + step);
}

/// The lists of a draft's steps, for B requests.
struct DraftIndicesJob {
  SlotTable table;
  const int32_t* rows = nullptr;
  const int32_t* lens = nullptr;
  const int32_t* starts = nullptr;  ///< or null
  int32_t num_requests = 0;
  DraftBranches branches;
  int32_t num_iterations = 0;
  int64_t num_slots = 0;  ///< of the pool; 0: slots are not looked at
  int32_t* indptr = nullptr;
  int64_t indptr_stride = 0;
  int32_t* indices = nullptr;
  int64_t indices_stride = 0;
  int64_t indices_size = 0;  ///< of all rows; the last may be cut short

  FOLIO_HOST_DEVICE constexpr int64_t start(int32_t r) const { return starts == nullptr ? 0 : starts[r]; }
  /// Tokens that lists count with: none where no row could have them.
  FOLIO_HOST_DEVICE constexpr int64_t counted_len(int32_t r) const {
    return lens[r] < 0 || lens[r] > table.num_columns ? 0 : lens[r];
  }
  /// Entries of the row of a step.
  FOLIO_HOST_DEVICE constexpr int64_t capacity(int32_t step) const {
    const int64_t left = indices_size - (step - 1) * indices_stride;
    const int64_t room = left < indices_stride ? left : indices_stride;
    return room < INT32_MAX ? room : INT32_MAX;
  }
};

/// All that can be said of a request without looking at slots.
FOLIO_HOST_DEVICE constexpr ListReport draft_fault(const DraftIndicesJob& job, int32_t r) {
  const int32_t row = job.rows[r];
  if (!job.table.has_row(row)) return {0, KvRangeFault::kRow, r, row, row, job.table.num_rows};
  if (job.lens[r] < 0) return {0, KvRangeFault::kLength, r, row, job.lens[r], 0};
  if (job.start(r) < 0) return {0, KvRangeFault::kStart, r, row, job.start(r), 0};
  const int64_t own = branch_begin(job.branches, job.start(r) + job.lens[r], job.branches.topk - 1);
  const int64_t end = own + job.num_iterations;
  const int64_t columns = job.table.columns_of(row);
  if (end > columns) return {0, KvRangeFault::kEnd, r, row, end, columns};
  return {};
}

/// A thread's share of one branch at one step, and where it begins; `sum_before` is counted_len of the requests before.
/// What cannot be listed is the dummy slot, as many as the list has otherwise, and told `report`; nothing is written
/// behind the row of the step.
template <typename Report>
FOLIO_HOST_DEVICE constexpr void write_draft_branch(const DraftIndicesJob& job, int64_t sum_before, int32_t r,
                                                    int32_t branch, int32_t step, int32_t lane, int32_t lanes,
                                                    Report&& report) {
  const int64_t len = job.counted_len(r);
  const int64_t capacity = job.capacity(step);
  const int64_t begin = branch_offset(job.branches, sum_before, len, r, branch, step);
  const int64_t count = begin + len + step <= capacity ? len + step : (begin < capacity ? capacity - begin : 0);
  int32_t* const indptr = job.indptr + (step - 1) * job.indptr_stride;
  int32_t* const out = job.indices + (step - 1) * job.indices_stride + begin;
  const ListReport found = draft_fault(job, r);
  const int32_t row = job.rows[r];
  if (lane == 0) {
    const int64_t place = int64_t{r} * job.branches.topk + branch;
    indptr[place] = static_cast<int32_t>(begin < capacity ? begin : capacity);
    if (r + 1 == job.num_requests && branch + 1 == job.branches.topk) {
      indptr[place + 1] = static_cast<int32_t>(begin < capacity ? begin + count : capacity);
    }
    if (found.fault != KvRangeFault::kNone) {
      report(found);
    } else if (count < len + step) {
      report(ListReport{0, KvRangeFault::kCapacity, r, row, begin + len + step, capacity});
    }
  }
  if (found.fault != KvRangeFault::kNone) {
    for (int64_t j = lane; j < count; j += lanes) out[j] = kDummySlot;
    return;
  }
  const int64_t start = job.start(r);
  const int64_t own = branch_begin(job.branches, start + len, branch);
  const auto list = [&](int64_t j, int64_t position) {
    const int32_t slot = job.table.at(row, position);
    const bool listed = job.num_slots == 0 || (slot >= 0 && slot < job.num_slots);
    if (!listed) report(ListReport{0, KvRangeFault::kSlot, r, row, position, slot});
    out[j] = listed ? slot : kDummySlot;
  };
  for (int64_t j = lane; j < len && j < count; j += lanes) list(j, start + j);
  for (int64_t j = len + lane; j < count; j += lanes) list(j, own + j - len);
}

}  // namespace folio::inline v0::backends::token_pool
