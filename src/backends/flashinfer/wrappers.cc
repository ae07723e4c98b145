#include "folio/backends/flashinfer/wrappers.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>

#include "backends/flashinfer/wrapper_state.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends {
namespace {

using core::require;
using detail::WrapperLevel;
using detail::WrapperState;

void copy_qo_indptr(std::span<const int32_t> qo_indptr, size_t rows, std::vector<int32_t>& cu_q) {
  require(!qo_indptr.empty() && qo_indptr[0] == 0, "qo_indptr must begin with 0");
  require(qo_indptr.size() == rows + 1, "qo_indptr has ", qo_indptr.size(), " entries; the KV has ", rows, " rows");
  for (size_t r = 0; r < rows; ++r) {
    require(qo_indptr[r] <= qo_indptr[r + 1], "qo_indptr descends from ", qo_indptr[r], " to ", qo_indptr[r + 1],
            " at request ", r);
  }
  cu_q.assign(qo_indptr.begin(), qo_indptr.end());
}

}  // namespace

float standard_alibi_slope(int32_t head, int32_t num_heads) {
  require(num_heads >= 1 && head >= 0 && head < num_heads, "head is ", head, " of ", num_heads);
  const auto whole = static_cast<int32_t>(std::bit_floor(static_cast<uint32_t>(num_heads)));
  const double step = head < whole ? -8.0 * (head + 1) / whole : -4.0 * (2 * (head - whole) + 1) / whole;
  return static_cast<float>(std::exp2(step));
}

WrapperKvCache::WrapperKvCache(const ConstTensorView& kv_cache) : k(kv_cache), v(kv_cache) {
  require(kv_cache.rank == 5 && kv_cache.shape[1] == 2,
          "paged_kv_cache must be [pages, 2, ., ., head_dim]; give K and ", "V apart otherwise");
  k.rank = v.rank = 4;
  for (size_t i = 1; i < 4; ++i) {
    k.shape[i] = v.shape[i] = kv_cache.shape[i + 1];
    k.strides[i] = v.strides[i] = kv_cache.strides[i + 1];
  }
  v.data = static_cast<const std::byte*>(kv_cache.data) + kv_cache.strides[1] * size_of(kv_cache.dtype);
}

AttentionWrapper::AttentionWrapper(const Context& context, KvCacheLayout kv_layout)
    : state_(std::make_unique<WrapperState>(context, kv_layout)) {}
AttentionWrapper::AttentionWrapper(AttentionWrapper&&) noexcept = default;
AttentionWrapper& AttentionWrapper::operator=(AttentionWrapper&&) noexcept = default;
AttentionWrapper::~AttentionWrapper() = default;

size_t AttentionWrapper::workspace_size() const {
  return state_->workspace_bytes();
}
std::string AttentionWrapper::kernel_name() const {
  return state_->op().kernel_name();
}

BatchPrefillWithPagedKVCacheWrapper::BatchPrefillWithPagedKVCacheWrapper(const Context& context,
                                                                         KvCacheLayout kv_layout)
    : AttentionWrapper(context, kv_layout) {}

void BatchPrefillWithPagedKVCacheWrapper::plan(std::span<const int32_t> qo_indptr, const WrapperPages& pages,
                                               const WrapperPlanOptions& options, const WrapperMask& custom_mask,
                                               Stream stream) {
  WrapperState& s = state();
  s.begin_plan(1);
  s.copy_pages(pages, options.page_size, s.levels()[0]);
  copy_qo_indptr(qo_indptr, s.levels()[0].kv_len.size(), s.cu_q());
  s.plan(KvSource::kPaged, options, custom_mask, stream);
}

void BatchPrefillWithPagedKVCacheWrapper::run(const ConstTensorView& q, const WrapperKvCache& paged_kv_cache,
                                              const TensorView& out, const WrapperRunArgs& args, Stream stream) const {
  state().run_paged(q, paged_kv_cache, out, args, stream);
}

BatchPrefillWithRaggedKVCacheWrapper::BatchPrefillWithRaggedKVCacheWrapper(const Context& context)
    : AttentionWrapper(context, KvCacheLayout::kNhd) {}

void BatchPrefillWithRaggedKVCacheWrapper::plan(std::span<const int32_t> qo_indptr, std::span<const int32_t> kv_indptr,
                                                const WrapperPlanOptions& options, const WrapperMask& custom_mask,
                                                Stream stream) {
  WrapperState& s = state();
  s.begin_plan(1);
  WrapperLevel& level = s.levels()[0];
  require(!kv_indptr.empty() && kv_indptr[0] >= 0, "kv_indptr must begin with 0 or more");
  level.kv_len.resize(kv_indptr.size() - 1);
  for (size_t r = 0; r + 1 < kv_indptr.size(); ++r) {
    require(kv_indptr[r] <= kv_indptr[r + 1], "kv_indptr descends from ", kv_indptr[r], " to ", kv_indptr[r + 1],
            " at request ", r);
    level.kv_len[r] = kv_indptr[r + 1] - kv_indptr[r];
  }
  level.indptr.assign(kv_indptr.begin(), kv_indptr.end());
  level.first_pos.assign(level.kv_len.size(), 0);
  level.group_indptr.clear();
  copy_qo_indptr(qo_indptr, level.kv_len.size(), s.cu_q());
  s.plan(KvSource::kRagged, options, custom_mask, stream);
}

void BatchPrefillWithRaggedKVCacheWrapper::run(const ConstTensorView& q, const ConstTensorView& k,
                                               const ConstTensorView& v, const TensorView& out,
                                               const WrapperRunArgs& args, Stream stream) const {
  state().run_ragged(q, k, v, out, args, stream);
}

BatchDecodeWithPagedKVCacheWrapper::BatchDecodeWithPagedKVCacheWrapper(const Context& context, KvCacheLayout kv_layout)
    : AttentionWrapper(context, kv_layout) {}

BatchDecodeWithPagedKVCacheWrapper::BatchDecodeWithPagedKVCacheWrapper(const Context& context, KvCacheLayout kv_layout,
                                                                       int32_t fixed_batch_size, int64_t max_num_pages)
    : AttentionWrapper(context, kv_layout), fixed_batch_size_(fixed_batch_size), max_num_pages_(max_num_pages) {
  require(fixed_batch_size >= 1, "fixed_batch_size is ", fixed_batch_size, "; it must be at least 1");
  require(max_num_pages >= 0, "max_num_pages is ", max_num_pages, "; it must not be negative");
}

void BatchDecodeWithPagedKVCacheWrapper::check_fixed_shape(const WrapperPages& pages) const {
  if (!fixed_batch_size_) return;
  const size_t batch_size = pages.last_page_len.size();
  require(batch_size == static_cast<size_t>(*fixed_batch_size_),
          "The batch size should be fixed in cudagraph mode, the runtime batch size ", batch_size,
          " mismatches the batch size set during initialization ", *fixed_batch_size_);
  require(static_cast<int64_t>(pages.indices.size()) <= max_num_pages_,
          "The size of indices should be less than or equal to the allocated buffer");
}

void BatchDecodeWithPagedKVCacheWrapper::plan(const WrapperPages& pages, const WrapperPlanOptions& options,
                                              int32_t q_len_per_req, Stream stream) {
  WrapperState& s = state();
  s.begin_plan(1);  // whatever is refused from here on, the plan before is gone
  check_fixed_shape(pages);
  require(q_len_per_req >= 1, "q_len_per_req is ", q_len_per_req, "; it must be at least 1");
  WrapperLevel& level = s.levels()[0];
  s.copy_pages(pages, options.page_size, level);
  if (fixed_batch_size_) s.fix_shape(*fixed_batch_size_, max_num_pages_, q_len_per_req, options.page_size);
  s.cu_q().resize(level.kv_len.size() + 1);
  s.cu_q()[0] = 0;
  for (size_t r = 0; r < level.kv_len.size(); ++r) {
    const int32_t kv_len = level.kv_len[r];
    require(q_len_per_req == 1 || kv_len == 0 || kv_len >= q_len_per_req, "request ", r, " has ", kv_len,
            " keys; q_len_per_req is ", q_len_per_req);
    s.cu_q()[r + 1] = core::checked_cast<int32_t>(int64_t{s.cu_q()[r]} + q_len_per_req);
  }
  WrapperPlanOptions causal = options;
  causal.causal = true;  // a request's queries are its last tokens
  s.plan(KvSource::kPaged, causal, {}, stream);
  planned_ = true;
}

void BatchDecodeWithPagedKVCacheWrapper::run(const ConstTensorView& q, const WrapperKvCache& paged_kv_cache,
                                             const TensorView& out, const WrapperRunArgs& args, Stream stream) const {
  state().run_paged(q, paged_kv_cache, out, args, stream);
}

void fast_plan_decode(BatchDecodeWithPagedKVCacheWrapper& wrapper, const WrapperPages& pages,
                      const WrapperPlanOptions& options, Stream stream) {
  if (!wrapper.is_cuda_graph_enabled() || !wrapper.planned_) {
    wrapper.plan(pages, options, 1, stream);
    return;
  }
  wrapper.state().begin_plan(1);
  wrapper.check_fixed_shape(pages);
  try {
    wrapper.plan(pages, options, 1, stream);
  } catch (const Error& error) {
    core::fail(ErrorCode::kUnavailable, "Error in tensor core plan: ", error.what());
  }
}

MultiLevelCascadeAttentionWrapper::MultiLevelCascadeAttentionWrapper(const Context& context, int32_t num_levels,
                                                                     KvCacheLayout kv_layout)
    : AttentionWrapper(context, kv_layout), num_levels_(num_levels) {
  require(num_levels >= 1 && num_levels <= kMaxLevels, "num_levels is ", num_levels, "; it must be from 1 to ",
          kMaxLevels);
}

void MultiLevelCascadeAttentionWrapper::plan(std::span<const std::span<const int32_t>> qo_indptr_arr,
                                             std::span<const WrapperPages> pages_arr, const WrapperPlanOptions& options,
                                             Stream stream) {
  const auto levels = static_cast<size_t>(num_levels_);
  WrapperState& s = state();
  s.begin_plan(levels);
  require(qo_indptr_arr.size() == levels && pages_arr.size() == levels, "qo_indptr_arr has ", qo_indptr_arr.size(),
          " levels and the pages ", pages_arr.size(), "; the wrapper has ", levels);
  if (options.pos_encoding_mode == PosEncodingMode::kAlibi) {
    core::fail(ErrorCode::kUnsupported, "pos_encoding_mode is ALIBI; cascades are offered with NONE");
  }
  for (size_t l = 0; l < levels; ++l) s.copy_pages(pages_arr[l], options.page_size, s.levels()[l]);
  const std::span<const int32_t> requests = qo_indptr_arr[levels - 1];
  copy_qo_indptr(requests, s.levels()[levels - 1].kv_len.size(), s.cu_q());
  for (size_t l = 0; l + 1 < levels; ++l) {
    const std::span<const int32_t> tokens = qo_indptr_arr[l];
    WrapperLevel& level = s.levels()[l];
    require(tokens.size() == level.kv_len.size() + 1, "qo_indptr_arr[", l, "] has ", tokens.size(),
            " entries; the level's pages have ", level.kv_len.size(), " rows");
    require(tokens.size() > 1 || requests.size() == 1, "qo_indptr_arr[", l, "] has no row for the ",
            requests.size() - 1, " requests of the last level");
    require(tokens.front() == 0 && tokens.back() == requests.back(), "qo_indptr_arr[", l, "] is from ", tokens.front(),
            " to ", tokens.back(), "; the last level's is from 0 to ", requests.back());
    // Token bounds to request bounds. Where empty requests stand at a bound, they go to the later row.
    for (size_t row = 0; row < tokens.size(); ++row) {
      const bool last = row + 1 == tokens.size();
      const auto at = last ? requests.end() - 1 : std::lower_bound(requests.begin(), requests.end(), tokens[row]);
      require(at != requests.end() && *at == tokens[row], "qo_indptr_arr[", l, "][", row, "] is ", tokens[row],
              ", which is within a request of the last level");
      level.group_indptr.push_back(static_cast<int32_t>(at - requests.begin()));
      require(row == 0 || level.group_indptr[row - 1] <= level.group_indptr[row], "qo_indptr_arr[", l, "] descends");
    }
  }
  // Keys before each level, request by request.
  for (size_t r = 0; r + 1 < requests.size(); ++r) {
    int32_t before = 0;
    for (size_t l = 0; l < levels; ++l) {
      WrapperLevel& level = s.levels()[l];
      size_t row = r;
      bool first = true;
      if (l + 1 < levels) {
        const auto after =
            std::upper_bound(level.group_indptr.begin(), level.group_indptr.end(), static_cast<int32_t>(r));
        row = static_cast<size_t>(after - level.group_indptr.begin()) - 1;
        first = static_cast<int32_t>(r) == level.group_indptr[row];
      }
      require(first || level.first_pos[row] == before, "request ", r, " has ", before, " keys before level ", l,
              "; others of its row there have ", level.first_pos[row]);
      level.first_pos[row] = before;
      before = core::checked_cast<int32_t>(int64_t{before} + level.kv_len[row]);
    }
  }
  s.plan(KvSource::kPaged, options, {}, stream);
}

void MultiLevelCascadeAttentionWrapper::run(const ConstTensorView& q, const WrapperKvCache& paged_kv_cache,
                                            const TensorView& out, const WrapperRunArgs& args, Stream stream) const {
  state().run_paged(q, paged_kv_cache, out, args, stream);
}

}  // namespace folio::inline v0::backends
