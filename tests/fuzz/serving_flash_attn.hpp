#pragma once

// The engine's requests through the FlashAttention backend: one layer and its builder, with several steps in flight.
#include <deque>
#include <optional>

#include "folio/backends/flash_attn.hpp"
#include "folio/sealed_plan.hpp"
#include "serving_step.hpp"

namespace serving {

class FlashAttentionServing {
 public:
  FlashAttentionServing(FuzzInput& input, const folio::AttentionConfig& config, const folio::KvPool& pool)
      : config_(config), pool_(pool), features_(take_features(input, config.num_q_heads)) {
    using namespace folio::backends;
    const folio::KvCacheView& view = pool.view(0);
    cache_ = folio::TensorView(view.k, folio::DType::kFloat32, {});
    cache_.rank = 5;
    cache_.shape =
        FlashAttentionBackend::get_kv_cache_shape(view.num_pages, view.page_size, view.num_kv_heads, view.head_dim_qk);
    cache_.strides = {static_cast<float*>(view.v) - static_cast<float*>(view.k), view.k_strides.page,
                      view.k_strides.token, view.k_strides.head, 1};
    const auto kinds = input.take<uint8_t>();
    FlashAttentionLayerConfig layer;
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
    layer.update_kv_cache_in_forward = writes_in_forward_ = kinds % 2 != 0;
    impl_.emplace(shared_context(), layer);
    EngineConfig engine = engine_config(config, pool.config().layout == folio::KvPoolLayout::kHeadMajor);
    FlashAttentionOptions options;
    options.cascade = static_cast<CascadeMode>(input.take_between(0, 2));
    options.steps_in_flight = steps_in_flight_ = input.take_between(1, 3);
    if (kinds % 3 != 0) options.aot_schedule = kinds % 3 == 1;
    if (kinds >= 192) {
      engine.compilation.decode_graph_mode = DecodeGraphMode::kFull;
      engine.compilation.max_capture_size = kMostRequests;
      if (kinds % 5 == 0) options.max_num_splits_for_graphs = 1 + kinds % 4;
    }
    const AttentionLayer<FlashAttentionImpl> named{"layer", &*impl_};
    const AttentionSpec spec{config.page_size, config.num_kv_heads, config.head_dim_qk, folio::DType::kFloat32};
    builder_.emplace(shared_context(), spec, std::span(&named, 1), engine, options);
  }
  FlashAttentionServing(const FlashAttentionServing&) = delete;
  FlashAttentionServing& operator=(const FlashAttentionServing&) = delete;

  /// One step, or several planned before the first of them runs.
  void steps(FuzzInput& input, const std::vector<std::vector<StepEntry>>& all, const std::vector<Request>& requests) {
    std::deque<RunnerBatch> batches;
    std::deque<folio::backends::FlashAttentionMetadata> metadata;
    for (const std::vector<StepEntry>& entries : all) {
      if (static_cast<int32_t>(batches.size()) == steps_in_flight_) break;
      RunnerBatch& batch = batches.emplace_back(make_step(entries, requests, config_), requests, config_);
      batch.metadata.causal = input.take<uint8_t>() % 4 != 0;
      const int32_t prefix = input.take<uint8_t>() % 2 == 0 ? batch.common_prefix : 0;
      const bool fast_build = input.take<uint8_t>() % 4 == 0;
      metadata.push_back(builder_->build(prefix, batch.metadata, fast_build));
      check_metadata(metadata.back(), batch, prefix, fast_build);
    }
    if (batches.empty()) return;
    for (size_t i = 0; i < batches.size(); ++i) {
      run(metadata[i], batches[i], requests);
      refuse_changed_schedule(input, metadata[i], batches[i]);
      const auto other_group =
          builder_->update_block_table(metadata[i], batches[i].metadata.block_table, batches[i].tokens.slots);
      run(other_group, batches[i], requests);
    }
    for (int32_t i = static_cast<int32_t>(batches.size()); i <= steps_in_flight_; ++i) {
      static_cast<void>(builder_->build_for_drafting(batches[0].metadata));
    }
    FUZZ_CHECK(refused(folio::ErrorCode::kStalePlan, [&] { forward(metadata[0], batches[0], cache_); }));
    FUZZ_CHECK(batches[0].untouched());
  }

  /// What cannot be is refused and changes nothing: the next step finds the cache as it was.
  void refuse(FuzzInput& input, const std::vector<StepEntry>& entries, const std::vector<Request>& requests) {
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
    other.shape[1] = 0;  // no slot is in it
    if (batch.step.rows() > 0) FUZZ_CHECK(refused(kBad, [&] { update(batch, other); }));
    FUZZ_CHECK(batch.untouched());
  }

 private:
  void update(RunnerBatch& batch, const folio::TensorView& cache) const {
    impl_->do_kv_cache_update({}, batch.tokens.k, batch.tokens.v, cache, batch.tokens.slots);
  }

  void forward(const folio::backends::FlashAttentionMetadata& metadata, RunnerBatch& batch,
               const folio::TensorView& cache) const {
    impl_->forward({}, batch.query, batch.tokens.k, batch.tokens.v, cache, &metadata, batch.output);
  }

  void run(const folio::backends::FlashAttentionMetadata& metadata, RunnerBatch& batch,
           const std::vector<Request>& requests) const {
    batch.tokens.spoil(pool_);
    if (!writes_in_forward_) update(batch, cache_);
    forward(metadata, batch, cache_);
    folio::AttentionConfig seen = config_;
    // Not causal, a layer without a window sees all keys; a window ends at its query all the same.
    if (!batch.metadata.causal && config_.window_left < 0) seen.mask = folio::MaskKind::kNone;
    batch.check(seen, requests, features_);
  }

  /// A schedule that was made ahead of time is executed as it was made, or not at all.
  void refuse_changed_schedule(FuzzInput& input, const folio::backends::FlashAttentionMetadata& metadata,
                               RunnerBatch& batch) const {
    if (metadata.scheduler_metadata.empty()) return;
    const auto kBad = folio::ErrorCode::kInvalidArgument;
    auto shorter = metadata;
    shorter.scheduler_metadata = metadata.scheduler_metadata.first(metadata.scheduler_metadata.size() - 1);
    FUZZ_CHECK(refused(kBad, [&] { forward(shorter, batch, cache_); }));
    const size_t header = folio::SealedPlan::kSealAlignment / sizeof(int32_t);  // has room that nothing reads
    FUZZ_CHECK(metadata.scheduler_metadata.size() > header);
    const size_t at = header + input.take<uint16_t>() % (metadata.scheduler_metadata.size() - header);
    int32_t& changed = const_cast<int32_t&>(metadata.scheduler_metadata[at]);  // the engine's to keep, so its to spoil
    const int32_t before = changed;
    changed ^= 1 << input.take<uint8_t>() % 31;
    FUZZ_CHECK(refused(kBad, [&] { forward(metadata, batch, cache_); }));
    changed = before;
    FUZZ_CHECK(batch.untouched());
  }

  void check_metadata(const folio::backends::FlashAttentionMetadata& metadata, const RunnerBatch& batch, int32_t prefix,
                      bool fast_build) const {
    FUZZ_CHECK(metadata.num_reqs == batch.metadata.num_reqs && metadata.num_actual_tokens == batch.step.rows());
    if (config_.determinism >= folio::Determinism::kBatchInvariant) FUZZ_CHECK(!metadata.use_cascade);
    FUZZ_CHECK(metadata.common_prefix_len <= prefix);
    FUZZ_CHECK(metadata.scheduler_metadata.empty() == (fast_build || !builder_->aot_schedule()));
  }

  folio::AttentionConfig config_;
  const folio::KvPool& pool_;
  LayerFeatures features_;
  folio::TensorView cache_;
  bool writes_in_forward_ = false;
  int32_t steps_in_flight_ = 1;
  std::optional<folio::backends::FlashAttentionImpl> impl_;
  std::optional<folio::backends::FlashAttentionMetadataBuilder> builder_;
};

}  // namespace serving
