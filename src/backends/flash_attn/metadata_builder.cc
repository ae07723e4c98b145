#include "folio/backends/flash_attn/metadata_builder.hpp"

#include <algorithm>
#include <string>

#include "backends/common/batch_checks.hpp"
#include "backends/common/layer_group.hpp"
#include "backends/flash_attn/builder_state.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends {
namespace {

bool quantizes_query(const FlashAttentionOptions& options, DType kv_cache_dtype) {
  const bool compatible = options.facts.profile != BackendProfile::kNative;
  // Of e5m2 caches the original says so only once it computes.
  const bool by_default = compatible && kv_cache_dtype == DType::kFloat8E4M3;
  const bool quantizes = options.quantize_query.value_or(by_default);
  core::require(!quantizes || kv_cache_dtype == DType::kFloat8E4M3, "quantize_query is set with a cache of ",
                kv_cache_dtype, "; it needs fp8_e4m3");
  return quantizes;
}

DType resolve_output_dtype(const FlashAttentionOptions& options, DType model_dtype) {
  if (!options.output_dtype || *options.output_dtype == model_dtype) return model_dtype;
  if (options.facts.profile != BackendProfile::kNative) {
    core::fail(ErrorCode::kUnsupported, "fused output quantization is not yet supported for FlashAttentionImpl");
  }
  core::require(is_fp8(*options.output_dtype) || *options.output_dtype == DType::kFloat4E2M1x2, "output_dtype is ",
                *options.output_dtype, "; the model's, ", model_dtype, ", fp8 and fp4_e2m1x2 are offered");
  return *options.output_dtype;
}

AttentionType common_attn_type(FlashAttentionLayers layers) {
  const AttentionType type = layers.front().impl->attn_type();
  for (const AttentionLayer<FlashAttentionImpl>& layer : layers) {
    core::require(layer.impl->attn_type() == type, "layer ", layer.name, " is for ", to_string(layer.impl->attn_type()),
                  " attention; the layers before it for ", to_string(type));
  }
  return type;
}

/// The layer's facts and the builder's say the same version; each was given its own.
void check_version(const AttentionLayer<FlashAttentionImpl>& layer, const FlashAttentionFacts& facts) {
  if (facts.profile == BackendProfile::kNative) return;
  const auto text = [](std::optional<int32_t> version) { return version ? std::to_string(*version) : "none"; };
  const FlashAttentionImpl& impl = *layer.impl;
  const std::optional<int32_t> mine =
      get_flash_attn_version(facts.platform, !impl.alibi_slopes().empty(), impl.head_size());
  core::require(impl.flash_attn_version() == mine, "layer ", layer.name, " was made for FlashAttention version ",
                text(impl.flash_attn_version()), "; the builder's platform has ", text(mine));
}

bool makes_schedules(const Context& context, const FlashAttentionOptions& options, const EngineConfig& config,
                     size_t num_windows) {
  const bool compatible = options.facts.profile != BackendProfile::kNative;
  // On a GPU every layer's comparison is a launch, so that there they are asked for.
  const bool by_default = !on_gpu(context) && (!compatible || get_flash_attn_version(options.facts.platform) == 3);
  return options.aot_schedule.value_or(by_default) && num_windows == 1 &&
         config.determinism < Determinism::kBatchInvariant;
}

int32_t max_shared_levels(const FlashAttentionOptions& options) {
  switch (options.cascade) {
    case CascadeMode::kOff: return 0;
    case CascadeMode::kHeuristic: return 1;
    case CascadeMode::kAuto: break;
  }
  return options.max_cascade_levels;
}

/// 0: as many as the work needs.
int32_t max_splits(const FlashAttentionOptions& options) {
  constexpr int32_t kVllmsDefault = 32;
  const bool native = options.facts.profile == BackendProfile::kNative;
  return options.max_num_splits_for_graphs.value_or(native ? 0 : kVllmsDefault);
}

PrepareOptions prepare_options(const EngineConfig& config, const FlashAttentionOptions& options, bool may_cascade) {
  PrepareOptions prepare;
  prepare.force_kernel = options.force_kernel;
  const bool graphs = config.compilation.decode_graph_mode == DecodeGraphMode::kFull;
  if (graphs || options.plan_from_device_lengths) {
    GraphBounds bounds;
    bounds.max_requests = config.scheduler.max_num_seqs;
    bounds.max_tokens = config.scheduler.max_num_batched_tokens;
    bounds.max_q_len = std::min(bounds.max_tokens, config.model.max_model_len);
    bounds.max_kv_len = config.model.max_model_len;
    bounds.max_shared_levels = may_cascade ? max_shared_levels(options) : 0;
    prepare.bounds = bounds;
  }
  // Batch-invariant splits are fixed.
  if (graphs && config.determinism < Determinism::kBatchInvariant) prepare.max_kv_splits = max_splits(options);
  return prepare;
}

}  // namespace

FlashAttentionMetadataBuilder::FlashAttentionMetadataBuilder(const Context& context, const AttentionSpec& spec,
                                                             FlashAttentionLayers layers, const EngineConfig& config,
                                                             const FlashAttentionOptions& options)
    : state_(std::make_unique<State>(context)) {
  check_flash_attn_config(context, spec, config, options);
  State& state = *state_;
  state.config = config;
  state.max_num_splits = max_splits(options);
  state.spec = spec;
  state.options = options;
  state.kv_cache_dtype = resolve_kv_cache_dtype(spec, config);
  const int32_t num_qo_heads = config.model.get_num_attention_heads(config.parallel);
  check_layers(layers, spec, num_qo_heads, state.kv_cache_dtype);
  state.hyperparameters = infer_global_hyperparameters(get_per_layer_parameters<FlashAttentionImpl>(layers));
  state.attn_type = common_attn_type(layers);
  for (const AttentionLayer<FlashAttentionImpl>& layer : layers) {
    core::require(layer.impl->profile() == options.facts.profile, "layer ", layer.name, " was made for the profile ",
                  to_string(layer.impl->profile()), "; the builder's is ", to_string(options.facts.profile));
    check_version(layer, options.facts);
    state.has_alibi = state.has_alibi || !layer.impl->alibi_slopes().empty();
  }
  if (state.is_compatible()) check_flash_attn_profile(spec, config, layers, options.facts);
  if (state.is_encoder() && is_fp8(state.kv_cache_dtype)) {
    core::fail(ErrorCode::kUnsupported, "quantization is not supported for encoder attention");
  }
  state.q_data_type = quantizes_query(options, state.kv_cache_dtype) ? DType::kFloat8E4M3 : config.model.dtype;
  state.output_data_type = resolve_output_dtype(options, config.model.dtype);

  AttentionConfig attention;
  attention.num_q_heads = num_qo_heads;
  attention.num_kv_heads = spec.num_kv_heads;
  attention.head_dim_qk = spec.head_size;
  attention.head_dim_v = spec.head_size;
  attention.q = state.q_data_type;
  attention.kv = state.kv_cache_dtype;
  attention.out = state.output_data_type;
  attention.page_size = spec.page_size;
  attention.mask = state.attn_type == AttentionType::kDecoder ? MaskKind::kCausal : MaskKind::kNone;
  attention.features = features_of(layers);
  attention.determinism = config.determinism;
  std::vector<LayerWindow> windows;
  for (const AttentionLayer<FlashAttentionImpl>& layer : layers) {
    const SlidingWindow window = layer.impl->sliding_window();
    windows.push_back({layer.name, window.left, window.right});
  }
  // Shared segments are planned from host lengths.
  const bool may_cascade = state.attn_type == AttentionType::kDecoder && !options.plan_from_device_lengths;
  state.windows = prepare_windows(context, attention, windows, prepare_options(config, options, may_cascade));
  const bool divided = uses_dcp(config) && !state.is_encoder();
  check_query_ranks(config, divided, layers);
  if (options.plan_from_device_lengths && state.is_encoder()) {
    core::fail(ErrorCode::kUnsupported, "plan_from_device_lengths is set for layers of ", to_string(state.attn_type),
               " attention; decoder and encoder_decoder are offered");
  }
  if (divided && state.output_data_type == DType::kFloat4E2M1x2) {
    core::fail(ErrorCode::kUnsupported, "output_dtype is fp4_e2m1x2 under decode context parallelism; ",
               config.model.dtype, " and fp8 are offered");
  }
  state.aot_schedule = makes_schedules(context, options, config, state.windows.size());
  if (state.windows.size() == 1) state.aot_window = layers.front().impl->sliding_window();

  const AttentionOp& first = state.windows.front().op;
  const bool graphs = config.compilation.decode_graph_mode == DecodeGraphMode::kFull;
  const int64_t fixed_ints = state.aot_schedule && graphs ? SealedPlan::max_size(first) : 0;
  // As its original, vLLM's profile has no cascade with windows or ALiBi.
  // may_cascade is false for plans from device lengths.
  const bool may_discover =
      may_cascade && !divided &&
      !(state.is_compatible() && (state.has_alibi || state.aot_window != SlidingWindow{} || state.windows.size() > 1));
  state.steps.reserve(static_cast<size_t>(options.steps_in_flight));
  for (int32_t i = 0; i < options.steps_in_flight; ++i) {
    StepState& step = state.steps.emplace_back(state.windows);
    if (state.aot_schedule && !divided) step.schedule.emplace(first, fixed_ints);
    if (may_discover) {
      step.cascade = make_step_levels(options.cascade, options.max_cascade_levels, state.windows);
      // A GPU's graphs are replayed with whatever prefix the engine names, or none.
      if (graphs && on_gpu(context) && options.cascade == CascadeMode::kHeuristic)
        step.cascade.emplace(1, state.windows);
    }
    if (divided) {
      // Layers that share a cache have no keys of their own, and quantised queries none beside the cache's.
      const bool all_cached = is_fp8(state.q_data_type) || std::ranges::any_of(layers, [](const auto& layer) {
                                return layer.impl->kv_sharing_target_layer_name().has_value();
                              });
      DcpKeys keys = all_cached ? DcpKeys::kCached : DcpKeys::kNewBesideCache;
      if (state.attn_type == AttentionType::kEncoderDecoder) keys = DcpKeys::kEncoders;
      step.dcp.emplace(context, config, state.windows, keys, prepare_options(config, options, /*may_cascade=*/false));
      if (state.aot_schedule) {
        step.schedule.emplace(step.dcp->attention().cached_op(), 0);
        step.new_tokens_schedule.emplace(step.dcp->attention().fresh_op(), 0);
      }
    }
  }
}

FlashAttentionMetadataBuilder::FlashAttentionMetadataBuilder(FlashAttentionMetadataBuilder&&) noexcept = default;
FlashAttentionMetadataBuilder& FlashAttentionMetadataBuilder::operator=(FlashAttentionMetadataBuilder&&) noexcept =
    default;
FlashAttentionMetadataBuilder::~FlashAttentionMetadataBuilder() = default;

GraphSupport FlashAttentionMetadataBuilder::get_cudagraph_support() const {
  return FlashAttentionBackend::get_cudagraph_support(state_->options.facts);
}
bool FlashAttentionMetadataBuilder::aot_schedule() const noexcept {
  return state_->aot_schedule;
}
SlidingWindow FlashAttentionMetadataBuilder::aot_sliding_window() const noexcept {
  return state_->aot_window;
}
int64_t FlashAttentionMetadataBuilder::scheduler_metadata_capacity() const noexcept {
  const bool graphs = state_->config.compilation.decode_graph_mode == DecodeGraphMode::kFull;
  return graphs && state_->aot_schedule ? state_->steps.front().schedule->capacity() : 0;
}
DType FlashAttentionMetadataBuilder::kv_cache_dtype() const noexcept {
  return state_->kv_cache_dtype;
}
DType FlashAttentionMetadataBuilder::q_data_type() const noexcept {
  return state_->q_data_type;
}
DType FlashAttentionMetadataBuilder::output_data_type() const noexcept {
  return state_->output_data_type;
}
const GlobalHyperparameters& FlashAttentionMetadataBuilder::global_hyperparameters() const noexcept {
  return state_->hyperparameters;
}
std::string FlashAttentionMetadataBuilder::kernel_name() const {
  return state_->windows.front().op.kernel_name();
}

}  // namespace folio::inline v0::backends
