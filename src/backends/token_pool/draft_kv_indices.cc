#include "folio/backends/token_pool/draft_kv_indices.hpp"

#include "backends/token_pool/device/draft_indices_rule.hpp"
#include "backends/token_pool/gpu.hpp"
#include "backends/token_pool/request_table.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends {
namespace {

using core::checked_add;
using core::checked_mul;
using core::kMaxInt32;
using core::require;
using token_pool::branch_begin;
using token_pool::check_count;
using token_pool::DraftIndicesJob;
using token_pool::KvRangeFault;
using token_pool::ListReport;

constexpr int32_t kMostStepsOnGpu = 65535;  ///< CTAs in the second dimension of a grid

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

void check_slots(const DraftIndicesJob& job, int32_t r, int64_t begin, int64_t count) {
  const int32_t row = job.rows[r];
  for (int64_t position = begin; position < begin + count; ++position) {
    const int32_t slot = job.table.at(row, position);
    if (slot < 0 || slot >= job.num_slots) [[unlikely]] {
      token_pool::fail_slot(job.table, r, row, position, job.num_slots);
    }
  }
}

void check_request(const DraftIndicesJob& job, int32_t r) {
  const ListReport found = draft_fault(job, r);
  switch (found.fault) {
    case KvRangeFault::kRow: token_pool::fail_row(job.table, r, found.row);
    case KvRangeFault::kEnd: token_pool::fail_end(job.table, r, found.row, found.value);
    default: break;
  }
  require(found.fault != KvRangeFault::kLength, "request ", r, " has length ", found.value,
          "; it must not be negative");
  require(found.fault != KvRangeFault::kStart, "request ", r, " starts at position ", found.value,
          "; it must not be negative");
  if (job.num_slots == 0) return;
  const int64_t start = job.start(r), len = job.lens[r];
  check_slots(job, r, start, len);
  for (int32_t k = 0; k < job.branches.topk; ++k) {
    check_slots(job, r, branch_begin(job.branches, start + len, k), job.num_iterations);
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

namespace {

/// A call's arguments; what sizes say is checked.
DraftIndicesJob draft_job(const DraftKvIndicesArgs& args, const DraftKvIndices& out) {
  DraftIndicesJob job;
  job.num_requests = core::checked_cast<int32_t>(args.req_pool_indices.size());
  check_arrays(args, job.num_requests);
  job.table = token_pool::slot_table(args.req_to_token);
  job.rows = args.req_pool_indices.data();
  job.lens = args.paged_kernel_lens.data();
  job.starts = args.kv_start_idx.empty() ? nullptr : args.kv_start_idx.data();
  job.branches = args.branches;
  job.num_iterations = args.num_iterations;
  job.num_slots = args.num_slots;
  job.indptr = out.kv_indptr.data();
  job.indptr_stride = out.kv_indptr_stride;
  job.indices = out.kv_indices.data();
  job.indices_stride = out.kv_indices_stride;
  job.indices_size = static_cast<int64_t>(out.kv_indices.size());
  return job;
}

/// `sum_lens`: as far as the host knows.
void check_output(const DraftIndicesJob& job, const DraftKvIndices& out, int64_t sum_lens) {
  const int32_t steps = job.num_iterations;
  check_rows("kv_indptr", out.kv_indptr.size(), job.indptr_stride, steps,
             int64_t{job.num_requests} * job.branches.topk + 1);
  check_rows("kv_indices", out.kv_indices.size(), job.indices_stride, steps,
             draft_kv_indices_len(sum_lens, job.num_requests, job.branches, steps));
}

}  // namespace

void generate_draft_decode_kv_indices(const DraftKvIndicesArgs& args, const DraftKvIndices& out) {
  DraftIndicesJob job = draft_job(args, out);
  int64_t sum_lens = 0;
  for (int32_t r = 0; r < job.num_requests; ++r) {
    check_request(job, r);
    sum_lens += job.lens[r];
  }
  if (job.num_iterations == 0) return;
  check_output(job, out, sum_lens);
  job.num_slots = 0;  // they have been looked at
  for (int32_t t = 1; t <= job.num_iterations; ++t) {
    if (job.num_requests == 0) job.indptr[(t - 1) * job.indptr_stride] = 0;
    int64_t sum_before = 0;
    for (int32_t r = 0; r < job.num_requests; ++r) {
      for (int32_t k = 0; k < job.branches.topk; ++k) {
        write_draft_branch(job, sum_before, r, k, t, 0, 1, [](const ListReport& /*found*/) {});
      }
      sum_before += job.counted_len(r);
    }
  }
}

void generate_draft_decode_kv_indices(const DraftKvIndicesArgs& args, const DraftKvIndices& out, DeviceFaults& faults,
                                      Stream stream) {
  if (faults.device().type == DeviceType::kCpu) {
    generate_draft_decode_kv_indices(args, out);
    return;
  }
  const DraftIndicesJob job = draft_job(args, out);
  if (job.num_iterations == 0) return;
  require(job.num_iterations <= kMostStepsOnGpu, "num_iterations is ", job.num_iterations, "; a GPU fills up to ",
          kMostStepsOnGpu, " steps in a call");
  check_output(job, out, 0);
  token_pool::gpu::generate_draft_kv_indices(faults.device().index, job, faults.report(), stream);
}

}  // namespace folio::inline v0::backends
