#include "backends/flashinfer/wrapper_state.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "folio/merge.hpp"
#include "folio/page_table.hpp"

namespace folio::inline v0::backends::detail {
namespace {

using core::require;

bool same_question(const AttentionConfig& a, const AttentionConfig& b) {
  return a.num_q_heads == b.num_q_heads && a.num_kv_heads == b.num_kv_heads && a.head_dim_qk == b.head_dim_qk &&
         a.head_dim_v == b.head_dim_v && a.q == b.q && a.kv == b.kv && a.ragged_kv == b.ragged_kv && a.out == b.out &&
         a.page_size == b.page_size && a.mask == b.mask && a.window_left == b.window_left && a.features == b.features &&
         a.determinism == b.determinism;
}

bool same_bounds(const std::optional<GraphBounds>& a, const GraphBounds& b) {
  return a && a->max_requests == b.max_requests && a->max_tokens == b.max_tokens && a->max_q_len == b.max_q_len &&
         a->max_kv_len == b.max_kv_len;
}

Features features_of(const WrapperPlanOptions& options) {
  Features features;
  if (options.logits_soft_cap != 0.0f) features = features | Feature::kSoftCap;
  if (options.sinks) features = features | Feature::kSinks;
  if (options.pos_encoding_mode == PosEncodingMode::kAlibi) features = features | Feature::kAlibi;
  if (options.pos_encoding_mode == PosEncodingMode::kRopeLlama) features = features | Feature::kRopeLlama;
  return features;
}

void check_options(const WrapperPlanOptions& options) {
  require(std::isfinite(options.sm_scale) && options.sm_scale >= 0.0f, "sm_scale is ", options.sm_scale,
          "; it must be finite and not below 0 (0 = 1 / sqrt(head_dim_qk))");
  require(std::isfinite(options.logits_soft_cap) && options.logits_soft_cap >= 0.0f, "logits_soft_cap is ",
          options.logits_soft_cap, "; it must be finite and not below 0");
  const RopeArgs plain;
  require(options.pos_encoding_mode == PosEncodingMode::kRopeLlama ||
              (options.rope_scale == plain.scale && options.rope_theta == plain.theta),
          "rope_scale or rope_theta is given, but pos_encoding_mode is not ROPE_LLAMA");
  const bool alibi = options.pos_encoding_mode == PosEncodingMode::kAlibi;
  require(!alibi || options.causal, "pos_encoding_mode is ALIBI without causal; it is offered for causal attention");
  if (alibi && options.sinks) {
    core::fail(ErrorCode::kUnsupported,
               "pos_encoding_mode is ALIBI with sinks: its logits count from the first query, so that a sink would "
               "weigh by the request's length; ALIBI is offered without sinks");
  }
}

AttentionConfig config_of(const WrapperPlanOptions& options, bool custom_mask) {
  AttentionConfig config;
  config.num_q_heads = options.num_qo_heads;
  config.num_kv_heads = options.num_kv_heads;
  config.head_dim_qk = options.head_dim_qk;
  config.head_dim_v = options.head_dim_vo == 0 ? options.head_dim_qk : options.head_dim_vo;
  config.q = options.q_data_type;
  config.kv = options.kv_data_type == DType::kUnset ? options.q_data_type : options.kv_data_type;
  config.ragged_kv = config.kv;
  config.out = options.o_data_type;
  config.page_size = options.page_size;
  config.mask = custom_mask ? MaskKind::kCustom : options.causal ? MaskKind::kCausal : MaskKind::kNone;
  config.window_left = options.window_left;
  config.features = features_of(options);
  config.determinism = options.determinism;
  return config;
}

}  // namespace

WrapperState::WrapperState(const Context& context, KvCacheLayout kv_layout)
    : context_(context),
      layout_(kv_layout),
      kernel_mask_(context.device()),
      kernel_slopes_(context.device()),
      kernel_cu_q_(context.device()),
      kernel_first_pos_(context.device()),
      workspace_(context.device()) {}

void WrapperState::fix_shape(int32_t requests, int64_t pages, int32_t q_len, int32_t page_size) {
  if (context_.device().type == DeviceType::kCpu) return;
  GraphBounds bounds;
  bounds.max_requests = requests;
  bounds.max_tokens = core::checked_cast<int32_t>(int64_t{requests} * q_len);
  bounds.max_q_len = q_len;
  bounds.max_kv_len = static_cast<int32_t>(std::min<int64_t>(core::checked_mul(pages, int64_t{std::max(page_size, 1)}),
                                                             std::numeric_limits<int32_t>::max() - page_size));
  if (!same_bounds(bounds_, bounds)) op_.reset();
  bounds_ = bounds;
  if (tables_.empty()) tables_.emplace_back(context_.device());
  tables_[0].indptr.reserve((static_cast<size_t>(requests) + 1) * sizeof(int32_t));
  tables_[0].indices.reserve(static_cast<size_t>(std::max<int64_t>(pages, 1)) * sizeof(int32_t));
}

void WrapperState::copy_pages(const WrapperPages& pages, int32_t page_size, WrapperLevel& level) {
  require(!pages.indptr.empty(), "paged_kv_indptr is empty; it has an entry more than there are rows");
  const size_t rows = pages.indptr.size() - 1;
  require(pages.last_page_len.size() == rows, "paged_kv_last_page_len has ", pages.last_page_len.size(),
          " entries; paged_kv_indptr has ", pages.indptr.size());
  level.kv_len.resize(rows);
  seq_lens_from_paged(pages.indptr, pages.last_page_len, page_size, level.kv_len);
  require(static_cast<size_t>(pages.indptr.back()) <= pages.indices.size(), "paged_kv_indptr ends at ",
          pages.indptr.back(), "; paged_kv_indices has ", pages.indices.size(), " entries");
  level.indptr.assign(pages.indptr.begin(), pages.indptr.end());
  const bool device_indices = pages.indices_where == Where::kDevice;
  require(!device_indices || context_.device().type != DeviceType::kCpu,
          "paged_kv_indices are on a device; the context is a CPU's");
  level.device_indices = device_indices ? pages.indices : std::span<const int32_t>();
  level.indices.assign(pages.indices.begin(), device_indices ? pages.indices.begin() : pages.indices.end());
  level.first_pos.assign(rows, 0);
  level.group_indptr.clear();
}

const AttentionOp& WrapperState::op() const {
  require(op_.has_value(), "plan has not been called");
  return *op_;
}

void WrapperState::prepare_for(const AttentionConfig& config) {
  if (op_ && same_question(config, config_)) return;
  plan_.reset();
  PrepareOptions prepare_options;
  prepare_options.bounds = bounds_;
  AttentionOp op = prepare(context_, config, prepare_options);
  buffer_.emplace(make_plan_buffer(op));
  op_.emplace(std::move(op));
  config_ = config;
}

/// Folio's layout is FlashInfer's packed one: a request's block is row-major bits from a byte of its own.
void WrapperState::pack_mask(const WrapperMask& mask) {
  require(mask.bools.empty() || mask.packed.empty(), "custom_mask and packed_custom_mask are both given; give one");
  mask_.clear();
  if (!mask.packed.empty()) mask_.assign(mask.packed.begin(), mask.packed.end());
  size_t next = 0;
  size_t bytes = 0;
  for (size_t r = 0; r + 1 < cu_q_.size(); ++r) {
    const auto bits = static_cast<size_t>(int64_t{cu_q_[r + 1] - cu_q_[r]} * levels_[0].kv_len[r]);
    if (!mask.bools.empty()) {
      require(next + bits <= mask.bools.size(), "custom_mask has ", mask.bools.size(), " entries; the batch has more");
      mask_.resize(bytes + (bits + 7) / 8, 0);
      for (size_t i = 0; i < bits; ++i) {
        if (mask.bools[next + i] != 0) mask_[bytes + i / 8] |= static_cast<uint8_t>(1u << (i % 8));
      }
    }
    next += bits;
    bytes += (bits + 7) / 8;
  }
  require(mask.bools.empty() || next == mask.bools.size(), "custom_mask has ", mask.bools.size(),
          " entries; the batch has ", next);
  require(mask.packed.empty() || bytes == mask.packed.size(), "packed_custom_mask has ", mask.packed.size(),
          " bytes; the batch needs ", bytes);
}

void WrapperState::put_tables(KvSource source, Stream stream) {
  while (tables_.size() < levels_.size()) tables_.emplace_back(context_.device());
  for (size_t i = 0; i < levels_.size(); ++i) {
    const WrapperLevel& level = levels_[i];
    const int32_t* const indptr = tables_[i].indptr.put(std::span(level.indptr), stream);
    if (source == KvSource::kRagged) {
      segment_args_[i].ragged.indptr = indptr;
      continue;
    }
    const bool on_device = level.device_indices.data() != nullptr;
    const std::span<const int32_t> indices = on_device ? level.device_indices : std::span(level.indices);
    PageTableView& table = segment_args_[i].table;
    table.kind = PageTableKind::kCsr;
    table.indptr = indptr;
    table.num_rows = static_cast<int32_t>(level.kv_len.size());
    table.indices = tables_[i].indices.put(indices, stream, on_device ? Where::kDevice : Where::kHost);
    table.num_indices = static_cast<int64_t>(indices.size());
  }
}

/// FlashInfer's slopes, and what its LSE needs besides.
void WrapperState::put_slopes(Stream stream) {
  slopes_.clear();
  if (options_.pos_encoding_mode != PosEncodingMode::kAlibi) return;
  for (int32_t head = 0; head < options_.num_qo_heads; ++head) {
    slopes_.push_back(standard_alibi_slope(head, options_.num_qo_heads));
  }
  first_pos_.clear();
  for (size_t r = 0; r + 1 < cu_q_.size(); ++r) {
    int64_t keys = 0;
    for (const WrapperLevel& level : levels_) keys = int64_t{level.first_pos[r]} + level.kv_len[r];
    first_pos_.push_back(core::checked_cast<int32_t>(keys - (cu_q_[r + 1] - cu_q_[r])));
  }
  slopes_at_ = kernel_slopes_.put(std::span<const float>(slopes_), stream);
  cu_q_at_ = kernel_cu_q_.put(std::span<const int32_t>(cu_q_), stream);
  first_pos_at_ = kernel_first_pos_.put(std::span<const int32_t>(first_pos_), stream);
}

void WrapperState::reserve_workspace(const AttentionPlan& plan, Stream stream) {
  const size_t bytes = workspace_size(plan);
  if (bytes <= workspace_.bytes()) return;
  workspace_.reserve(std::max(bytes, workspace_size(*op_)));
  init_workspace(*op_, {workspace_.data(), workspace_.bytes()}, stream);
}

void WrapperState::plan(KvSource source, const WrapperPlanOptions& options, const WrapperMask& mask, Stream stream) {
  check_options(options);
  const bool custom = !mask.bools.empty() || !mask.packed.empty();
  if (custom) pack_mask(mask);
  prepare_for(config_of(options, custom));
  options_ = options;
  segments_.assign(levels_.size(), KvSegment());
  segment_args_.assign(levels_.size(), SegmentArgs());
  for (size_t i = 0; i < levels_.size(); ++i) {
    const WrapperLevel& level = levels_[i];
    KvSegment& segment = segments_[i];
    segment.source = source;
    segment.kv_len = level.kv_len.data();
    segment.first_pos = level.first_pos.data();
    if (!level.group_indptr.empty()) {
      segment.group_indptr = level.group_indptr.data();
      segment.num_groups = static_cast<int32_t>(level.kv_len.size());
    }
  }
  BatchView view;
  view.num_requests = core::checked_cast<int32_t>(cu_q_.size()) - 1;
  view.num_tokens = cu_q_.back();
  view.cu_q = cu_q_.data();
  view.segments = segments_;
  const AttentionPlan planned = folio::plan(*op_, view, *buffer_, stream);
  put_tables(source, stream);
  put_slopes(stream);
  if (custom) mask_at_ = kernel_mask_.put(std::span<const uint8_t>(mask_), stream);
  reserve_workspace(planned, stream);
  plan_.emplace(planned);
}

KvCacheView WrapperState::cache_view(const WrapperKvCache& kv_cache) const {
  const size_t token = layout_ == KvCacheLayout::kNhd ? 1 : 2;
  const size_t head = 3 - token;
  const auto check = [](const char* name, const ConstTensorView& half) {
    require(half.rank == 4, name, " has rank ", half.rank, "; it must be [pages, page_size, heads, head_dim] (NHD) or ",
            "[pages, heads, page_size, head_dim] (HND)");
    require(half.strides[3] == 1, name, "'s innermost stride is ", half.strides[3], "; it must be 1");
  };
  check("k_cache", kv_cache.k);
  check("v_cache", kv_cache.v);
  const bool alike = kv_cache.k.dtype == kv_cache.v.dtype &&
                     std::equal(kv_cache.k.shape.begin(), kv_cache.k.shape.begin() + 3, kv_cache.v.shape.begin());
  require(alike, "k_cache and v_cache differ in dtype or in pages, page_size or heads");
  const auto strides = [&](const ConstTensorView& half) {
    return KvStrides{half.strides[0], half.strides[token], half.strides[head]};
  };
  KvCacheView view;
  view.dtype = kv_cache.k.dtype;
  view.k = const_cast<void*>(kv_cache.k.data);  // attention only reads through the view
  view.v = const_cast<void*>(kv_cache.v.data);
  view.num_pages = kv_cache.k.shape[0];
  view.page_size = core::checked_cast<int32_t>(kv_cache.k.shape[token]);
  view.num_kv_heads = core::checked_cast<int32_t>(kv_cache.k.shape[head]);
  view.head_dim_qk = core::checked_cast<int32_t>(kv_cache.k.shape[3]);
  view.head_dim_v = core::checked_cast<int32_t>(kv_cache.v.shape[3]);
  view.k_strides = strides(kv_cache.k);
  view.v_strides = strides(kv_cache.v);
  return view;
}

void WrapperState::run_paged(const ConstTensorView& q, const WrapperKvCache& kv_cache, const TensorView& out,
                             const WrapperRunArgs& args, Stream stream) {
  require(plan_.has_value(), "plan has not been called");
  const KvCacheView cache = cache_view(kv_cache);
  for (SegmentArgs& segment : segment_args_) segment.cache = cache;
  run(q, segment_args_, out, args, stream);
}

void WrapperState::run_ragged(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                              const TensorView& out, const WrapperRunArgs& args, Stream stream) {
  require(plan_.has_value(), "plan has not been called");
  segment_args_[0].ragged.k = k;
  segment_args_[0].ragged.v = v;
  run(q, segment_args_, out, args, stream);
}

void WrapperState::run(const ConstTensorView& q, std::span<const SegmentArgs> segments, const TensorView& out,
                       const WrapperRunArgs& args, Stream stream) {
  require(std::isfinite(args.q_scale) && args.q_scale > 0.0f, "q_scale is ", args.q_scale,
          "; it must be finite and positive");
  require(args.sinks != nullptr || !options_.sinks, "sinks were planned for, and are not given");
  for (SegmentArgs& segment : segment_args_) {
    segment.k_scale.value = args.k_scale;
    segment.v_scale.value = args.v_scale;
  }
  AttentionArgs attention;
  attention.q = q;
  attention.out = out;
  attention.lse = {args.lse, options_.num_qo_heads, 1, LseBase::k2};
  attention.segments = segments;
  const float sm_scale =
      options_.sm_scale > 0.0f ? options_.sm_scale : 1.0f / std::sqrt(static_cast<float>(options_.head_dim_qk));
  attention.sm_scale = sm_scale * args.q_scale;
  attention.logits_soft_cap = options_.logits_soft_cap;
  attention.alibi_slopes = slopes_.empty() ? nullptr : slopes_at_;
  attention.rope = {options_.rope_theta, options_.rope_scale};
  attention.sinks = args.sinks;
  if (config_.mask == MaskKind::kCustom) {
    attention.custom_mask = mask_at_;
    attention.custom_mask_bytes = static_cast<int64_t>(mask_.size());
  }
  folio::run(*plan_, attention, {workspace_.data(), workspace_.bytes()}, stream);
  if (args.lse != nullptr && !slopes_.empty()) {
    shift_alibi_lse(context_, args.lse, {cu_q_at_, cu_q_.size()}, {first_pos_at_, first_pos_.size()},
                    {slopes_at_, slopes_.size()}, stream);
  }
}

}  // namespace folio::inline v0::backends::detail
