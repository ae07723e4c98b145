#include "replay/backend_stack.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "folio/backends/flashinfer.hpp"
#include "replay/memory.hpp"
#include "replay/step_inputs.hpp"

namespace folio::replay {
namespace {

using namespace backends;  // NOLINT(google-build-using-namespace): the whole file is about them

/// What BackendStack asks of a backend: its types, the cache of a layer, and which plans a step has.
struct FlashInfer {
  using Impl = FlashInferImpl;
  using Builder = FlashInferMetadataBuilder;
  using Metadata = FlashInferMetadata;
  using LayerConfig = FlashInferLayerConfig;
  using Options = FlashInferOptions;

  static TensorView cache_tensor(void* data, const StackConfig& config, KvCacheLayout layout) {
    return FlashInferBackend::kv_cache_tensor(
        data, config.kv,
        FlashInferBackend::get_kv_cache_shape(config.num_pages, config.page_size, config.num_kv_heads,
                                              config.head_dim_qk),
        layout);
  }
  static KvCacheView cache_view(const TensorView& tensor, DType dtype) {
    return FlashInferBackend::kv_cache_view(tensor, dtype);
  }
  static Options options(const StackConfig& config) {
    Options options;
    options.quantize_query = is_fp8(config.q);
    return options;
  }
  static TensorView forward(const Impl& impl, const AttentionLayerScales& scales, const StepInputs& inputs,
                            const TensorView& cache, const Metadata& metadata) {
    const int32_t tokens = metadata.num_actual_tokens;
    return impl.forward(scales, inputs.q(tokens), inputs.k(tokens), inputs.v(tokens), cache, &metadata,
                        inputs.out(tokens));
  }
  template <typename Visit>
  static void for_each_plan(const Metadata& metadata, const Visit& visit) {
    for (const std::optional<WindowPlan>& planned : metadata.plans) {
      if (planned) visit(planned->window_left, planned->plan);
    }
  }
};

/// The name that engines give a cache dtype.
std::string cache_dtype_name(DType kv, DType model) {
  return kv == model ? "auto" : std::string(to_string(kv));
}

template <typename Backend>
class BackendStack final : public AttentionStack {
 public:
  BackendStack(const Context& context, const StackConfig& config)
      : context_(context), config_(config), inputs_(config) {
    make_pool();
    make_layers();
    describe();
  }

  void order(std::vector<StepItem>& items) override {
    scheduled_.clear();
    computed_.clear();
    for (const StepItem& item : items) {
      scheduled_.push_back(item.count);
      computed_.push_back(item.first);
    }
    builder_->reorder_batch(scheduled_, computed_, [&](int32_t a, int32_t b) {
      std::swap(items[static_cast<size_t>(a)], items[static_cast<size_t>(b)]);
    });
  }

  void step(const StepBatch& batch, PhaseClock& clock, const OutputObserver& observe) override {
    fill_block_table(batch);
    clock.begin();
    const typename Backend::Metadata metadata = builder_->build(/*common_prefix_len=*/0, common_metadata(batch));
    clock.end(Phase::kPlan);
    workspace_bytes_ = metadata.workspace.bytes;
    count_work(batch, metadata);
    AttentionLayerScales scales;
    scales.k = scales.v = cache_scale(config_.kv);
    for (int32_t layer = 0; layer < config_.num_layers; ++layer) {
      inputs_.make_kv(context_, batch, layer);
      inputs_.make_q(context_, batch, layer);
      clock.end(Phase::kInputs, layer);
      Backend::forward(*layers_[static_cast<size_t>(layer)], scales, inputs_, tensors_[static_cast<size_t>(layer)],
                       metadata);
      clock.end(Phase::kRun, layer);
      observe(batch, inputs_.output(layer));
      clock.end(Phase::kChecks, layer);
    }
  }

  const StackConfig& config() const override { return config_; }
  const AttentionConfig& attention() const override { return attention_; }
  std::string kernel_name() const override { return builder_->kernel_name(); }
  const WorkCounts& work() const override { return work_; }
  size_t pool_bytes() const override { return pool_.bytes(); }
  size_t workspace_bytes() const override { return workspace_bytes_; }
  /// The builder's workspace counts whole: how much of it was touched is not known here.
  size_t resident_bytes() const override { return pool_.resident_bytes() + workspace_bytes_; }
  const KvCacheView& cache(int32_t layer) const override { return caches_[static_cast<size_t>(layer)]; }

 private:
  void make_pool() {
    const bool hnd = config_.layout == KvLayout::kStridedHnd;
    layout_ = hnd ? KvCacheLayout::kHnd : KvCacheLayout::kNhd;
    const size_t layer_bytes = static_cast<size_t>(config_.num_pages) * (k_page_bytes() + v_page_bytes());
    pool_ = MappedMemory(static_cast<size_t>(config_.num_layers) * layer_bytes);
    for (int32_t layer = 0; layer < config_.num_layers; ++layer) {
      tensors_.push_back(
          Backend::cache_tensor(pool_.data() + static_cast<size_t>(layer) * layer_bytes, config_, layout_));
      caches_.push_back(Backend::cache_view(tensors_.back(), config_.kv));
    }
  }

  void make_layers() {
    const std::string cache_dtype = cache_dtype_name(config_.kv, config_.out());
    std::vector<AttentionLayer<typename Backend::Impl>> named;
    for (int32_t layer = 0; layer < config_.num_layers; ++layer) {
      typename Backend::LayerConfig layer_config;
      layer_config.num_heads = config_.num_q_heads;
      layer_config.head_size = config_.head_dim_qk;
      layer_config.scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim_qk));
      layer_config.num_kv_heads = config_.num_kv_heads;
      if (config_.has_window(layer)) layer_config.sliding_window = config_.window_left + 1;
      layer_config.kv_cache_dtype = cache_dtype;
      layer_config.model_dtype = config_.out();
      if (config_.logits_soft_cap != 0.0f) layer_config.logits_soft_cap = config_.logits_soft_cap;
      layers_.push_back(std::make_unique<typename Backend::Impl>(context_, layer_config));
      named.push_back({fmt::format("model.layers.{}.attn", layer), layers_.back().get()});
    }
    EngineConfig engine;
    engine.model.dtype = config_.out();
    engine.model.num_attention_heads = config_.num_q_heads;
    engine.model.num_kv_heads = config_.num_kv_heads;
    engine.cache.cache_dtype = cache_dtype;
    engine.cache.layout = layout_;
    engine.scheduler.max_num_batched_tokens = config_.max_tokens;
    engine.scheduler.max_num_seqs = config_.max_requests;
    engine.determinism = config_.determinism;
    const AttentionSpec spec{config_.page_size, config_.num_kv_heads, config_.head_dim_qk, config_.kv};
    builder_ = std::make_unique<typename Backend::Builder>(context_, spec, named, engine, Backend::options(config_));
  }

  void describe() {
    attention_.num_q_heads = config_.num_q_heads;
    attention_.num_kv_heads = config_.num_kv_heads;
    attention_.head_dim_qk = attention_.head_dim_v = config_.head_dim_qk;
    attention_.q = config_.q;
    attention_.kv = config_.kv;
    attention_.out = config_.out();
    attention_.page_size = config_.page_size;
    attention_.window_left = config_.window_left;
    attention_.determinism = config_.determinism;
  }

  /// A dense table, as engines keep one; columns grow to the longest request seen.
  void fill_block_table(const StepBatch& batch) {
    const auto rows = static_cast<size_t>(batch.num_requests());
    for (size_t r = 0; r < rows; ++r)
      columns_ = std::max(columns_, static_cast<size_t>(batch.indptr[r + 1] - batch.indptr[r]));
    block_table_.resize(std::max(block_table_.size(), rows * columns_));
    for (size_t r = 0; r < rows; ++r) {
      std::copy(batch.indices.begin() + batch.indptr[r], batch.indices.begin() + batch.indptr[r + 1],
                block_table_.begin() + static_cast<std::ptrdiff_t>(r * columns_));
    }
  }

  CommonAttentionMetadata common_metadata(const StepBatch& batch) const {
    CommonAttentionMetadata common;
    common.query_start_loc = batch.cu_q;
    common.seq_lens = batch.kv_len;
    common.num_reqs = batch.num_requests();
    common.num_actual_tokens = batch.num_tokens();
    for (int32_t r = 0; r < common.num_reqs; ++r) {
      common.max_query_len = std::max(common.max_query_len, common.query_len(r));
      common.max_seq_len = std::max(common.max_seq_len, batch.kv_len[static_cast<size_t>(r)]);
    }
    const auto columns = static_cast<int32_t>(columns_);
    common.block_table = {block_table_.data(), common.num_reqs, columns, columns};
    common.slot_mapping = batch.slots;
    return common;
  }

  void count_work(const StepBatch& batch, const typename Backend::Metadata& metadata) {
    Backend::for_each_plan(metadata, [&](int32_t window_left, const AttentionPlan& plan) {
      int32_t layers = 0;
      for (int32_t layer = 0; layer < config_.num_layers; ++layer)
        layers += (config_.has_window(layer) ? config_.window_left : -1) == window_left ? 1 : 0;
      work_.add_plan(config_, plan, layers);
    });
    work_.add_writes(config_, batch.num_tokens());
  }

  Context context_;
  StackConfig config_;
  KvCacheLayout layout_ = KvCacheLayout::kNhd;
  StepInputs inputs_;
  MappedMemory pool_;
  std::vector<TensorView> tensors_;  ///< a layer's cache as the engine sees it
  std::vector<KvCacheView> caches_;
  std::vector<std::unique_ptr<typename Backend::Impl>> layers_;
  std::unique_ptr<typename Backend::Builder> builder_;
  AttentionConfig attention_;
  WorkCounts work_;
  size_t workspace_bytes_ = 0;
  std::vector<int32_t> scheduled_;
  std::vector<int32_t> computed_;
  std::vector<int32_t> block_table_;
  size_t columns_ = 1;
};

}  // namespace

std::unique_ptr<AttentionStack> make_backend_stack(const Context& context, const StackConfig& config) {
  if (config.layout == KvLayout::kCpuPacked) {
    throw Error(ErrorCode::kUnsupported, fmt::format("the {} backend's caches are strided; --kv-format cpu-packed is "
                                                     "for --backend none",
                                                     to_string(config.backend)));
  }
  if (config.cascade != backends::CascadeMode::kOff) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("the {} backend is replayed without cascades; --cascade {} is for --backend none",
                            to_string(config.backend), to_string(config.cascade)));
  }
  if (config.plan_only) {
    throw Error(ErrorCode::kUnsupported, fmt::format("the {} backend is not replayed without attention; --plan-only is "
                                                     "for --backend none",
                                                     to_string(config.backend)));
  }
  if (config.head_dim_v != config.head_dim_qk) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("head dims are {} and {}; the {} backend has one head size for both", config.head_dim_qk,
                            config.head_dim_v, to_string(config.backend)));
  }
  switch (config.backend) {
    case ServingBackend::kFlashInfer: return std::make_unique<BackendStack<FlashInfer>>(context, config);
    case ServingBackend::kNone: break;
  }
  throw Error(ErrorCode::kInvalidArgument, "no backend was asked for");
}

}  // namespace folio::replay
