#pragma once

// The engine's requests through the FlashInfer backend: one layer and its builder.
#include <optional>

#include "folio/backends/flashinfer.hpp"
#include "serving_step.hpp"

namespace serving {

class FlashInferServing {
 public:
  FlashInferServing(FuzzInput& input, const folio::AttentionConfig& config, const folio::KvPool& pool)
      : config_(config), pool_(pool), features_(take_features(input, config.num_q_heads)) {
    using namespace folio::backends;
    hnd_ = pool.config().layout == folio::KvPoolLayout::kHeadMajor;
    const folio::KvCacheView& view = pool.view(0);
    const std::array<int64_t, 5> shape =
        FlashInferBackend::get_kv_cache_shape(view.num_pages, view.page_size, view.num_kv_heads, view.head_dim_qk);
    cache_ = folio::TensorView(view.k, folio::DType::kFloat32, {});
    cache_.rank = 5;
    cache_.shape = shape;
    cache_.strides = {view.k_strides.page, static_cast<float*>(view.v) - static_cast<float*>(view.k),
                      view.k_strides.token, view.k_strides.head, 1};
    FlashInferLayerConfig layer;
    layer.num_heads = config.num_q_heads;
    layer.head_size = config.head_dim_qk;
    layer.scale = features_.sm_scale;
    layer.num_kv_heads = config.num_kv_heads;
    layer.alibi_slopes = features_.alibi_slopes;
    if (config.window_left >= 0) layer.sliding_window = config.window_left + 1;
    layer.model_dtype = folio::DType::kFloat32;
    if (features_.logits_soft_cap > 0.0f) layer.logits_soft_cap = features_.logits_soft_cap;
    if (!features_.sinks.empty()) {
      layer.sinks = {features_.sinks.data(), folio::DType::kFloat32, {config.num_q_heads}};
    }
    impl_.emplace(shared_context(), layer);
    EngineConfig engine = engine_config(config, hnd_);
    FlashInferOptions options;
    options.cascade = static_cast<CascadeMode>(input.take_between(0, 2));
    const auto kinds = input.take<uint8_t>();
    if (kinds % 2 != 0) engine.speculative = SpeculativeConfig{1 + kinds / 2 % 3, kinds % 3 == 0};
    if (kinds >= 192) engine.compilation.decode_graph_mode = DecodeGraphMode::kFull;
    if (kinds % 5 == 0) engine.use_block_table_kernels = kinds % 10 == 0;
    cascade_ = options.cascade;
    const AttentionLayer<FlashInferImpl> named{"layer", &*impl_};
    const AttentionSpec spec{config.page_size, config.num_kv_heads, config.head_dim_qk, folio::DType::kFloat32};
    builder_.emplace(shared_context(), spec, std::span(&named, 1), engine, options);
  }
  FlashInferServing(const FlashInferServing&) = delete;
  FlashInferServing& operator=(const FlashInferServing&) = delete;

  void step(FuzzInput& input, std::vector<StepEntry> entries, const std::vector<Request>& requests) {
    drop_unscheduled(entries);
    reorder(entries, requests);
    RunnerBatch batch(make_step(entries, requests, config_), requests, config_);
    const int32_t prefix = input.take<uint8_t>() % 2 == 0
                               ? batch.common_prefix
                               : config_.page_size * input.take_between(0, batch.common_prefix / config_.page_size);
    const auto metadata = builder_->build(prefix, batch.metadata);
    check_metadata(metadata, batch, prefix);
    batch.tokens.spoil(pool_);
    forward(metadata, batch, cache_);
    batch.check(config_, requests, features_);
    // A layer later, the cache holds the keys already; a build later, the metadata is of the past.
    forward(metadata, batch, cache_);
    batch.check(config_, requests, features_);
    static_cast<void>(builder_->build(0, batch.metadata));
    FUZZ_CHECK(refused(folio::ErrorCode::kStalePlan, [&] { forward(metadata, batch, cache_); }));
    FUZZ_CHECK(batch.untouched());
  }

  /// What cannot be is refused and changes nothing: the next step finds the cache as it was.
  void refuse(FuzzInput& input, std::vector<StepEntry> entries, const std::vector<Request>& requests) {
    drop_unscheduled(entries);
    if (entries.empty()) return;
    RunnerBatch batch(make_step(entries, requests, config_), requests, config_);
    const auto kBad = folio::ErrorCode::kInvalidArgument;
    std::vector<int32_t> scratch;
    folio::backends::CommonAttentionMetadata wrong = batch.metadata;
    spoil_batch(input, wrong, scratch);
    FUZZ_CHECK(refused(kBad, [&] { builder_->build(0, wrong); }));
    if (config_.page_size > 1) FUZZ_CHECK(refused(kBad, [&] { builder_->build(1, batch.metadata); }));
    const auto metadata = builder_->build(0, batch.metadata);
    folio::TensorView other = cache_;
    std::swap(other.strides[2], other.strides[3]);
    if (config_.page_size > 1 && config_.num_kv_heads > 1) {
      FUZZ_CHECK(refused(kBad, [&] { forward(metadata, batch, other); }));
    }
    other = cache_;
    other.shape[0] = 0;  // no slot is in it
    if (batch.step.rows() > 0) FUZZ_CHECK(refused(kBad, [&] { forward(metadata, batch, other); }));
    FUZZ_CHECK(batch.untouched());
  }

 private:
  void forward(const folio::backends::FlashInferMetadata& metadata, RunnerBatch& batch,
               const folio::TensorView& cache) const {
    impl_->forward({}, batch.query, batch.tokens.k, batch.tokens.v, cache, &metadata, batch.output);
  }

  /// A runner schedules a token of each request of its batch; what has none counts as padding, of tokens too.
  static void drop_unscheduled(std::vector<StepEntry>& entries) {
    std::erase_if(entries, [](const StepEntry& entry) { return entry.q_len == 0; });
  }

  /// As the runner does before a step: requests that decode come first.
  void reorder(std::vector<StepEntry>& entries, const std::vector<Request>& requests) {
    std::vector<int32_t> scheduled, computed;
    for (const StepEntry& entry : entries) {
      scheduled.push_back(entry.q_len);
      computed.push_back(requests[entry.request].length() - entry.q_len);
    }
    const auto swap = [&](int32_t a, int32_t b) {
      std::swap(entries[static_cast<size_t>(a)], entries[static_cast<size_t>(b)]);
    };
    builder_->reorder_batch(scheduled, computed, swap);
    FUZZ_CHECK(std::is_partitioned(entries.begin(), entries.end(), [&](const StepEntry& entry) {
      return entry.q_len <= builder_->reorder_batch_threshold() && requests[entry.request].length() > entry.q_len;
    }));
  }

  void check_metadata(const folio::backends::FlashInferMetadata& metadata, const RunnerBatch& batch, int32_t prefix) {
    using folio::backends::CascadeMode;
    const auto num_reqs = static_cast<int32_t>(batch.step.requests.size());
    FUZZ_CHECK(metadata.split.num_decodes + metadata.split.num_prefills == num_reqs);
    FUZZ_CHECK(metadata.split.num_decode_tokens + metadata.split.num_prefill_tokens == batch.step.rows());
    const bool invariant = config_.determinism >= folio::Determinism::kBatchInvariant;
    if (invariant || cascade_ == CascadeMode::kOff) FUZZ_CHECK(!metadata.use_cascade);
    FUZZ_CHECK(metadata.common_prefix_len <= prefix);
    const auto arrays = builder_->paged_kv_arrays(metadata);
    const int32_t first_page = metadata.common_prefix_len / config_.page_size;
    for (size_t i = 0; i < batch.step.requests.size(); ++i) {
      const int32_t len = std::max(0, batch.step.kv_len[i] - metadata.common_prefix_len);
      const int32_t pages = (len + config_.page_size - 1) / config_.page_size;
      FUZZ_CHECK(arrays.indptr[i + 1] - arrays.indptr[i] == pages && arrays.seq_lens[i] == len);
      FUZZ_CHECK(arrays.last_page_len[i] == len - std::max(0, pages - 1) * config_.page_size);
      for (int32_t page = 0; page < pages; ++page) {
        FUZZ_CHECK(arrays.indices[static_cast<size_t>(arrays.indptr[i] + page)] ==
                   batch.step.pages[static_cast<size_t>(batch.step.indptr[i] + first_page + page)]);
      }
    }
  }

  folio::AttentionConfig config_;
  const folio::KvPool& pool_;
  LayerFeatures features_;
  bool hnd_ = false;
  folio::backends::CascadeMode cascade_{};
  folio::TensorView cache_;
  std::optional<folio::backends::FlashInferImpl> impl_;
  std::optional<folio::backends::FlashInferMetadataBuilder> builder_;
};

}  // namespace serving
