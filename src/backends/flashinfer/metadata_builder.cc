#include "folio/backends/flashinfer/metadata_builder.hpp"

#include <algorithm>
#include <utility>

#include "backends/common/layer_group.hpp"
#include "backends/flashinfer/builder_state.hpp"
#include "core/error.hpp"
#include "folio/backends/flashinfer/backend.hpp"

namespace folio::inline v0::backends {
namespace {

using Layers = std::span<const AttentionLayer<FlashInferImpl>>;

int32_t longest_query(const CommonAttentionMetadata& batch, int32_t first_request) {
  int32_t longest = 0;
  for (int32_t i = first_request; i < batch.num_reqs; ++i) longest = std::max(longest, batch.query_len(i));
  return longest;
}

}  // namespace

FlashInferMetadataBuilder::FlashInferMetadataBuilder(const Context& context, const AttentionSpec& spec, Layers layers,
                                                     const EngineConfig& config, const FlashInferOptions& options)
    : state_(std::make_unique<State>()) {
  check_engine_config(context, spec, config);
  State& state = *state_;
  state.config = config;
  state.spec = spec;
  state.profile = options.profile;
  state.num_qo_heads = config.model.get_num_attention_heads(config.parallel);
  state.kv_cache_dtype = resolve_kv_cache_dtype(spec, config);
  check_layers(layers, spec, state.num_qo_heads, state.kv_cache_dtype);
  state.hyperparameters = infer_global_hyperparameters(get_per_layer_parameters<FlashInferImpl>(layers));
  check_profile(spec, config, state.hyperparameters, options.profile);
  core::require(!options.quantize_query || state.kv_cache_dtype == DType::kFloat8E4M3,
                "quantize_query is set with a cache of ", state.kv_cache_dtype, "; it needs fp8_e4m3");
  state.q_data_type = options.quantize_query ? DType::kFloat8E4M3 : config.model.dtype;
  // Drafts are verified in the one plan like any other tokens; the originals need the block-table kernels for that.
  const bool supports_spec_as_decode = options.profile == BackendProfile::kNative;
  state.reorder_threshold =
      backends::reorder_batch_threshold(config, 1, supports_spec_as_decode, supports_spec_as_decode);

  AttentionConfig attention;
  attention.num_q_heads = state.num_qo_heads;
  attention.num_kv_heads = spec.num_kv_heads;
  attention.head_dim_qk = spec.head_size;
  attention.head_dim_v = spec.head_size;
  attention.q = state.q_data_type;
  attention.kv = state.kv_cache_dtype;
  attention.out = config.model.dtype;
  attention.page_size = spec.page_size;
  attention.mask = MaskKind::kCausal;
  attention.features = features_of(layers);
  attention.determinism = config.determinism;
  PrepareOptions prepare_options;
  prepare_options.force_kernel = options.force_kernel;
  std::vector<LayerWindow> windows;
  for (const AttentionLayer<FlashInferImpl>& layer : layers) {
    windows.push_back({layer.name, layer.impl->window_left(), -1});
  }
  state.windows = prepare_windows(context, attention, windows, prepare_options);
  if (uses_dcp(config)) {
    // Layers that share a cache have no keys of their own, and quantised queries none beside the cache's.
    const bool all_cached = is_fp8(state.q_data_type) || std::ranges::any_of(layers, [](const auto& layer) {
                              return layer.impl->kv_sharing_target_layer_name().has_value();
                            });
    state.dcp.emplace(context, config, state.windows, all_cached, options.force_kernel);
  } else {
    state.plans.emplace(state.windows);
  }
}

FlashInferMetadataBuilder::FlashInferMetadataBuilder(FlashInferMetadataBuilder&&) noexcept = default;
FlashInferMetadataBuilder& FlashInferMetadataBuilder::operator=(FlashInferMetadataBuilder&&) noexcept = default;
FlashInferMetadataBuilder::~FlashInferMetadataBuilder() = default;

FlashInferMetadata FlashInferMetadataBuilder::build(int32_t common_prefix_len, const CommonAttentionMetadata& batch) {
  State& state = *state_;
  if (common_prefix_len != 0) {
    core::fail(ErrorCode::kUnsupported, "common_prefix_len is ", common_prefix_len,
               "; the FlashInfer backend takes 0: every request reads its whole KV itself");
  }
  check_same_hyperparameters(state.hyperparameters, state.profile);
  check_batch(state.spec, state.config, batch);

  FlashInferMetadata metadata;
  if (state.profile == BackendProfile::kVllm2025_07) {
    core::require(state.reordered.has_value(), "reorder_batch has not been called for this builder");
    const BatchSplit& split = *state.reordered;
    core::require(split.num_decodes + split.num_prefills == batch.num_reqs &&
                      split.num_decode_tokens + split.num_prefill_tokens == batch.num_actual_tokens,
                  "reorder_batch saw ", split.num_decodes + split.num_prefills, " requests of ",
                  split.num_decode_tokens + split.num_prefill_tokens, " tokens; the batch has ", batch.num_reqs, " of ",
                  batch.num_actual_tokens);
    metadata.split = split;
  } else {
    metadata.split = split_decodes_and_prefills(batch, state.reorder_threshold, /*require_uniform=*/true);
  }

  KvSegment segment;
  segment.kv_len = batch.seq_lens.data();
  BatchView view;
  view.num_requests = batch.num_reqs;
  view.num_tokens = batch.num_actual_tokens;
  view.max_q_len = batch.max_query_len;
  view.max_kv_len = batch.max_seq_len;
  view.cu_q = batch.query_start_loc.data();
  view.segments = {&segment, 1};
  if (state.dcp) {
    metadata.dcp_plans = state.dcp->plan(batch, metadata.split.num_decodes);
    metadata.workspace = state.dcp->workspace();
  } else {
    metadata.plans = state.plans->plan(view);
    metadata.workspace = state.plans->workspace();
  }

  const auto num_reqs = static_cast<size_t>(batch.num_reqs);
  metadata.num_reqs = batch.num_reqs;
  metadata.num_actual_tokens = batch.num_actual_tokens;
  metadata.max_q_len = batch.max_query_len;
  // A short request that is not like the other decodes stands among the prefills, so their longest may be shorter.
  metadata.max_q_len_prefill =
      metadata.split.num_prefills > 0 ? longest_query(batch, metadata.split.num_decodes) : batch.max_query_len;
  metadata.max_seq_len = batch.max_seq_len;
  metadata.qo_indptr = batch.query_start_loc.first(num_reqs + 1);
  metadata.seq_lens = batch.seq_lens.first(num_reqs);
  metadata.block_table = batch.block_table;
  metadata.slot_mapping = batch.slot_mapping;
  metadata.q_data_type = state.q_data_type;
  metadata.data_type = state.kv_cache_dtype;
  metadata.num_qo_heads = state.num_qo_heads;
  metadata.num_kv_heads = state.spec.num_kv_heads;
  metadata.head_dim = state.spec.head_size;
  metadata.page_size = state.spec.page_size;
  return metadata;
}

bool FlashInferMetadataBuilder::reorder_batch(std::span<const int32_t> num_scheduled_tokens,
                                              std::span<const int32_t> num_computed_tokens,
                                              const SwapStates& swap_states) {
  State& state = *state_;
  if (state.profile != BackendProfile::kVllm2025_07) {
    return reorder_batch_to_split_decodes_and_prefills(num_scheduled_tokens, num_computed_tokens,
                                                       state.reorder_threshold, swap_states);
  }
  const SingleTokenReorder reorder = reorder_batch_single_token_decodes(num_scheduled_tokens, swap_states);
  state.reordered = reorder.split;
  return reorder.modified;
}

int32_t FlashInferMetadataBuilder::reorder_batch_threshold() const noexcept {
  return state_->reorder_threshold;
}
int32_t FlashInferMetadataBuilder::num_qo_heads() const noexcept {
  return state_->num_qo_heads;
}
int32_t FlashInferMetadataBuilder::num_kv_heads() const noexcept {
  return state_->spec.num_kv_heads;
}
int32_t FlashInferMetadataBuilder::head_dim() const noexcept {
  return state_->spec.head_size;
}
int32_t FlashInferMetadataBuilder::page_size() const noexcept {
  return state_->spec.page_size;
}
DType FlashInferMetadataBuilder::kv_cache_dtype() const noexcept {
  return state_->kv_cache_dtype;
}
DType FlashInferMetadataBuilder::q_data_type() const noexcept {
  return state_->q_data_type;
}
const GlobalHyperparameters& FlashInferMetadataBuilder::global_hyperparameters() const noexcept {
  return state_->hyperparameters;
}
std::string FlashInferMetadataBuilder::kernel_name() const {
  return state_->windows.front().op.kernel_name();
}

}  // namespace folio::inline v0::backends
