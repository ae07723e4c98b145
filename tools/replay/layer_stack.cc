#include "replay/layer_stack.hpp"

#include <algorithm>
#include <utility>

#include "replay/gpu.hpp"

namespace folio::replay {
namespace {

BatchView view_of(const StepBatch& batch, std::span<const KvSegment> segments) {
  BatchView view;
  view.num_requests = batch.num_requests();
  view.num_tokens = batch.num_tokens();
  view.cu_q = batch.cu_q.data();
  view.segments = segments;
  return view;
}

backends::StepCascadeOptions cascade_options(const StackConfig& config, const Context& context) {
  backends::StepCascadeOptions options;
  options.mode = config.cascade;
  options.num_sms = context.concurrency();
  return options;
}

}  // namespace

LayerStack::Group::Group(const Context& context, const AttentionConfig& attention, const StackConfig& config)
    : op(prepare(context, attention)), buffer(make_plan_buffer(op)), alone(make_plan_buffer(op)) {
  if (config.cascade == backends::CascadeMode::kOff) return;
  cascade.emplace(std::span(&op, 1), cascade_options(config, context));
}

LayerStack::LayerStack(const Context& context, const StackConfig& config)
    : context_(context),
      config_(config),
      inputs_(context, config),
      arrays_{StepArray(context), StepArray(context), StepArray(context)} {
  make_ops();
  if (!config.plan_only) make_pool();
}

void LayerStack::make_ops() {
  AttentionConfig attention;
  attention.num_q_heads = config_.num_q_heads;
  attention.num_kv_heads = config_.num_kv_heads;
  attention.head_dim_qk = config_.head_dim_qk;
  attention.head_dim_v = config_.head_dim_v;
  attention.q = config_.q;
  attention.kv = config_.kv;
  attention.out = config_.out();
  attention.page_size = config_.page_size;
  attention.determinism = config_.determinism;
  if (config_.logits_soft_cap != 0.0f) attention.features = Feature::kSoftCap;
  attention.kv_format = choose_format(config_.layout, attention, context_);
  if (config_.latent && (attention.kv_format != KvFormat::kStrided || config_.kv == DType::kInt8)) {
    throw Error(ErrorCode::kUnsupported,
                "values inside keys (MLA) take strided caches without token scales: --kv-format, --kv-dtype");
  }
  format_ = attention.kv_format;
  const bool windowed = config_.window_left >= 0;
  for (const bool window : {true, false}) {
    const bool wanted = window ? windowed : !windowed || config_.full_every != 0;
    if (!wanted) continue;
    attention.window_left = window ? config_.window_left : -1;
    stacks_.emplace_back(context_, attention, config_);
  }
  size_t bytes = 0;
  for (const Group& group : stacks_) bytes = std::max(bytes, workspace_size(group.op));
  reserve_workspace(bytes);
}

void LayerStack::reserve_workspace(size_t bytes) {
  workspace_ = MappedMemory::on(context_, bytes);
  for (const Group& group : stacks_) init_workspace(group.op, {workspace_.data(), workspace_.bytes()});
}

void LayerStack::make_pool() {
  // Views of latent caches have V in K's place: as many components first, then those that are a value's.
  const int32_t dim_v = config_.latent ? config_.head_dim_qk : config_.head_dim_v;
  const KvCacheShape shape{config_.num_pages, config_.page_size, config_.num_kv_heads, config_.head_dim_qk, dim_v,
                           config_.kv};
  const size_t k_bytes = bytes_of(k_elements(shape), config_.kv);
  const size_t v_bytes = config_.latent ? 0 : bytes_of(v_elements(shape), config_.kv);
  pool_ = MappedMemory::of_cache_on(context_, static_cast<size_t>(config_.num_layers) * (k_bytes + v_bytes));
  const bool int8 = config_.kv == DType::kInt8;
  const int64_t scales = int8 ? token_scale_elements(shape) : 0;
  token_scales_ = MappedMemory::on(context_, static_cast<size_t>(2 * config_.num_layers * scales) * sizeof(float));
  auto* scales_at = reinterpret_cast<float*>(token_scales_.data());
  std::byte* at = pool_.data();
  for (int32_t layer = 0; layer < config_.num_layers; ++layer, at += k_bytes + v_bytes, scales_at += 2 * scales) {
    const auto make = [&](auto... token_scales) {
      if (format_ == KvFormat::kCpuPacked) return make_cpu_packed_view(shape, at, at + k_bytes, token_scales...);
      const bool hnd = config_.layout == KvLayout::kStridedHnd;
      std::byte* const v = config_.latent ? at : at + k_bytes;
      return hnd ? make_hnd_view(shape, at, v, token_scales...) : make_nhd_view(shape, at, v, token_scales...);
    };
    caches_.push_back(int8 ? make(scales_at, scales_at + scales) : make());
    caches_.back().head_dim_v = config_.head_dim_v;
  }
}

void LayerStack::place(const StepBatch& batch) {
  slots_ = arrays_[0].place(std::span<const int64_t>(batch.slots));
  indices_ = arrays_[1].place(std::span<const int32_t>(batch.indices));
  indptr_ = arrays_[2].place(std::span<const int32_t>(batch.indptr));
}

/// Not csr_table, which reads the array of offsets.
PageTableView LayerStack::step_table() const {
  PageTableView table;
  table.kind = PageTableKind::kCsr;
  table.indices = indices_.data();
  table.num_indices = static_cast<int64_t>(indices_.size());
  table.indptr = indptr_.data();
  table.num_rows = static_cast<int32_t>(indptr_.size()) - 1;
  return table;
}

void LayerStack::write_layer(const StepBatch& batch, int32_t layer) {
  CacheWriteArgs args;
  args.k = inputs_.k(batch.num_tokens());
  args.v = inputs_.v(batch.num_tokens());
  args.slot_mapping = slots_.data();
  args.num_slots = batch.num_tokens();
  args.cache = cache(layer);
  args.k_scale = args.v_scale = cache_scale(config_.kv);
  write_kv_cache(context_, args);
}

void LayerStack::attend_layer(const StepBatch& batch, const AttentionPlan& plan, int32_t layer) {
  const Cascade* const keys = stacks_[group_of(layer)].keys;
  segments_.resize(keys != nullptr ? keys->segments.size() : 1);
  for (size_t s = 0; s < segments_.size(); ++s) {
    segments_[s].cache = cache(layer);
    segments_[s].table = keys != nullptr ? keys->tables[s] : step_table();
    segments_[s].k_scale = segments_[s].v_scale = cache_scale(config_.kv);
  }
  AttentionArgs args;
  args.q = inputs_.q(batch.num_tokens());
  args.out = inputs_.out(batch.num_tokens());
  args.segments = segments_;
  args.logits_soft_cap = config_.logits_soft_cap;
  run(plan, args, {workspace_.data(), workspace_.bytes()});
}

AttentionPlan LayerStack::make_group_plan(const StepBatch& batch, size_t group) {
  Group& of = stacks_[group];
  if (!of.cascade) {
    KvSegment whole;
    whole.kv_len = batch.kv_len.data();
    return plan(of.op, view_of(batch, {&whole, 1}), of.buffer);
  }
  int32_t common_prefix = 0;
  if (config_.cascade == backends::CascadeMode::kHeuristic) {
    common_prefix = batch.common_prefix_pages(finder_, full_pages_, config_.page_size) * config_.page_size;
  }
  CascadeBatch rows;
  rows.num_requests = batch.num_requests();
  rows.cu_q = batch.cu_q.data();
  rows.kv_len = batch.kv_len.data();
  rows.table = csr_table(batch.indices, batch.indptr);
  if (gpu::is_gpu(context_)) rows.device_indices = indices_.data();
  of.keys = &of.cascade->plan(common_prefix, rows);
  const AttentionPlan made = plan(of.op, view_of(batch, of.keys->segments), of.buffer);
  if (!config_.plan_only && shares_keys(of) && workspace_size(made) > workspace_.bytes())
    reserve_workspace(workspace_size(made));
  return made;
}

int32_t LayerStack::layers_of(size_t group) const {
  int32_t layers = 0;
  for (int32_t layer = 0; layer < config_.num_layers; ++layer) layers += group_of(layer) == group ? 1 : 0;
  return layers;
}

void LayerStack::count_work(const StepBatch& batch, size_t group, const AttentionPlan& made) {
  Group& of = stacks_[group];
  const bool shares = shares_keys(of);
  const int32_t layers = layers_of(group);
  work_.add_plan(config_, made, layers);
  ++work_.plans;
  work_.plans_with_cascade += shares ? 1 : 0;
  KvSegment whole;
  whole.kv_len = batch.kv_len.data();
  work_.add_plan_alone(config_, shares ? plan(of.op, view_of(batch, {&whole, 1}), of.alone) : made, layers);
}

void LayerStack::fill(const StepBatch& batch) {
  place(batch);
  inputs_.make_kv(batch, 0);
  write_layer(batch, 0);
  gpu::wait(context_);
}

void LayerStack::step(const StepBatch& batch, PhaseClock& clock, const OutputObserver& observe) {
  clock.begin();
  place(batch);
  std::vector<AttentionPlan> plans;
  for (size_t group = 0; group < stacks_.size(); ++group) plans.push_back(make_group_plan(batch, group));
  gpu::wait(context_);
  clock.end(Phase::kPlan);
  for (size_t group = 0; group < stacks_.size(); ++group) count_work(batch, group, plans[group]);
  if (config_.plan_only) return;
  work_.add_writes(config_, batch.num_tokens());
  for (int32_t layer = 0; layer < config_.num_layers; ++layer) {
    inputs_.make_kv(batch, layer);
    inputs_.make_q(batch, layer);
    clock.end(Phase::kInputs, layer);
    write_layer(batch, layer);
    gpu::wait(context_);
    clock.end(Phase::kWrite, layer);
    attend_layer(batch, plans[group_of(layer)], layer);
    gpu::wait(context_);
    clock.end(Phase::kRun, layer);
    const Group& of = stacks_[group_of(layer)];
    LayerOutput output = inputs_.output(layer, batch.num_tokens());
    output.fp8_mma_from = fp8_rows_.least_queries(of.op, batch, shares_keys(of));
    observe(batch, output);
    clock.end(Phase::kChecks, layer);
  }
}

}  // namespace folio::replay
