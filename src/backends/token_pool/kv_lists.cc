#include "backends/token_pool/kv_lists.hpp"

#include <algorithm>
#include <utility>

#include "backends/common/gpu_memory.hpp"
#include "backends/token_pool/gpu.hpp"
#include "backends/token_pool/ranks.hpp"
#include "backends/token_pool/request_table.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "folio/backends/token_pool/kv_indices.hpp"

namespace folio::inline v0::backends::token_pool {
namespace {

using core::require;

KvRangeJob range_job(const Step& step, const TokenPoolConfig& config, const ReadingKind& kind) {
  KvRangeJob job;
  job.seq_lens = step.seq_lens.data();
  job.prefix_lens = step.extend ? step.prefix_lens.data() : nullptr;
  job.encoder_lens = step.encoder_lens.data();
  job.num_requests = step.num_requests;
  job.queries = step.queries();
  job.drafts = step.drafts();
  job.role = kind.role;
  job.ragged = kind.ragged;
  // Sums are divided at multiples from a list's begin on: where they may not depend on the schedule, lists begin at the
  // sequence's, and the plan leaves out what no window reaches.
  const bool whole = config.determinism == Determinism::kScheduleInvariant;
  job.shard = shard_of(config);
  job.window_left = whole || job.shard.world > 1 ? -1 : config.sliding_window_size.value_or(-1);
  job.page_size = kind.page_size;
  return job;
}

}  // namespace

KvLists::KvLists(const Context& context, const TokenPoolConfig& config, const ReadingKind& kind,
                 const ListMemory& memory)
    : where_(context.device()),
      config_(&config),
      kind_(kind),
      memory_(memory),
      gpu_lists_(where_),
      gpu_indices_(where_) {
  const auto rows = static_cast<size_t>(config.max_req_pool_size);
  for (std::vector<int32_t>* list : {&lens_, &whole_lens_, &first_pos_, &table_starts_}) list->reserve(rows);
  if (where_.type != DeviceType::kCpu) return;
  own_indptr_.reserve(rows + 1);
  own_last_page_len_.reserve(rows);
}

const PageTableView& KvLists::request_table() const {
  const bool own = kind_.role == WrapperRole::kWindow && config_->window_req_to_token.indices != nullptr;
  return own ? config_->window_req_to_token : config_->req_to_token;
}

void KvLists::build(const Step& step, bool device_lengths, Stream stream) {
  num_rows_ = step.num_requests;
  const size_t count = step.lengths_known ? static_cast<size_t>(step.num_requests) : 0;
  lens_.resize(count);
  whole_lens_.resize(count);
  first_pos_.resize(count);
  table_starts_.resize(count);
  const KvRangeJob job = range_job(step, *config_, kind_);
  for (size_t r = 0; r < count; ++r) {
    if (step.has_draft_rows()) {  // a row's list is whole, whatever the window: the mask leaves out what it must
      lens_[r] = whole_lens_[r] = step.seq_lens[r];
      first_pos_[r] = table_starts_[r] = 0;
      continue;
    }
    const KvRange range = kv_range(job, static_cast<int32_t>(r));
    lens_[r] = range.len;
    whole_lens_[r] = range.whole_len;
    first_pos_[r] = range.first_pos;
    table_starts_[r] = range.table_start;
  }
  check_places(step);
  if (where_.type == DeviceType::kCpu) {
    build_on_host(step);
  } else {
    build_on_gpu(step, job, device_lengths, stream);
  }
}

/// What create_kv_indices refuses that does not need the table: which row a request has, only its device may know.
void KvLists::check_places(const Step& step) const {
  if (step.has_draft_rows()) return;
  const SlotTable table = slot_table(request_table());
  for (size_t r = 0; r < lens_.size(); ++r) {
    require(table_starts_[r] % kind_.page_size == 0, "request ", r, " starts at position ", table_starts_[r],
            "; pages of ", kind_.page_size, " tokens start at its multiples");
    const int64_t end = int64_t{table_starts_[r]} + lens_[r];
    require(end <= table.num_columns, "request ", r, " reads positions up to ", end, " of its row; rows have ",
            table.num_columns);
  }
}

void KvLists::build_on_host(const Step& step) {
  const size_t count = lens_.size();
  cu_q_ = step.cu_q;
  device_ = {lens_.data(), whole_lens_.data(), first_pos_.data(), step.cu_q.data()};
  if (memory_.kv_last_page_len.empty()) {
    own_last_page_len_.resize(count);
  }
  const std::span<int32_t> last_page =
      memory_.kv_last_page_len.empty() ? std::span(own_last_page_len_) : memory_.kv_last_page_len.first(count);
  // With pages of one token all are 1, and a shared buffer holds that already.
  if (kind_.page_size > 1 || memory_.kv_last_page_len.empty()) {
    for (size_t r = 0; r < count; ++r) last_page[r] = last_page_len(lens_[r], kind_.page_size);
  }
  kv_last_page_len_ = last_page;
  if (step.has_draft_rows()) {
    kv_indptr_ = step.spec_info.kv_indptr;
    kv_indices_ = step.spec_info.kv_indices.first(static_cast<size_t>(kv_indptr_[count]));
    return;
  }
  if (memory_.kv_indptr.empty()) own_indptr_.resize(count + 1);
  const std::span<int32_t> indptr =
      memory_.kv_indptr.empty() ? std::span(own_indptr_) : memory_.kv_indptr.first(count + 1);
  const auto total = static_cast<size_t>(kv_indptr_from_lens(lens_, kind_.page_size, indptr));
  if (!memory_.fixed && own_indices_.size() < total) own_indices_.resize(total);
  const std::span<int32_t> indices = memory_.fixed ? memory_.kv_indices : std::span(own_indices_);
  KvIndicesArgs args;
  args.req_to_token = request_table();
  args.req_pool_indices = step.rows;
  args.paged_kernel_lens = lens_;
  args.kv_indptr = indptr;
  args.kv_start_idx = table_starts_;
  args.page_size = kind_.page_size;
  args.num_slots = kind_.role == WrapperRole::kWindow ? step.num_window_slots : step.num_slots;
  create_kv_indices(args, indices);
  kv_indptr_ = indptr;
  kv_indices_ = indices.first(total);
}

void KvLists::build_on_gpu(const Step& step, const KvRangeJob& ranges, bool device_lengths, Stream stream) {
  const auto count = static_cast<size_t>(num_rows_);
  const size_t rows = 1 + (memory_.fixed ? static_cast<size_t>(config_->max_req_pool_size) : count);
  gpu_lists_.reserve(11 * rows * sizeof(int32_t));
  auto* next = gpu_lists_.as<int32_t>();
  const auto take = [&next, rows] { return std::exchange(next, next + rows); };
  ListsJob job;
  job.ranges = ranges;
  job.ranges.seq_lens = step.device_seq_lens;
  job.ranges.prefix_lens = step.extend ? step.device_prefix_lens : nullptr;
  job.ranges.encoder_lens = step.device_encoder_lens;
  job.table = slot_table(request_table());
  job.rows = step.rows.data();
  job.num_slots = kind_.role == WrapperRole::kWindow ? step.num_window_slots : step.num_slots;
  if (!step.stand_in_lengths) job.report = memory_.report;
  if (!step.lengths_known && !step.has_draft_rows()) job.seq_lens_sum = step.seq_lens_sum;
  if (!device_lengths) {
    int32_t* const planned = next;
    job.planned = {take(), take(), take(), take()};
    upload_.assign(4 * rows, 0);
    auto to = upload_.begin();
    for (const std::span<const int32_t> list :
         {std::span(step.cu_q), std::span<const int32_t>(lens_), std::span<const int32_t>(first_pos_),
          std::span<const int32_t>(table_starts_)}) {
      std::ranges::copy(list, to);
      to += static_cast<std::ptrdiff_t>(rows);
    }
    backends::gpu::upload(where_.index, planned, upload_.data(), upload_.size() * sizeof(int32_t), stream);
  }
  job.cu_q = take();
  job.kv_lens = take();
  int32_t* const whole_lens = take();
  if (ranges.shard.world > 1) job.whole_lens = whole_lens;
  job.first_pos = take();
  job.table_starts = take();
  int32_t* const own_indptr = take();
  int32_t* const own_last_page = take();
  job.kv_indptr = memory_.kv_indptr.empty() || step.has_draft_rows() ? own_indptr : memory_.kv_indptr.data();
  job.kv_last_page_len = memory_.kv_last_page_len.empty() ? own_last_page : memory_.kv_last_page_len.data();
  kv_last_page_len_ = {job.kv_last_page_len, count};
  if (kind_.page_size == 1 && !memory_.kv_last_page_len.empty()) job.kv_last_page_len = nullptr;
  int64_t total = 0;
  for (const int32_t len : lens_) total += core::ceil_div(len, kind_.page_size);
  if (step.has_draft_rows()) {
    job.given_kv_indptr = step.spec_info.kv_indptr.data();
    job.capacity = static_cast<int64_t>(step.spec_info.kv_indices.size());
    // Offsets that a plan on the host counts with are the host's.
    if (device_lengths) job.kv_indptr = nullptr;
    kv_indptr_ = device_lengths ? step.spec_info.kv_indptr : std::span<const int32_t>(job.kv_indptr, count + 1);
    kv_indices_ = step.spec_info.kv_indices;
  } else {
    // A batch without cached keys has a list all the same, of no entries.
    if (!memory_.fixed) gpu_indices_.reserve(static_cast<size_t>(std::max<int64_t>(total, 1)) * sizeof(int32_t));
    job.kv_indices = memory_.fixed ? memory_.kv_indices.data() : gpu_indices_.as<int32_t>();
    job.capacity = memory_.fixed ? static_cast<int64_t>(memory_.kv_indices.size()) : total;
    require(total <= job.capacity, "the batch has ", total, " entries of kv_indices; ", job.capacity, " fit");
    kv_indptr_ = {job.kv_indptr, count + 1};
    // What a captured run may read is all of it; a plan reads what lengths say.
    kv_indices_ = {job.kv_indices, static_cast<size_t>(memory_.fixed ? job.capacity : total)};
  }
  gpu::build_lists(where_.index, job, stream);
  cu_q_ = {job.cu_q, count + 1};
  device_ = {job.kv_lens, job.whole_lens, job.first_pos, job.cu_q};
}

PageTableView KvLists::table() const {
  PageTableView table;
  table.kind = PageTableKind::kCsr;
  table.indices = kv_indices_.data();
  table.num_indices = static_cast<int64_t>(kv_indices_.size());
  table.indptr = kv_indptr_.data();
  table.num_rows = num_rows_;
  return table;
}

KvWrapper KvLists::wrapper() const {
  KvWrapper wrapper;
  wrapper.window_left = kind_.role == WrapperRole::kWindow ? config_->sliding_window_size.value_or(-1) : -1;
  wrapper.qo_indptr = cu_q_;
  wrapper.kv_indptr = kv_indptr_;
  wrapper.kv_indices = kv_indices_;
  wrapper.kv_last_page_len = kv_last_page_len_;
  wrapper.kv_lens = lens_;
  wrapper.kv_starts = first_pos_;
  wrapper.page_size = kind_.page_size;
  return wrapper;
}

}  // namespace folio::inline v0::backends::token_pool
