#include "replay/layer_stack.hpp"

#include <algorithm>
#include <utility>

#include "replay/synthetic.hpp"

namespace folio::replay {
namespace {

/// fp8 caches are written from bfloat16, as models do; others from their own dtype.
DType given_dtype(DType kv) {
  return is_fp8(kv) ? DType::kBFloat16 : kv;
}

Scale cache_scale(DType kv) {
  Scale scale;
  if (is_fp8(kv)) scale.value = kFp8Scale;
  return scale;
}

/// Calls fill(token) for every token on the context's threads.
template <typename Fill>
void for_each_token(const Context& context, int32_t num_tokens, const Fill& fill) {
  constexpr int32_t kTokensPerTask = 8;
  struct Task {
    const Fill* fill;
    int32_t num_tokens;
  } task{&fill, num_tokens};
  context.parallel_for((num_tokens + kTokensPerTask - 1) / kTokensPerTask,
                       [](void* self, int64_t index) noexcept {
                         const Task& work = *static_cast<const Task*>(self);
                         const auto first = static_cast<int32_t>(index) * kTokensPerTask;
                         for (int32_t t = first; t < std::min(first + kTokensPerTask, work.num_tokens); ++t)
                           (*work.fill)(t);
                       },
                       &task);
}

size_t bytes_of(int64_t elements, DType dtype) {
  return static_cast<size_t>(elements) * static_cast<size_t>(size_of(dtype));
}

}  // namespace

KvFormat choose_format(KvLayout layout, const AttentionConfig& config, const Context& context) {
  constexpr int32_t kLeastPackedPage = 16;  // as KvFormat::kCpuPacked says
  switch (layout) {
    case KvLayout::kRecommended: {
      const KvFormat advice = recommended_kv_format(config, context).format;
      const bool fits =
          advice != KvFormat::kCpuPacked || (config.page_size >= kLeastPackedPage && config.page_size % 2 == 0);
      return fits ? advice : KvFormat::kStrided;
    }
    case KvLayout::kCpuPacked: return KvFormat::kCpuPacked;
    case KvLayout::kStridedNhd:
    case KvLayout::kStridedHnd: break;
  }
  return KvFormat::kStrided;
}

LayerStack::LayerStack(const Context& context, const StackConfig& config) : context_(context), config_(config) {
  make_ops();
  make_pool();
  const int64_t tokens = config.max_tokens;
  k_ = MappedMemory(bytes_of(tokens * config.num_kv_heads * config.head_dim_qk, given_dtype(config.kv)));
  v_ = MappedMemory(bytes_of(tokens * config.num_kv_heads * config.head_dim_v, given_dtype(config.kv)));
  q_ = MappedMemory(bytes_of(tokens * config.num_q_heads * config.head_dim_qk, config.q));
  out_ = MappedMemory(bytes_of(tokens * config.num_q_heads * config.head_dim_v, attention().out));
}

void LayerStack::make_ops() {
  AttentionConfig attention;
  attention.num_q_heads = config_.num_q_heads;
  attention.num_kv_heads = config_.num_kv_heads;
  attention.head_dim_qk = config_.head_dim_qk;
  attention.head_dim_v = config_.head_dim_v;
  attention.q = config_.q;
  attention.kv = config_.kv;
  attention.out = is_fp8(config_.q) ? DType::kBFloat16 : config_.q;
  attention.page_size = config_.page_size;
  attention.determinism = config_.determinism;
  if (config_.logits_soft_cap != 0.0f) attention.features = Feature::kSoftCap;
  attention.kv_format = choose_format(config_.layout, attention, context_);
  format_ = attention.kv_format;
  const bool windowed = config_.window_left >= 0;
  for (const bool window : {true, false}) {
    const bool wanted = window ? windowed : !windowed || config_.full_every != 0;
    if (!wanted) continue;
    attention.window_left = window ? config_.window_left : -1;
    AttentionOp op = prepare(context_, attention);
    PlanBuffer buffer = make_plan_buffer(op);
    stacks_.push_back({std::move(op), std::move(buffer)});
  }
  size_t bytes = 0;
  for (const Group& group : stacks_) bytes = std::max(bytes, workspace_size(group.op));
  workspace_ = MappedMemory(bytes);
  for (const Group& group : stacks_) init_workspace(group.op, {workspace_.data(), workspace_.bytes()});
}

size_t LayerStack::k_page_bytes() const {
  return bytes_of(int64_t{config_.page_size} * config_.num_kv_heads * config_.head_dim_qk, config_.kv);
}

size_t LayerStack::v_page_bytes() const {
  return bytes_of(int64_t{config_.page_size} * config_.num_kv_heads * config_.head_dim_v, config_.kv);
}

void LayerStack::make_pool() {
  const KvCacheShape shape{config_.num_pages,   config_.page_size,  config_.num_kv_heads,
                           config_.head_dim_qk, config_.head_dim_v, config_.kv};
  const size_t k_bytes = bytes_of(k_elements(shape), config_.kv);
  const size_t v_bytes = bytes_of(v_elements(shape), config_.kv);
  pool_ = MappedMemory(static_cast<size_t>(config_.num_layers) * (k_bytes + v_bytes));
  std::byte* at = pool_.data();
  for (int32_t layer = 0; layer < config_.num_layers; ++layer, at += k_bytes + v_bytes) {
    const bool hnd = config_.layout == KvLayout::kStridedHnd;
    if (format_ == KvFormat::kCpuPacked) {
      caches_.push_back(make_cpu_packed_view(shape, at, at + k_bytes));
    } else {
      caches_.push_back(hnd ? make_hnd_view(shape, at, at + k_bytes) : make_nhd_view(shape, at, at + k_bytes));
    }
  }
}

void LayerStack::make_inputs_of_kv(const StepBatch& batch, int32_t layer) {
  const StackConfig& c = config_;
  const DType dtype = given_dtype(c.kv);
  const size_t k_row = bytes_of(c.head_dim_qk, dtype);
  const size_t v_row = bytes_of(c.head_dim_v, dtype);
  for_each_token(context_, batch.num_tokens(), [&](int32_t t) {
    const uint64_t link = batch.rows[static_cast<size_t>(t)].link;
    for (int32_t head = 0; head < c.num_kv_heads; ++head) {
      const auto row = static_cast<size_t>(t) * static_cast<size_t>(c.num_kv_heads) + static_cast<size_t>(head);
      fill_row(kv_row_key(c.seed, InputKind::kKey, link, layer, head), dtype, c.head_dim_qk, k_.data() + row * k_row);
      fill_row(kv_row_key(c.seed, InputKind::kValue, link, layer, head), dtype, c.head_dim_v, v_.data() + row * v_row);
    }
  });
}

void LayerStack::make_inputs_of_q(const StepBatch& batch, int32_t layer) {
  const StackConfig& c = config_;
  const size_t q_row = bytes_of(c.head_dim_qk, c.q);
  for_each_token(context_, batch.num_tokens(), [&](int32_t t) {
    const TokenRow& token = batch.rows[static_cast<size_t>(t)];
    for (int32_t head = 0; head < c.num_q_heads; ++head) {
      const auto row = static_cast<size_t>(t) * static_cast<size_t>(c.num_q_heads) + static_cast<size_t>(head);
      fill_row(query_row_key(c.seed, token.request, token.position, layer, head), c.q, c.head_dim_qk,
               q_.data() + row * q_row);
    }
  });
}

void LayerStack::write_layer(const StepBatch& batch, int32_t layer) {
  const DType dtype = given_dtype(config_.kv);
  CacheWriteArgs args;
  args.k = ConstTensorView(k_.data(), dtype, {batch.num_tokens(), config_.num_kv_heads, config_.head_dim_qk});
  args.v = ConstTensorView(v_.data(), dtype, {batch.num_tokens(), config_.num_kv_heads, config_.head_dim_v});
  args.slot_mapping = batch.slots.data();
  args.num_slots = batch.num_tokens();
  args.cache = cache(layer);
  args.k_scale = args.v_scale = cache_scale(config_.kv);
  write_kv_cache(context_, args);
}

void LayerStack::attend_layer(const StepBatch& batch, const AttentionPlan& plan, int32_t layer) {
  SegmentArgs segment;
  segment.cache = cache(layer);
  segment.table = csr_table(batch.indices, batch.indptr);
  segment.k_scale = segment.v_scale = cache_scale(config_.kv);
  AttentionArgs args;
  args.q = ConstTensorView(q_.data(), config_.q, {batch.num_tokens(), config_.num_q_heads, config_.head_dim_qk});
  args.out = TensorView(out_.data(), attention().out, {batch.num_tokens(), config_.num_q_heads, config_.head_dim_v});
  args.segments = std::span<const SegmentArgs>(&segment, 1);
  args.logits_soft_cap = config_.logits_soft_cap;
  run(plan, args, {workspace_.data(), workspace_.bytes()});
}

AttentionPlan LayerStack::make_group_plan(const StepBatch& batch, size_t group) {
  KvSegment segment;
  segment.kv_len = batch.kv_len.data();
  BatchView view;
  view.num_requests = batch.num_requests();
  view.num_tokens = batch.num_tokens();
  view.cu_q = batch.cu_q.data();
  view.segments = std::span<const KvSegment>(&segment, 1);
  return plan(stacks_[group].op, view, stacks_[group].buffer);
}

void LayerStack::count_work(const StepBatch& batch, const AttentionPlan& plan, int32_t layers) {
  const PlanSummary totals = summary(plan);
  const double per_pair = 2.0 * (config_.head_dim_qk + config_.head_dim_v);
  const auto token_bytes = static_cast<int64_t>(bytes_of(config_.head_dim_qk + config_.head_dim_v, config_.kv));
  work_.flops += per_pair * static_cast<double>(totals.qk_pairs) * layers;
  work_.kv_bytes_read += totals.kv_tokens_read * token_bytes * layers;
  work_.kv_bytes_written += token_bytes * config_.num_kv_heads * batch.num_tokens() * layers;
}

void LayerStack::fill(const StepBatch& batch) {
  make_inputs_of_kv(batch, 0);
  write_layer(batch, 0);
}

void LayerStack::step(const StepBatch& batch, PhaseClock& clock, const OutputObserver& observe) {
  const auto group_of = [&](int32_t layer) {
    return stacks_.size() == 2 && !config_.has_window(layer) ? size_t{1} : size_t{0};
  };
  clock.begin();
  std::vector<AttentionPlan> plans;
  for (size_t group = 0; group < stacks_.size(); ++group) {
    int32_t layers = 0;
    for (int32_t layer = 0; layer < config_.num_layers; ++layer) layers += group_of(layer) == group ? 1 : 0;
    plans.push_back(make_group_plan(batch, group));
    count_work(batch, plans.back(), layers);
  }
  clock.end(Phase::kPlan);
  LayerOutput output;
  output.dtype = attention().out;
  output.data = out_.data();
  output.row_bytes = bytes_of(int64_t{config_.num_q_heads} * config_.head_dim_v, output.dtype);
  for (output.layer = 0; output.layer < config_.num_layers; ++output.layer) {
    make_inputs_of_kv(batch, output.layer);
    make_inputs_of_q(batch, output.layer);
    clock.end(Phase::kInputs, output.layer);
    write_layer(batch, output.layer);
    clock.end(Phase::kWrite, output.layer);
    attend_layer(batch, plans[group_of(output.layer)], output.layer);
    clock.end(Phase::kRun, output.layer);
    observe(batch, output);
    clock.end(Phase::kChecks, output.layer);
  }
}

std::string_view to_string(KvLayout layout) {
  switch (layout) {
    case KvLayout::kRecommended: return "recommended";
    case KvLayout::kStridedNhd: return "strided-nhd";
    case KvLayout::kStridedHnd: return "strided-hnd";
    case KvLayout::kCpuPacked: return "cpu-packed";
  }
  return "invalid";
}

}  // namespace folio::replay
