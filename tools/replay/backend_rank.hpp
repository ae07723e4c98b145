#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "folio/folio.hpp"
#include "replay/attention_stack.hpp"
#include "replay/backend_families.hpp"
#include "replay/memory.hpp"
#include "replay/step_array.hpp"

namespace folio::replay {

/// A step as one rank of an engine sees it: batch and table are every rank's, slots its own.
struct RankStep {
  backends::CommonAttentionMetadata common;
  std::span<const int32_t> token_row;  ///< [tokens]
  std::span<const int32_t> positions;  ///< [tokens]
  int32_t common_prefix_len = 0;       ///< what the engine lets the backend share, in tokens
};

/// One rank's layers behind a backend: pool, implementations, builder. Without context parallelism there is one rank.
template <typename Family>
class BackendRank {
 public:
  BackendRank(const Context& context, const StackConfig& config, distributed::ProcessGroup* group)
      : context_(context), config_(config), rank_(group == nullptr ? 0 : group->rank()) {
    if (!config.plan_only) make_pool();
    make_layers(group);
  }

  int32_t rank() const { return rank_; }
  typename Family::Builder& builder() { return *builder_; }
  const typename Family::Builder& builder() const { return *builder_; }
  const typename Family::Metadata& metadata() const { return *metadata_; }
  /// The same step planned without a cascade, where it has one.
  const typename Family::Metadata& metadata_alone() const { return alone_metadata_ ? *alone_metadata_ : *metadata_; }
  const MappedMemory& pool() const { return pool_; }
  const KvCacheView& cache(int32_t layer) const { return caches_[static_cast<size_t>(layer)]; }

  void build(const RankStep& step) {
    slots_.resize(step.token_row.size());
    const PageTableView table = backends::to_page_table(step.common.block_table, step.common.num_reqs);
    slot_mapping(table, step.token_row, step.positions, config_.page_size, slots_, config_.ranks, rank_,
                 config_.dcp_interleave);
    placed_ = step.common;
    placed_.slot_mapping = slot_array_.place(std::span<const int64_t>(slots_));
    if (gpu::is_gpu(context_)) place_on_gpu(step.common);
    metadata_ = builder_->build(step.common_prefix_len, placed_);
  }

  /// For counting what a cascade saves: plans the step once more, without.
  void build_alone() {
    alone_metadata_.reset();
    if (metadata_->use_cascade) alone_metadata_ = alone_builder_->build(/*common_prefix_len=*/0, placed_);
  }

  void write(int32_t layer, LayerTensors tensors) const {
    tensors.cache = tensors_[static_cast<size_t>(layer)];
    Family::write(*layers_[static_cast<size_t>(layer)], scales(), tensors, metadata_->slot_mapping);
  }

  void attend(int32_t layer, LayerTensors tensors) const {
    tensors.cache = tensors_[static_cast<size_t>(layer)];
    Family::attend(*layers_[static_cast<size_t>(layer)], scales(), tensors, *metadata_);
  }

 private:
  using Backend = typename Family::Backend;

  backends::AttentionLayerScales scales() const {
    backends::AttentionLayerScales scales;
    scales.k = scales.v = cache_scale(config_.kv);
    return scales;
  }

  void place_on_gpu(const backends::CommonAttentionMetadata& host) {
    placed_.where = Where::kDevice;
    placed_.query_start_loc_host = host.query_start_loc;
    placed_.seq_lens_host = host.seq_lens;
    placed_.block_table_host = host.block_table;
    placed_.query_start_loc = start_array_.place(host.query_start_loc);
    placed_.seq_lens = length_array_.place(host.seq_lens);
    const auto entries = static_cast<size_t>(host.num_reqs * host.block_table.row_stride);
    placed_.block_table.data = table_array_.place(std::span(host.block_table.data, entries)).data();
  }

  void make_pool() {
    const auto shape =
        Backend::get_kv_cache_shape(config_.num_pages, config_.page_size, config_.num_kv_heads, config_.head_dim_qk);
    int64_t elements = 1;
    for (const int64_t extent : shape) elements *= extent;
    const size_t layer_bytes = static_cast<size_t>(elements) * static_cast<size_t>(size_of(config_.kv));
    pool_ = MappedMemory::of_cache_on(context_, static_cast<size_t>(config_.num_layers) * layer_bytes);
    for (int32_t layer = 0; layer < config_.num_layers; ++layer) {
      std::byte* const data = pool_.data() + static_cast<size_t>(layer) * layer_bytes;
      tensors_.push_back(Backend::kv_cache_tensor(data, config_.kv, shape, layout()));
      caches_.push_back(Backend::kv_cache_view(tensors_.back(), config_.kv));
    }
  }

  void make_layers(distributed::ProcessGroup* group) {
    // The name that engines give the cache's dtype.
    const std::string cache_dtype = config_.kv == config_.out() ? "auto" : std::string(to_string(config_.kv));
    std::vector<backends::AttentionLayer<typename Family::Impl>> named;
    for (int32_t layer = 0; layer < config_.num_layers; ++layer) {
      typename Family::LayerConfig layer_config;
      layer_config.num_heads = config_.num_q_heads / config_.ranks;
      layer_config.head_size = config_.head_dim_qk;
      layer_config.scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim_qk));
      layer_config.num_kv_heads = config_.num_kv_heads;
      if (config_.has_window(layer)) layer_config.sliding_window = config_.window_left + 1;
      layer_config.kv_cache_dtype = cache_dtype;
      layer_config.model_dtype = config_.out();
      if (config_.logits_soft_cap != 0.0f) layer_config.logits_soft_cap = config_.logits_soft_cap;
      layers_.push_back(std::make_unique<typename Family::Impl>(context_, layer_config));
      named.push_back({fmt::format("model.layers.{}.attn", layer), layers_.back().get()});
    }
    backends::EngineConfig engine;
    engine.model.dtype = config_.out();
    engine.model.num_attention_heads = config_.num_q_heads / config_.ranks;
    engine.model.num_kv_heads = config_.num_kv_heads;
    engine.cache.cache_dtype = cache_dtype;
    engine.cache.layout = layout();
    engine.scheduler.max_num_batched_tokens = config_.max_tokens;
    engine.scheduler.max_num_seqs = config_.max_requests;
    engine.determinism = config_.determinism;
    engine.parallel.decode_context_parallel_size = config_.ranks;
    engine.parallel.decode_context_parallel_rank = rank_;
    engine.parallel.cp_kv_cache_interleave_size = config_.dcp_interleave;
    engine.parallel.dcp_comm_backend = config_.dcp_comm_backend;
    engine.parallel.dcp_group = group;
    const backends::AttentionSpec spec{config_.page_size, config_.num_kv_heads, config_.head_dim_qk, config_.kv};
    typename Family::Options options;
    options.quantize_query = is_fp8(config_.q);
    options.cascade = config_.cascade;
    builder_ = std::make_unique<typename Family::Builder>(context_, spec, named, engine, options);
    if (config_.cascade == backends::CascadeMode::kOff) return;
    options.cascade = backends::CascadeMode::kOff;
    alone_builder_ = std::make_unique<typename Family::Builder>(context_, spec, named, engine, options);
  }

  backends::KvCacheLayout layout() const {
    return config_.layout == KvLayout::kStridedHnd ? backends::KvCacheLayout::kHnd : backends::KvCacheLayout::kNhd;
  }

  Context context_;
  StackConfig config_;
  int32_t rank_;
  MappedMemory pool_;
  std::vector<TensorView> tensors_;  ///< a layer's cache as the engine sees it
  std::vector<KvCacheView> caches_;
  std::vector<std::unique_ptr<typename Family::Impl>> layers_;
  std::unique_ptr<typename Family::Builder> builder_;
  std::unique_ptr<typename Family::Builder> alone_builder_;  ///< where there are cascades, whose savings are counted
  std::vector<int64_t> slots_;
  StepArray slot_array_{context_}, start_array_{context_}, length_array_{context_}, table_array_{context_};
  backends::CommonAttentionMetadata placed_;  ///< the step's batch where the context's kernels read it
  std::optional<typename Family::Metadata> metadata_;
  std::optional<typename Family::Metadata> alone_metadata_;
};

}  // namespace folio::replay
