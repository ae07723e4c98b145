#include "folio/backends/token_pool/kv_indices.hpp"

#include "backends/token_pool/device/kv_indices_rule.hpp"
#include "backends/token_pool/gpu.hpp"
#include "backends/token_pool/request_table.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends {
namespace {

using core::fail;
using core::kMaxInt32;
using core::require;
using token_pool::check_count;
using token_pool::KvIndicesJob;
using token_pool::KvRangeFault;
using token_pool::window_start;

void check_page_size(int32_t page_size) {
  require(page_size >= 1, "page_size is ", page_size, "; it must be 1 or more");
}

[[noreturn]] void fail_range(const KvIndicesJob& job, int32_t r, KvRangeFault fault) {
  const auto refuse = [r](const auto&... parts) { fail(ErrorCode::kInvalidArgument, "request ", r, parts...); };
  switch (fault) {
    case KvRangeFault::kRow: token_pool::fail_row(job.table, r, job.rows[r]);
    case KvRangeFault::kLength: refuse(" has length ", job.lens[r], "; it must not be negative"); break;
    case KvRangeFault::kStart: refuse(" starts at position ", job.start(r), "; it must not be negative"); break;
    case KvRangeFault::kAlignment:
      refuse(" starts at position ", job.start(r), "; pages of ", job.page_size, " tokens start at its multiples");
      break;
    case KvRangeFault::kEnd: token_pool::fail_end(job.table, r, job.rows[r], job.end(r));
    case KvRangeFault::kOffset:
      refuse(" has entries [", job.indptr[r], ", ", job.indptr[r + 1], ") of kv_indptr; ", job.lens[r],
             " tokens with page_size ", job.page_size, " are ", job.num_entries(r), ", from 0 or more on");
      break;
    case KvRangeFault::kCapacity:
      refuse(" has entries up to ", job.indptr[r + 1], " of kv_indptr; kv_indices has ", job.capacity);
      break;
    default: break;
  }
  fail(ErrorCode::kInternal, "a request's range has an unknown fault");
}

[[noreturn]] void fail_entry(const KvIndicesJob& job, int32_t r, int64_t entry, KvRangeFault fault) {
  const int64_t first = job.start(r) + entry * job.page_size;
  const int64_t past = std::min(first + job.page_size, job.end(r));
  const int32_t row = job.rows[r];
  if (fault == KvRangeFault::kSlot) {
    const int64_t slot = job.table.at(row, first);
    const bool first_is_wrong = slot < 0 || slot >= job.num_slots;
    token_pool::fail_slot(job.table, r, row, first_is_wrong ? first : past - 1, job.num_slots);
  }
  fail(ErrorCode::kInvalidArgument, "request ", r, " has slots ", job.table.at(row, first), " to ",
       job.table.at(row, past - 1), " at positions ", first, " to ", past - 1, " of row ", row,
       "; they are not the begin of a page of ", job.page_size, " slots");
}

void check_slots(const KvIndicesJob& job, int32_t request) {
  if (job.num_slots == 0 && job.page_size == 1) return;
  const int64_t count = job.num_entries(request);
  for (int64_t j = 0; j < count; ++j) {
    const KvRangeFault fault = entry_fault(job, request, j);
    if (fault != KvRangeFault::kNone) [[unlikely]] {
      fail_entry(job, request, j, fault);
    }
  }
}

struct Range {
  int64_t begin;
  int64_t end;
};

/// Fills lens and starts with range_of(request), which checks its request; two passes, so that a fault in the last
/// request leaves the first one's output alone.
template <typename RangeOf>
void fill_ranges(size_t num_requests, int32_t window_left, int32_t page_size, std::span<int32_t> lens,
                 std::span<int32_t> starts, RangeOf&& range_of) {
  check_page_size(page_size);
  require(window_left >= -1, "window_left is ", window_left, "; it must be -1 (no window) or more");
  const auto count = static_cast<int64_t>(num_requests);
  check_count("lens", static_cast<int64_t>(lens.size()), count);
  check_count("starts", static_cast<int64_t>(starts.size()), count);
  for (size_t r = 0; r < num_requests; ++r) range_of(r);
  for (size_t r = 0; r < num_requests; ++r) {
    const Range range = range_of(r);
    lens[r] = static_cast<int32_t>(range.end - range.begin);
    starts[r] = static_cast<int32_t>(range.begin);
  }
}

}  // namespace

namespace {

/// What sizes say is checked.
KvIndicesJob indices_job(const KvIndicesArgs& args, std::span<int32_t> kv_indices) {
  check_page_size(args.page_size);
  require(args.num_slots >= 0, "num_slots is ", args.num_slots, "; it must not be negative");
  const auto num_requests = core::checked_cast<int32_t>(args.req_pool_indices.size());
  check_count("paged_kernel_lens", static_cast<int64_t>(args.paged_kernel_lens.size()), num_requests);
  if (!args.kv_start_idx.empty()) {
    check_count("kv_start_idx", static_cast<int64_t>(args.kv_start_idx.size()), num_requests);
  }
  require(args.kv_indptr.size() > args.req_pool_indices.size(), "kv_indptr has ", args.kv_indptr.size(),
          " entries for ", num_requests, " requests; it must have one more than requests");
  KvIndicesJob job;
  job.table = token_pool::slot_table(args.req_to_token);
  job.rows = args.req_pool_indices.data();
  job.lens = args.paged_kernel_lens.data();
  job.indptr = args.kv_indptr.data();
  job.starts = args.kv_start_idx.empty() ? nullptr : args.kv_start_idx.data();
  job.page_size = args.page_size;
  job.num_slots = args.num_slots;
  job.out = kv_indices.data();
  job.capacity = static_cast<int64_t>(kv_indices.size());
  return job;
}

}  // namespace

void create_kv_indices(const KvIndicesArgs& args, std::span<int32_t> kv_indices) {
  const KvIndicesJob job = indices_job(args, kv_indices);
  const auto num_requests = static_cast<int32_t>(args.req_pool_indices.size());
  for (int32_t r = 0; r < num_requests; ++r) {
    const KvRangeFault fault = range_fault(job, r);
    if (fault != KvRangeFault::kNone) [[unlikely]] {
      fail_range(job, r, fault);
    }
    check_slots(job, r);
  }
  for (int32_t r = 0; r < num_requests; ++r) write_entries(job, r, 0, 1);
}

void create_kv_indices(const KvIndicesArgs& args, std::span<int32_t> kv_indices, DeviceFaults& faults, Stream stream) {
  if (faults.device().type == DeviceType::kCpu) {
    create_kv_indices(args, kv_indices);
    return;
  }
  const KvIndicesJob job = indices_job(args, kv_indices);
  token_pool::gpu::create_kv_indices(faults.device().index, job, static_cast<int32_t>(args.req_pool_indices.size()),
                                     faults.report(), stream);
}

int32_t kv_indptr_from_lens(std::span<const int32_t> lens, int32_t page_size, std::span<int32_t> indptr) {
  check_page_size(page_size);
  require(indptr.size() > lens.size(), "indptr has ", indptr.size(), " entries for ", lens.size(),
          " requests; it must have one more than requests");
  int64_t total = 0;
  for (size_t r = 0; r < lens.size(); ++r) {
    require(lens[r] >= 0, "request ", r, " has length ", lens[r], "; it must not be negative");
    total += core::ceil_div(lens[r], page_size);
    require(total <= kMaxInt32, "requests 0 to ", r, " have ", total, " entries; indptr holds up to ", kMaxInt32);
  }
  indptr[0] = 0;
  for (size_t r = 0; r < lens.size(); ++r) indptr[r + 1] = indptr[r] + core::ceil_div(lens[r], page_size);
  return static_cast<int32_t>(total);
}

void window_kv_ranges(std::span<const int32_t> seq_lens, std::span<const int32_t> prefix_lens, int32_t window_left,
                      int32_t page_size, std::span<int32_t> lens, std::span<int32_t> starts) {
  if (!prefix_lens.empty()) {
    check_count("prefix_lens", static_cast<int64_t>(prefix_lens.size()), static_cast<int64_t>(seq_lens.size()));
  }
  fill_ranges(seq_lens.size(), window_left, page_size, lens, starts, [&](size_t r) {
    const int32_t seq_len = seq_lens[r];
    require(seq_len >= 0, "request ", r, " has length ", seq_len, "; it must not be negative");
    // A request without keys is padding; its query, if it has one, sees nothing.
    const int64_t first_query = prefix_lens.empty() ? int64_t{seq_len} - 1 : prefix_lens[r];
    require(prefix_lens.empty() || (first_query >= 0 && first_query <= seq_len), "request ", r, " has a prefix of ",
            first_query, " tokens; it must be in [0, ", seq_len, "], its length");
    return Range{window_start(first_query, window_left, page_size), seq_len};
  });
}

void window_prefix_ranges(std::span<const int32_t> prefix_lens, int32_t window_left, int32_t page_size,
                          std::span<int32_t> lens, std::span<int32_t> starts) {
  fill_ranges(prefix_lens.size(), window_left, page_size, lens, starts, [&](size_t r) {
    require(prefix_lens[r] >= 0, "request ", r, " has a prefix of ", prefix_lens[r],
            " tokens; it must not be negative");
    return Range{window_start(prefix_lens[r], window_left, page_size), prefix_lens[r]};
  });
}

}  // namespace folio::inline v0::backends
