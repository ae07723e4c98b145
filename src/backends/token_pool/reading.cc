#include "backends/token_pool/reading.hpp"

#include <algorithm>

#include "backends/common/gpu_memory.hpp"
#include "backends/token_pool/ranks.hpp"
#include "backends/token_pool/tree_window.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends::token_pool {
namespace {

GraphBounds bounds_of(const TokenPoolConfig& config, const FixedShape& shape) {
  GraphBounds bounds;
  bounds.max_requests = shape.max_requests;
  bounds.max_tokens = shape.max_tokens;
  bounds.max_q_len = shape.max_q_len;
  if (is_divided(config)) {  // ranks' tables may differ, and bounds must not
    bounds.max_kv_len = core::checked_cast<int32_t>(int64_t{config.max_context_len} + shape.max_q_len);
    return bounds;
  }
  const auto columns = static_cast<int32_t>(std::min<int64_t>(config.req_to_token.row_stride, INT32_MAX));
  bounds.max_kv_len = std::max(config.max_context_len, columns);
  return bounds;
}

AttentionConfig attention_config(const TokenPoolConfig& config, const ReadingKind& kind) {
  AttentionConfig attention;
  attention.num_q_heads = config.num_heads;
  attention.num_kv_heads = config.num_kv_heads;
  attention.head_dim_qk = config.head_dim;
  attention.head_dim_v = config.value_head_dim();
  attention.q = config.q_dtype;
  attention.kv = config.kv_cache_dtype;
  if (kind.ragged) attention.ragged_kv = config.q_dtype;
  attention.kv_format = config.kv_format;
  attention.page_size = kind.page_size;
  attention.mask = kind.mask;
  // A tree's window counts depths, not rows: it is in the mask's bits.
  if (kind.role == WrapperRole::kWindow && kind.mask != MaskKind::kCustom) {
    attention.window_left = config.sliding_window_size.value_or(-1);
  }
  if (config.logit_cap) attention.features = Feature::kSoftCap;
  attention.determinism = config.determinism;
  return attention;
}

PrepareOptions prepare_options(const TokenPoolConfig& config, const std::optional<FixedShape>& shape) {
  PrepareOptions options;
  if (shape) options.bounds = bounds_of(config, *shape);
  return options;
}

std::optional<distributed::DcpAttention> over_ranks(const Context& context, const TokenPoolConfig& config,
                                                    const ReadingKind& kind, const std::optional<FixedShape>& shape) {
  if (!is_divided(config)) return std::nullopt;
  distributed::DcpConfig dcp = dcp_config(parallel_of(config), prepare_options(config, shape));
  dcp.attention = attention_config(config, kind);
  return distributed::DcpAttention(context, *config.dcp_group, dcp);
}

}  // namespace

KvReading::KvReading(const Context& context, const TokenPoolConfig& config, const ReadingKind& kind,
                     const ListMemory& memory, const std::optional<FixedShape>& shape)
    : config_(&config),
      kind_(kind),
      ranks_(over_ranks(context, config, kind, shape)),
      op_(ranks_ ? ranks_->cached_op()
                 : prepare(context, attention_config(config, kind), prepare_options(config, shape))),
      lists_(context, config, kind, memory),
      fixed_(shape.has_value()),
      on_host_(context.device().type == DeviceType::kCpu),
      gpu_mask_(context.device()) {
  if (!ranks_) buffer_.emplace(make_plan_buffer(op_));
  if (!shape || on_host_ || !is_windowed_tree()) return;
  // Captured graphs know the address, so that it must not grow.
  const int64_t row_bytes =
      core::ceil_div(int64_t{shape->max_q_len} * bounds_of(config, *shape).max_kv_len, int64_t{8});
  gpu_mask_.reserve(static_cast<size_t>(core::checked_mul(int64_t{shape->max_requests}, row_bytes)));
}

void KvReading::plan(const Step& step, uint64_t number, Stream stream) {
  plan_.reset();
  rank_plan_.reset();
  // What is captured beside such a plan holds for whatever lengths a replay finds on the device. Trees are planned from
  // the host's lengths, into the same image.
  const bool device_lengths = fixed_ && !on_host_ && kind_.mask != MaskKind::kCustom;
  lists_.build(step, device_lengths, stream);
  args_ = {};
  args_[0].table = lists_.table();
  num_segments_ = 1;
  if (ranks_) {
    plan_over_ranks(step, device_lengths, stream);
  } else {
    plan_undivided(step, device_lengths, stream);
  }
  number_ = number;
  const int64_t slots = kind_.role == WrapperRole::kWindow ? step.num_window_slots : step.num_slots;
  checked_pages_ = core::ceil_div(slots, int64_t{kind_.page_size});
}

/// The ranks find their shares of the whole sequences' lengths themselves.
void KvReading::plan_over_ranks(const Step& step, bool device_lengths, Stream stream) {
  distributed::DcpBatch batch;
  batch.where = device_lengths ? Where::kDevice : Where::kHost;
  if (device_lengths) batch.num_tokens = step.num_tokens;
  batch.num_requests = step.num_requests;
  batch.cu_q = device_lengths ? lists_.device_cu_q() : step.cu_q.data();
  batch.seq_lens = device_lengths ? lists_.device_whole_lens() : lists_.whole_lens().data();
  batch.num_cached = kind_.ragged ? 0 : step.num_requests;
  batch.cross_attention = kind_.role == WrapperRole::kCross;
  rank_plan_.emplace(DcpWindowPlan{lists_.wrapper().window_left, &*ranks_, ranks_->plan(batch, stream)});
}

void KvReading::plan_undivided(const Step& step, bool device_lengths, Stream stream) {
  BatchView view;
  view.where = device_lengths ? Where::kDevice : Where::kHost;
  view.num_requests = step.num_requests;
  view.num_tokens = step.num_tokens;
  view.cu_q = device_lengths ? lists_.device_cu_q() : step.cu_q.data();
  num_segments_ = kind_.ragged ? 2 : 1;
  segments_ = {};
  segments_[0].kv_len = device_lengths ? lists_.device_lens() : lists_.lens().data();
  segments_[0].first_pos = device_lengths ? lists_.device_first_pos() : lists_.first_pos().data();
  if (kind_.ragged) {
    tail_len_.resize(static_cast<size_t>(step.num_requests));
    for (size_t r = 0; r < tail_len_.size(); ++r) tail_len_[r] = step.cu_q[r + 1] - step.cu_q[r];
    segments_[1].source = KvSource::kRagged;
    segments_[1].kv_len = tail_len_.data();
    segments_[1].first_pos = step.prefix_lens.data();
    args_[1].ragged.indptr = lists_.device_cu_q();
  }
  if (kind_.mask == MaskKind::kCustom) plan_tree(step, view, stream);
  view.segments = std::span(segments_).first(num_segments_);
  plan_.emplace(folio::plan(op_, view, *buffer_, stream));
}

void KvReading::check_plans() {
  if (ranks_) {
    ranks_->check();
  } else {
    folio::check_plans(*buffer_);
  }
}

size_t KvReading::workspace_bytes() const {
  if (!ranks_) return workspace_size(op_);
  if (fixed_) return ranks_->workspace_size();
  return rank_plan_ ? ranks_->workspace_size(rank_plan_->plan) : 0;
}

void KvReading::init_workspace(Workspace workspace, Stream stream) {
  if (!ranks_) folio::init_workspace(op_, workspace, stream);
}

void KvReading::check_pages(int64_t num_pages) {
  if (!on_host_ || (checked_pages_ > 0 && checked_pages_ <= num_pages)) return;
  for (const int32_t page : lists_.wrapper().kv_indices) {
    core::require(page >= 0 && page < num_pages, "the step's lists have ", kind_.page_size == 1 ? "slot " : "page ",
                  page, "; the pool has ", num_pages);
  }
  checked_pages_ = num_pages;
}

void KvReading::plan_tree(const Step& step, BatchView& view, Stream stream) {
  if (is_windowed_tree()) {
    const std::span<const uint8_t> tree = on_host_ ? step.spec_info.tree_mask : step.spec_info.tree_mask_cpu;
    core::require(!tree.empty() || step.num_requests == 0, "spec_info.tree_mask_cpu is empty; on a GPU the bits of ",
                  "trees with a sliding window are made from it");
    window_tree_mask(tree, step.draft_token_num, *config_->sliding_window_size, lists_.lens(), lists_.first_pos(),
                     step.seq_lens, own_mask_);
    mask_ = own_mask_;
    if (!on_host_) {
      gpu_mask_.reserve(own_mask_.size());
      backends::gpu::upload(op_.context().device().index, gpu_mask_.data(), own_mask_.data(), own_mask_.size(), stream);
      mask_ = {gpu_mask_.as<uint8_t>(), own_mask_.size()};
    }
    view.custom_mask.scope = CustomMaskScope::kAll;
    return;
  }
  tail_len_.assign(static_cast<size_t>(step.num_requests), step.draft_token_num);
  view.custom_mask.scope = CustomMaskScope::kTail;
  view.custom_mask.tail_len = tail_len_.data();
  mask_ = step.spec_info.tree_mask;
}

void KvReading::run(const LayerCall& call, Workspace workspace, Stream stream) {
  args_[0].cache = call.cache;
  args_[0].k_scale = call.k_scale;
  args_[0].v_scale = call.v_scale;
  if (kind_.ragged && !ranks_) {
    args_[1].ragged.k = call.k;
    args_[1].ragged.v = call.v;
  }
  AttentionArgs args;
  args.q = call.q;
  args.out = call.out;
  args.segments = std::span(args_).first(num_segments_);
  args.sm_scale = call.sm_scale;
  args.logits_soft_cap = call.logit_cap;
  if (rank_plan_) {
    run_dcp(*rank_plan_, args, call.k, call.v, workspace, stream);
    return;
  }
  if (kind_.mask == MaskKind::kCustom) {
    args.custom_mask = mask_.data();
    args.custom_mask_bytes = static_cast<int64_t>(mask_.size());
  }
  folio::run(*plan_, args, workspace, stream);
}

}  // namespace folio::inline v0::backends::token_pool
