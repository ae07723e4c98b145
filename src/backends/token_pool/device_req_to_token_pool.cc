#include "folio/backends/token_pool/device_req_to_token_pool.hpp"

#include <cstring>
#include <string>
#include <vector>

#include "backends/common/context_memory.hpp"
#include "backends/common/gpu_memory.hpp"
#include "backends/token_pool/device/request_table_rule.hpp"
#include "backends/token_pool/gpu.hpp"
#include "backends/token_pool/list_report.hpp"
#include "backends/token_pool/request_table.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends {
namespace {

using core::require;
using token_pool::KvRangeFault;
using token_pool::ListReport;
using token_pool::StagedArrays;
using token_pool::TableWriteJob;

/// What sizes say of a batch's arrays.
TableWriteJob batch_job(const ReqToTokenWrites& writes) {
  TableWriteJob job;
  job.num_requests = core::checked_cast<int32_t>(writes.req_pool_indices.size());
  const auto count = static_cast<int64_t>(job.num_requests);
  require(count == 0 || writes.first.empty() != writes.ends.empty(), "first has ", writes.first.size(),
          " entries and ends ", writes.ends.size(), "; one of them is given");
  require(writes.slots.empty() || writes.out_cache_loc.empty(), "slots has ", writes.slots.size(),
          " entries and out_cache_loc ", writes.out_cache_loc.size(), "; one of them is given");
  token_pool::check_count(writes.ends.empty() ? "first" : "ends",
                          static_cast<int64_t>(writes.first.size() + writes.ends.size()), count);
  if (!writes.lens.empty()) token_pool::check_count("lens", static_cast<int64_t>(writes.lens.size()), count);
  require(writes.tokens_per_request >= 0, "tokens_per_request is ", writes.tokens_per_request,
          "; it must not be negative");
  require(writes.lens.empty() || writes.tokens_per_request == 1, "lens is given, and tokens_per_request is ",
          writes.tokens_per_request, "; one of them says how many slots a request has");
  job.rows = writes.req_pool_indices.data();
  job.first = writes.ends.empty() ? writes.first.data() : nullptr;
  job.ends = writes.ends.data();
  job.lens = writes.lens.empty() ? nullptr : writes.lens.data();
  job.tokens_per_request = writes.tokens_per_request;
  job.slots = writes.out_cache_loc.empty() ? writes.slots.data() : nullptr;
  job.wide_slots = writes.out_cache_loc.data();
  job.num_slots = static_cast<int64_t>(writes.slots.size() + writes.out_cache_loc.size());
  return job;
}

std::string name_of(const Device& device) {
  return device.type == DeviceType::kCpu ? "the CPU" : core::message("CUDA device ", device.index);
}

void check_total(int64_t taken, int64_t given) {
  require(taken == given, given, " slots are given; the requests' lengths add up to ", taken);
}

}  // namespace

struct DeviceReqToTokenPool::State {
  State(const Context& context, int32_t max_reqs, int32_t max_context_len, ReqToTokenPool* copied)
      : where(context.device()), rows(max_reqs), host(copied), columns(max_context_len), memory(where) {
    require(columns >= 1, "max_context_len is ", columns, "; it must be 1 or more");
    const int64_t entries = core::checked_mul(int64_t{max_reqs} + 1, int64_t{columns});
    bytes = static_cast<size_t>(core::checked_mul(entries, int64_t{sizeof(int32_t)}));
    if (on_gpu()) stages = token_pool::gpu::make_stages(where.index);
    if (!has_table()) return;
    memory.reserve(bytes);
    if (!on_gpu()) {
      std::memset(memory.data(), 0, bytes);
    } else if (host != nullptr) {
      gpu::copy_to_device(where.index, memory.data(), host->table().indices, bytes);
    }
  }

  bool on_gpu() const { return where.type != DeviceType::kCpu; }
  /// Not where the host's is the only one.
  bool has_table() const { return on_gpu() || host == nullptr; }

  TableWriteJob on_table(TableWriteJob job) {
    job.table = memory.as<int32_t>();
    job.num_rows = rows.size() + 1;
    job.num_columns = columns;
    return job;
  }

  void check_held(int32_t row) const {
    if (host == nullptr) {
      rows.check_held(row);
    } else if (!host->is_held(row)) {
      host->write(row, 0, {});  // says what is wrong
    }
  }

  /// Checks every request of a batch on the host; its slots' begin, [B] and the total.
  void check(const TableWriteJob& job) {
    offsets.assign(static_cast<size_t>(job.num_requests) + 1, 0);
    int64_t total = 0;
    for (int32_t r = 0; r < job.num_requests; ++r) {
      if (job.rows[r] != token_pool::kPaddingRow) check_held(job.rows[r]);
      const ListReport found = write_fault(job, r, total);
      if (found.fault != KvRangeFault::kNone) core::fail(ErrorCode::kInvalidArgument, describe(found));
      const bool reads_wide = job.wide_slots != nullptr && job.rows[r] != token_pool::kPaddingRow;  // padding: skipped
      for (int64_t j = 0; reads_wide && j < job.len(r); ++j) {
        const int64_t slot = job.slot(total + j);
        require(token_pool::is_slot(slot), "request ", r, " has slot ", slot, "; slots have 32 bits");
      }
      total += job.taken(r);
      offsets[static_cast<size_t>(r) + 1] = core::checked_cast<int32_t>(total);
    }
    check_total(total, job.num_slots);
  }

  /// A checked batch, from the host.
  void write(const TableWriteJob& job, Stream stream) {
    std::byte* const stage = on_gpu() ? stages->take(staged_bytes(job), stream) : nullptr;
    if (host != nullptr) write_host_pool(job);
    if (stage != nullptr) {
      token_pool::gpu::write_request_table(where.index, staged(job, stage), nullptr, stream);
      stages->used(stream);
    } else if (has_table()) {
      for (int32_t r = 0; r < job.num_requests; ++r) {
        write_slots(job, r, offsets[static_cast<size_t>(r)], 0, 1, [](const ListReport& /*found*/) {});
      }
    }
  }

  void write_host_pool(const TableWriteJob& job) {
    for (int32_t r = 0; r < job.num_requests; ++r) {
      if (job.rows[r] == token_pool::kPaddingRow) continue;
      const int64_t begin = offsets[static_cast<size_t>(r)];
      narrow.clear();
      for (int64_t j = 0; j < job.len(r); ++j) narrow.push_back(static_cast<int32_t>(job.slot(begin + j)));
      host->write(job.rows[r], static_cast<int32_t>(job.begin(r)), narrow);
    }
  }

  static size_t staged_bytes(const TableWriteJob& job) {
    const auto requests = static_cast<size_t>(job.num_requests), slots = static_cast<size_t>(job.num_slots);
    return (4 * requests + slots) * sizeof(int32_t) + 5 * StagedArrays::kAlignment;
  }

  /// The batch as a kernel reads it in page-locked memory.
  TableWriteJob staged(const TableWriteJob& job, std::byte* stage) const {
    // How many there are, so not negative: gcc is told, and does not warn of the copies.
    const size_t requests = static_cast<uint32_t>(job.num_requests);
    StagedArrays arrays(stage);
    TableWriteJob moved = job;
    moved.rows = arrays.add(std::span(job.rows, requests));
    const std::span<int32_t> first = arrays.room<int32_t>(requests), lens = arrays.room<int32_t>(requests);
    for (int32_t r = 0; r < job.num_requests; ++r) {
      first[static_cast<size_t>(r)] = static_cast<int32_t>(job.begin(r));
      lens[static_cast<size_t>(r)] = static_cast<int32_t>(job.len(r));
    }
    moved.first = first.data();
    moved.lens = lens.data();
    moved.offsets = arrays.add(std::span<const int32_t>(offsets).first(requests));
    const std::span<int32_t> slots = arrays.room<int32_t>(static_cast<size_t>(job.num_slots));
    for (int64_t i = 0; i < job.num_slots; ++i) slots[static_cast<size_t>(i)] = static_cast<int32_t>(job.slot(i));
    moved.slots = slots.data();
    return moved;
  }

  Device where;
  RequestRows rows;      ///< where there is no host pool
  ReqToTokenPool* host;  ///< whose copy this is; or null
  int32_t columns;
  size_t bytes = 0;
  ContextMemory memory;
  std::unique_ptr<token_pool::HostStages> stages;  ///< of a GPU
  std::vector<int32_t> offsets, narrow;            ///< of the present call
};

DeviceReqToTokenPool::DeviceReqToTokenPool(const Context& context, int32_t max_reqs, int32_t max_context_len)
    : state_(std::make_unique<State>(context, max_reqs, max_context_len, nullptr)) {}

DeviceReqToTokenPool::DeviceReqToTokenPool(const Context& context, ReqToTokenPool& host)
    : state_(std::make_unique<State>(context, host.size(), host.max_context_len(), &host)) {}

DeviceReqToTokenPool::~DeviceReqToTokenPool() = default;
DeviceReqToTokenPool::DeviceReqToTokenPool(DeviceReqToTokenPool&&) noexcept = default;
DeviceReqToTokenPool& DeviceReqToTokenPool::operator=(DeviceReqToTokenPool&&) noexcept = default;

int32_t DeviceReqToTokenPool::size() const noexcept {
  return state_->rows.size();
}

int32_t DeviceReqToTokenPool::max_context_len() const noexcept {
  return state_->columns;
}

int32_t DeviceReqToTokenPool::available() const noexcept {
  return state_->host != nullptr ? state_->host->available() : state_->rows.available();
}

bool DeviceReqToTokenPool::is_held(int32_t row) const noexcept {
  return state_->host != nullptr ? state_->host->is_held(row) : state_->rows.is_held(row);
}

Device DeviceReqToTokenPool::device() const noexcept {
  return state_->where;
}

std::optional<int32_t> DeviceReqToTokenPool::alloc() {
  return state_->host != nullptr ? state_->host->alloc() : state_->rows.alloc();
}

bool DeviceReqToTokenPool::alloc(std::span<int32_t> rows) {
  return state_->host != nullptr ? state_->host->alloc(rows) : state_->rows.alloc(rows);
}

void DeviceReqToTokenPool::free(int32_t row) {
  state_->host != nullptr ? state_->host->free(row) : state_->rows.free(row);
}

void DeviceReqToTokenPool::write(int32_t row, int32_t first, std::span<const int32_t> slots, Stream stream) {
  const auto len = core::checked_cast<int32_t>(slots.size());
  state_->check_held(row);  // row 0 too, which a batch skips
  ReqToTokenWrites one;
  one.req_pool_indices = {&row, 1};
  one.first = {&first, 1};
  one.lens = {&len, 1};
  one.slots = slots;
  write(one, stream);
}

void DeviceReqToTokenPool::write(const ReqToTokenWrites& writes, Stream stream) {
  const TableWriteJob job = state_->on_table(batch_job(writes));
  state_->check(job);
  if (job.num_slots > 0) state_->write(job, stream);
}

void DeviceReqToTokenPool::write(const ReqToTokenWrites& writes, DeviceFaults& faults, Stream stream) {
  require(faults.device() == state_->where, "faults is of ", name_of(faults.device()), ", the pool is on ",
          name_of(state_->where));
  if (!state_->on_gpu()) {
    write(writes, stream);
    return;
  }
  require(state_->host == nullptr,
          "slots on the device do not reach the ReqToTokenPool that this is a copy of; write them from the host");
  const TableWriteJob job = state_->on_table(batch_job(writes));
  if (job.lens == nullptr) {
    check_total(core::checked_mul(int64_t{job.num_requests}, int64_t{job.tokens_per_request}), job.num_slots);
  }
  token_pool::gpu::write_request_table(state_->where.index, job, faults.report(), stream);
}

PageTableView DeviceReqToTokenPool::table() const noexcept {
  if (!state_->has_table()) return state_->host->table();
  PageTableView view;
  view.kind = PageTableKind::kDense;
  view.indices = state_->memory.as<int32_t>();
  view.num_indices = static_cast<int64_t>(state_->bytes / sizeof(int32_t));
  view.row_stride = state_->columns;
  view.num_rows = size() + 1;
  return view;
}

void DeviceReqToTokenPool::clear(Stream stream) {
  if (state_->host != nullptr) {
    state_->host->clear();
  } else {
    state_->rows.clear();
  }
  if (state_->on_gpu()) {
    const int64_t row_bytes = int64_t{state_->columns} * static_cast<int64_t>(sizeof(int32_t));
    gpu::zero_rows(state_->where.index, state_->memory.data(), row_bytes, row_bytes, int64_t{size()} + 1, stream);
  } else if (state_->has_table()) {
    std::memset(state_->memory.data(), 0, state_->bytes);
  }
}

}  // namespace folio::inline v0::backends
