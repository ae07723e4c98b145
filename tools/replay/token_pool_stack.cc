#include "replay/token_pool_stack.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "folio/backends/token_pool.hpp"
#include "folio/backends/token_pool/draft_tree.hpp"
#include "replay/gpu.hpp"
#include "replay/mapped_kv_pool.hpp"
#include "replay/step_array.hpp"
#include "replay/step_inputs.hpp"

namespace folio::replay {
namespace {

using backends::ForwardBatch;
using backends::ForwardMode;
using backends::RadixAttention;
using backends::TokenPoolBackend;
using backends::TokenPoolConfig;

AttentionConfig describe(const StackConfig& config, const Context& context) {
  AttentionConfig attention;
  attention.num_q_heads = config.num_q_heads;
  attention.num_kv_heads = config.num_kv_heads;
  attention.head_dim_qk = config.head_dim_qk;
  attention.head_dim_v = config.head_dim_v;
  attention.q = config.q;
  attention.kv = config.kv;
  attention.out = config.out();
  attention.page_size = config.page_size;
  attention.window_left = config.window_left;
  attention.determinism = config.determinism;
  if (config.logits_soft_cap != 0.0f) attention.features = Feature::kSoftCap;
  attention.kv_format = choose_format(config.layout, attention, context);
  return attention;
}

/// `table`, `window_table`: the request tables where the context's kernels read them.
TokenPoolConfig backend_config(const StackConfig& config, KvFormat format, const TokenKeeper& keeper,
                               const int32_t* table, const int32_t* window_table) {
  TokenPoolConfig made;
  made.num_heads = config.num_q_heads;
  made.num_kv_heads = config.num_kv_heads;
  made.head_dim = config.head_dim_qk;
  made.v_head_dim = config.head_dim_v;
  made.kv_cache_dtype = config.kv;
  made.q_dtype = config.q;
  made.kv_format = format;
  made.page_size = config.page_size;
  made.max_context_len = keeper.rows().max_context_len();
  made.req_to_token = keeper.rows().table();
  made.req_to_token.indices = table;
  made.max_req_pool_size = keeper.rows().size();
  if (config.window_left >= 0) made.sliding_window_size = config.window_left;
  made.window_req_to_token = keeper.window_rows();
  made.window_req_to_token.indices = window_table;
  made.logit_cap = config.logits_soft_cap != 0.0f;
  made.determinism = config.determinism;
  // The checks follow values as the cache has them; read from k and v they would not be rounded to fp8 yet.
  if (is_fp8(config.kv)) made.extend_path = backends::ExtendPath::kPaged;
  return made;
}

class TokenPoolStack final : public AttentionStack {
 public:
  TokenPoolStack(const Context& context, const StackConfig& config, const TokenKeeper& keeper)
      : context_(context),
        config_(config),
        keeper_(keeper),
        attention_(describe(config, context)),
        inputs_(context, config),
        table_(context),
        window_table_(context),
        backend_(context, backend_config(config, attention_.kv_format, keeper, placed(table_, keeper.rows().table()),
                                         placed(window_table_, keeper.window_rows()))) {
    make_pools();
    for (int32_t layer = 0; layer < config.num_layers; ++layer) {
      RadixAttention& made = layers_.emplace_back();
      made.num_heads = config.num_q_heads;
      made.head_dim = config.head_dim_qk;
      made.scaling = 1.0f / std::sqrt(static_cast<float>(config.head_dim_qk));
      made.num_kv_heads = config.num_kv_heads;
      made.layer_id = place_of(layer).index;
      made.logit_cap = config.logits_soft_cap;
      made.v_head_dim = config.head_dim_v;
      if (config.has_window(layer)) made.sliding_window_size = config.window_left;
    }
  }

  void order(std::vector<StepItem>&) override {}

  /// Keys and values are written by the layers' forwards: there is no time of its own for it.
  void step(const StepBatch& batch, PhaseClock& clock, const OutputObserver& observe) override {
    const int32_t tokens = batch.num_tokens();
    clock.begin();
    const ForwardBatch forward = place(describe_step(batch));
    backend_.init_forward_metadata(forward);
    gpu::wait(context_);
    clock.end(Phase::kPlan);
    count_work(batch);
    for (int32_t layer = 0; layer < config_.num_layers; ++layer) {
      inputs_.make_kv(batch, layer);
      inputs_.make_q(batch, layer);
      clock.end(Phase::kInputs, layer);
      layers_[static_cast<size_t>(layer)].forward(backend_, inputs_.q(tokens), inputs_.k(tokens), inputs_.v(tokens),
                                                  forward, inputs_.out(tokens));
      gpu::wait(context_);
      clock.end(Phase::kRun, layer);
      observe(batch, inputs_.output(layer, tokens));
      clock.end(Phase::kChecks, layer);
    }
  }

  const StackConfig& config() const override { return config_; }
  const AttentionConfig& attention() const override { return attention_; }
  std::string kernel_name() const override { return backend_.kernel_name(); }
  const WorkCounts& work() const override { return work_; }
  size_t pool_bytes() const override { return pool_bytes_; }
  size_t workspace_bytes() const override { return backend_.workspace()->bytes(); }
  /// The workspace counts whole: how much of it was touched is not known here.
  size_t resident_bytes() const override {
    return pool_.resident_bytes() + window_pool_.resident_bytes() + workspace_bytes();
  }
  const KvCacheView& cache(int32_t layer) const override {
    const Place place = place_of(layer);
    return (place.own_pool ? window_pool_ : pool_).pool().view(place.index);
  }

 private:
  /// Which of its pool's layers a layer is; `own_pool`: of the windowed layers'.
  struct Place {
    bool own_pool = false;
    int32_t index = 0;
  };
  Place place_of(int32_t layer) const {
    if (!keeper_.windowed()) return {false, layer};
    Place place{config_.has_window(layer), 0};
    for (int32_t before = 0; before < layer; ++before)
      place.index += config_.has_window(before) == place.own_pool ? 1 : 0;
    return place;
  }

  void make_pools() {
    int32_t windowed = 0;
    for (int32_t layer = 0; layer < config_.num_layers && keeper_.windowed(); ++layer)
      windowed += config_.has_window(layer) ? 1 : 0;
    const int32_t full = config_.num_layers - windowed;
    const KvFormat format = attention_.kv_format;
    // A pool has a layer at least; where every layer has the window nobody writes to this one.
    pool_ = MappedKvPool(context_, config_, format, std::max(1, full), keeper_.num_pages());
    if (full > 0) pool_bytes_ += pool_.bytes();
    if (!keeper_.windowed()) return;
    window_pool_ = MappedKvPool(context_, config_, format, windowed, keeper_.window_use().pages);
    pool_bytes_ += window_pool_.bytes();
  }

  /// A request table where the context's kernels read it: its address stays, because its size does. Null without one.
  static const int32_t* placed(StepArray& array, const PageTableView& table) {
    if (table.indices == nullptr) return nullptr;
    return array.place(std::span(table.indices, static_cast<size_t>(table.num_indices))).data();
  }

  /// The same batch with the arrays of a GPU, and the host's beside them.
  ForwardBatch place(ForwardBatch batch) {
    if (!gpu::is_gpu(context_)) return batch;
    placed(table_, keeper_.rows().table());
    placed(window_table_, keeper_.window_rows());
    batch.seq_lens_cpu = batch.seq_lens;
    batch.extend_prefix_lens_cpu = batch.extend_prefix_lens;
    batch.seq_lens = arrays_[0].place(batch.seq_lens);
    batch.extend_prefix_lens = arrays_[1].place(batch.extend_prefix_lens);
    batch.req_pool_indices = arrays_[2].place(batch.req_pool_indices);
    batch.out_cache_loc = arrays_[3].place(batch.out_cache_loc);
    batch.window_out_cache_loc = arrays_[5].place(batch.window_out_cache_loc);
    batch.spec_info.tree_mask_cpu = batch.spec_info.tree_mask;
    batch.spec_info.tree_mask = arrays_[4].place(batch.spec_info.tree_mask);
    return batch;
  }

  ForwardBatch describe_step(const StepBatch& batch) {
    const auto requests = static_cast<size_t>(batch.num_requests());
    rows_.clear();
    prefix_lens_.clear();
    slots_.assign(batch.slots.begin(), batch.slots.end());
    bool decodes = true;
    for (size_t r = 0; r < requests; ++r) {
      const auto first = static_cast<size_t>(batch.cu_q[r]);
      const int32_t count = batch.cu_q[r + 1] - batch.cu_q[r];
      const int32_t request = batch.rows[first].request;
      rows_.push_back(keeper_.row_of(request));
      prefix_lens_.push_back(batch.kv_len[r] - count);
      decodes = decodes && count == 1;
      const int32_t shared = std::min(keeper_.stored_from(request), batch.kv_len[r]) - prefix_lens_.back();
      std::fill_n(slots_.begin() + batch.cu_q[r], std::max(0, shared), -1);
    }
    ForwardBatch forward;
    forward.batch_size = batch.num_requests();
    forward.req_pool_indices = rows_;
    forward.out_cache_loc = slots_;
    forward.token_to_kv_pool = &pool_.pool();
    if (keeper_.windowed()) {
      const std::vector<int32_t> full(slots_.begin(), slots_.end());
      window_copies_.resize(full.size());
      keeper_.to_window(full, window_copies_);
      window_slots_.assign(window_copies_.begin(), window_copies_.end());
      forward.window_token_to_kv_pool = &window_pool_.pool();
      forward.window_out_cache_loc = window_slots_;
    }
    if (batch.draft_tokens > 0) {
      describe_drafts(batch, forward);
      return forward;
    }
    forward.forward_mode = decodes ? ForwardMode::kDecode : ForwardMode::kMixed;
    forward.seq_lens = batch.kv_len;
    if (!decodes) forward.extend_prefix_lens = prefix_lens_;
    return forward;
  }

  /// Chains need no mask; they are causal.
  void describe_drafts(const StepBatch& batch, ForwardBatch& forward) {
    const int32_t nodes = batch.draft_tokens;
    forward.forward_mode = ForwardMode::kTargetVerify;
    forward.seq_lens = prefix_lens_;
    forward.spec_info.draft_token_num = nodes;
    if (config_.draft_topk == 1) return;
    const DraftOptions tree{nodes, config_.draft_topk};
    parents_.clear();
    for (int32_t r = 0; r < batch.num_requests(); ++r) {
      for (int32_t node = 0; node < nodes; ++node) parents_.push_back(tree.parent(node));
    }
    const auto form = backends::TreeMaskForm::kTailBits;
    tree_mask_.resize(static_cast<size_t>(backends::tree_mask_bytes(form, prefix_lens_, nodes)));
    backends::fill_tree_mask(form, parents_, prefix_lens_, nodes, tree_mask_);
    forward.spec_info.tree_mask = tree_mask_;
  }

  /// From lengths: each request's keys once a layer and KV head, whatever tiles the plans have.
  void count_work(const StepBatch& batch) {
    const double per_pair = 2.0 * (config_.head_dim_qk + config_.head_dim_v) * config_.num_q_heads;
    const int64_t token_bytes =
        int64_t{config_.head_dim_qk + config_.head_dim_v} * size_of(config_.kv) * config_.num_kv_heads;
    for (int32_t layer = 0; layer < config_.num_layers; ++layer) {
      const int64_t visible = config_.has_window(layer) ? int64_t{config_.window_left} + 1 : int64_t{1} << 40;
      for (size_t r = 0; r < batch.kv_len.size(); ++r) {
        const int64_t end = batch.kv_len[r];
        const int64_t count = batch.cu_q[r + 1] - batch.cu_q[r];
        for (int64_t key = end - count + 1; key <= end; ++key)
          work_.flops += per_pair * static_cast<double>(std::min(key, visible));
        work_.kv_bytes_read += token_bytes * std::min(end, visible + count - 1);
      }
    }
    work_.kv_bytes_read_alone = work_.kv_bytes_read;
    for (const int64_t slot : slots_) work_.kv_bytes_written += slot >= 0 ? token_bytes * config_.num_layers : 0;
  }

  Context context_;
  StackConfig config_;
  const TokenKeeper& keeper_;
  AttentionConfig attention_;
  StepInputs inputs_;
  MappedKvPool pool_, window_pool_;
  size_t pool_bytes_ = 0;
  StepArray table_, window_table_;
  std::array<StepArray, 6> arrays_{StepArray(context_), StepArray(context_), StepArray(context_),
                                   StepArray(context_), StepArray(context_), StepArray(context_)};
  TokenPoolBackend backend_;
  std::vector<RadixAttention> layers_;
  WorkCounts work_;
  std::vector<int32_t> rows_, prefix_lens_, parents_;
  std::vector<uint8_t> tree_mask_;
  std::vector<int32_t> window_copies_;
  std::vector<int64_t> slots_, window_slots_;
};

void check(const StackConfig& config) {
  const auto refuse = [](const std::string& why) { throw Error(ErrorCode::kUnsupported, why); };
  if (config.ranks != 1) {
    refuse("the token_pool backend is replayed on one rank; --ranks is for --backend flashinfer and flash_attn");
  }
  if (config.cascade != backends::CascadeMode::kOff) {
    refuse(fmt::format("the token_pool backend is replayed without cascades; --cascade {} is for the others",
                       to_string(config.cascade)));
  }
  if (config.plan_only) {
    refuse("the token_pool backend is not replayed without attention; --plan-only is for the others");
  }
}

}  // namespace

std::unique_ptr<AttentionStack> make_token_pool_stack(const Context& context, const StackConfig& config,
                                                      const TokenKeeper& keeper) {
  check(config);
  return std::make_unique<TokenPoolStack>(context, config, keeper);
}

}  // namespace folio::replay
