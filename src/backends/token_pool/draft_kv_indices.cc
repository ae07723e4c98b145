#include "folio/backends/token_pool/draft_kv_indices.hpp"

#include <limits>

#include "backends/token_pool/device/draft_indices_rule.hpp"
#include "backends/token_pool/request_table.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends {
namespace {

using core::checked_add;
using core::checked_mul;
using core::require;
using token_pool::branch_begin;
using token_pool::branch_offset;
using token_pool::check_count;
using token_pool::SlotTable;

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

void check_branches(const DraftBranches& branches) {
  require(branches.topk >= 1 && branches.num_steps >= 1 && branches.page_size >= 1, "topk is ", branches.topk,
          ", num_steps ", branches.num_steps, ", page_size ", branches.page_size, "; each must be at least 1");
  // A bound on what branches add to a row, so that positions of any request are far from overflowing.
  const bool own_pages = branches.topk > 1 && branches.page_size > 1;
  const int64_t columns = branches.num_steps + (own_pages ? 2 * int64_t{branches.page_size} : 0);
  require(checked_mul(int64_t{branches.topk}, columns) <= kMaxInt32, branches.topk, " branches of up to ", columns,
          " positions; all branches of a request must fit into ", kMaxInt32);
}

int64_t countable(int64_t entries) {
  require(entries <= kMaxInt32, entries, " entries in a step; indptr counts up to ", kMaxInt32);
  return entries;
}

/// One call's arguments, checked.
struct Draft {
  explicit Draft(const DraftKvIndicesArgs& given)
      : args(given), table(token_pool::slot_table(given.req_to_token)), branches(given.branches) {}

  int64_t start(size_t r) const { return args.kv_start_idx.empty() ? 0 : args.kv_start_idx[r]; }
  int64_t len(size_t r) const { return args.paged_kernel_lens[r]; }

  const DraftKvIndicesArgs& args;
  SlotTable table;
  DraftBranches branches;
};

void check_slots(const Draft& draft, size_t r, int64_t begin, int64_t count) {
  const int32_t row = draft.args.req_pool_indices[r];
  for (int64_t position = begin; position < begin + count; ++position) {
    const int32_t slot = draft.table.at(row, position);
    if (slot < 0 || slot >= draft.args.num_slots) [[unlikely]] {
      token_pool::fail_slot(draft.table, static_cast<int64_t>(r), row, position, draft.args.num_slots);
    }
  }
}

void check_request(const Draft& draft, size_t r) {
  const int32_t row = draft.args.req_pool_indices[r];
  const int64_t start = draft.start(r), len = draft.len(r);
  if (!draft.table.has_row(row)) token_pool::fail_row(draft.table, static_cast<int64_t>(r), row);
  require(len >= 0, "request ", r, " has length ", len, "; it must not be negative");
  require(start >= 0, "request ", r, " starts at position ", start, "; it must not be negative");
  const int32_t steps = draft.args.num_iterations;
  const int64_t end = branch_begin(draft.branches, start + len, draft.branches.topk - 1) + steps;
  if (end > draft.table.columns_of(row)) token_pool::fail_end(draft.table, static_cast<int64_t>(r), row, end);
  if (draft.args.num_slots == 0) return;
  check_slots(draft, r, start, len);
  for (int32_t k = 0; k < draft.branches.topk; ++k) {
    check_slots(draft, r, branch_begin(draft.branches, start + len, k), steps);
  }
}

void check_rows(const char* name, size_t size, int64_t stride, int64_t rows, int64_t needed) {
  require(stride >= needed, name, "_stride is ", stride, "; a row of this batch has ", needed, " entries");
  // The last row may be cut short.
  const int64_t end = checked_add(checked_mul(stride, rows - 1), needed);
  require(static_cast<int64_t>(size) >= end, name, " has ", size, " entries; ", rows, " rows of ", stride,
          ", the last of them with ", needed, ", need ", end);
}

void check_arrays(const DraftKvIndicesArgs& args, int64_t num_requests) {
  check_branches(args.branches);
  require(args.num_iterations >= 0 && args.num_iterations <= args.branches.num_steps, "num_iterations is ",
          args.num_iterations, "; it must be in [0, ", args.branches.num_steps, "], num_steps");
  require(args.num_slots >= 0, "num_slots is ", args.num_slots, "; it must not be negative");
  check_count("paged_kernel_lens", static_cast<int64_t>(args.paged_kernel_lens.size()), num_requests);
  if (!args.kv_start_idx.empty()) {
    check_count("kv_start_idx", static_cast<int64_t>(args.kv_start_idx.size()), num_requests);
  }
}

}  // namespace

int64_t draft_kv_indices_len(int64_t sum_lens, int32_t batch_size, const DraftBranches& branches, int32_t step) {
  check_branches(branches);
  require(sum_lens >= 0 && batch_size >= 0, "sum_lens is ", sum_lens, ", batch_size ", batch_size,
          "; they must not be negative");
  require(step >= 1 && step <= branches.num_steps, "step is ", step, "; it must be in [1, ", branches.num_steps,
          "], num_steps");
  const int64_t tokens = checked_add(sum_lens, checked_mul(int64_t{batch_size}, int64_t{step}));
  return countable(checked_mul(tokens, int64_t{branches.topk}));
}

int64_t draft_kv_indices_capacity(int32_t max_batch_size, const DraftBranches& branches, int32_t max_context_len) {
  check_branches(branches);
  require(max_batch_size >= 0 && max_context_len >= 0, "max_batch_size is ", max_batch_size, ", max_context_len ",
          max_context_len, "; they must not be negative");
  return countable(checked_mul(int64_t{max_batch_size}, int64_t{branches.topk}, int64_t{max_context_len}));
}

int64_t draft_row_columns(int32_t len, const DraftBranches& branches) {
  check_branches(branches);
  require(len >= 0, "len is ", len, "; it must not be negative");
  return branch_begin(branches, len, branches.topk - 1) + branches.num_steps;
}

void generate_draft_decode_kv_indices(const DraftKvIndicesArgs& args, const DraftKvIndices& out) {
  const auto num_requests = core::checked_cast<int32_t>(args.req_pool_indices.size());
  check_arrays(args, num_requests);
  const Draft draft(args);
  const int32_t topk = args.branches.topk;
  int64_t sum_lens = 0;
  for (size_t r = 0; r < args.req_pool_indices.size(); ++r) {
    check_request(draft, r);
    sum_lens += draft.len(r);
  }
  const int32_t steps = args.num_iterations;
  if (steps == 0) return;
  check_rows("kv_indptr", out.kv_indptr.size(), out.kv_indptr_stride, steps, int64_t{num_requests} * topk + 1);
  check_rows("kv_indices", out.kv_indices.size(), out.kv_indices_stride, steps,
             draft_kv_indices_len(sum_lens, num_requests, args.branches, steps));
  for (int32_t t = 1; t <= steps; ++t) {
    int32_t* const indptr = out.kv_indptr.data() + (t - 1) * out.kv_indptr_stride;
    int32_t* const indices = out.kv_indices.data() + (t - 1) * out.kv_indices_stride;
    int64_t sum_before = 0;
    for (int32_t r = 0; r < num_requests; ++r) {
      const auto request = static_cast<size_t>(r);
      for (int32_t k = 0; k < topk; ++k) {
        const int64_t offset = branch_offset(args.branches, sum_before, draft.len(request), r, k, t);
        indptr[int64_t{r} * topk + k] = static_cast<int32_t>(offset);
        write_branch(draft.table, args.branches, args.req_pool_indices[request], draft.start(request),
                     draft.len(request), k, t, indices + offset, 0, 1);
      }
      sum_before += draft.len(request);
    }
    indptr[int64_t{num_requests} * topk] =
        static_cast<int32_t>(draft_kv_indices_len(sum_lens, num_requests, args.branches, t));
  }
}

}  // namespace folio::inline v0::backends
