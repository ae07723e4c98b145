#include "folio/backends/flashinfer/metadata_builder.hpp"

#include <algorithm>
#include <utility>

#include "backends/common/batch_checks.hpp"
#include "backends/common/layer_group.hpp"
#include "backends/flashinfer/block_table_state.hpp"
#include "backends/flashinfer/builder_state.hpp"
#include "core/error.hpp"
#include "folio/page_table.hpp"

namespace folio::inline v0::backends {
namespace {

using Layers = std::span<const AttentionLayer<FlashInferImpl>>;

using State = FlashInferMetadataBuilder::State;

KernelDispatch dispatch_of(const EngineConfig& config, const FlashInferOptions& options) {
  if (!options.dispatch) {
    DispatchFacts facts;
    facts.profile = options.profile;
    facts.batch_invariant = config.determinism >= Determinism::kBatchInvariant;
    facts.use_block_table_kernels = config.use_block_table_kernels;
    facts.log = [log = options.log](LogLevel level, std::string_view line) { log(level, line); };
    return KernelDispatch(facts);
  }
  options.dispatch->check_agrees(options.profile, config);
  const std::optional<bool> forced = options.dispatch->force_use_trtllm_attention();
  const auto text = [](std::optional<bool> choice) { return choice ? (*choice ? "true" : "false") : "not given"; };
  core::require(!config.use_block_table_kernels || config.use_block_table_kernels == forced,
                "use_block_table_kernels is ", text(config.use_block_table_kernels),
                " in the engine's configuration and ", text(forced), " in the dispatch");
  return *options.dispatch;
}

/// Native: block tables serve the group where they are forced on. Decode context parallelism has planned kernels only:
/// the dispatch says so to the log.
bool serves_forced_block_tables(const State& state) {
  TrtllmAttentionQuery query;
  query.num_qo_heads = state.num_qo_heads;
  query.num_kv_heads = state.spec.num_kv_heads;
  query.dcp_world_size = state.config.parallel.decode_context_parallel_size;
  query.force_use_trtllm = state.dispatch.force_use_trtllm_attention();
  return query.force_use_trtllm.value_or(false) && state.dispatch.use_trtllm_attention(query);
}

/// Queries come quantised where the group's kernels take them so: native, as asked for; vLLM, where block tables serve
/// an e4m3 cache.
void choose_query_types(State& state) {
  const DType model = state.config.model.dtype;
  state.q_data_type = state.planned_q_type = model;
  if (state.profile == BackendProfile::kNative) {
    core::require(!state.options.quantize_query || state.kv_cache_dtype == DType::kFloat8E4M3,
                  "quantize_query is set with a cache of ", state.kv_cache_dtype, "; it needs fp8_e4m3");
    if (state.options.quantize_query) state.q_data_type = state.planned_q_type = DType::kFloat8E4M3;
    return;
  }
  core::require(!state.options.quantize_query, "quantize_query is set; the profile ", to_string(state.profile),
                " decides by itself");
  const bool quantised = state.use_block_tables && !state.options.disable_q_quantization;
  if (quantised && state.kv_cache_dtype == DType::kFloat8E4M3) state.q_data_type = DType::kFloat8E4M3;
}

void set_up_graphs(State& state) {
  if (state.config.compilation.decode_graph_mode != DecodeGraphMode::kFull) return;
  const int32_t per_decode = 1 + (state.config.speculative ? state.config.speculative->num_speculative_tokens : 0);
  const int32_t max_num_seqs = state.config.scheduler.max_num_seqs;
  const int32_t given = state.config.compilation.max_capture_size;
  const std::vector<int32_t>& sizes = state.options.capture_sizes;
  if (sizes.empty()) {
    state.padding.emplace(
        default_capture_sizes(given > 0 ? given : default_max_capture_size(max_num_seqs, per_decode)));
  } else {
    core::require(given == 0 || given == sizes.back(), "max_capture_size is ", given,
                  "; the largest of capture_sizes is ", sizes.back());
    state.padding.emplace(sizes);
  }
  state.graph_max_bs =
      static_cast<int32_t>(std::min<int64_t>(int64_t{per_decode} * max_num_seqs, state.padding->max_capture_size()));
}

/// On a GPU graphs of block-table kernels have theirs from now on: one for every window and set of features.
void set_up_block_table_graphs(State& state, Layers layers) {
  if (!state.padding || !on_gpu(state.context)) return;
  GraphBounds bounds;
  bounds.max_requests = bounds.max_tokens = state.graph_max_bs;
  bounds.max_q_len = std::min(state.graph_max_bs, state.reorder_threshold);
  bounds.max_kv_len = state.config.model.max_model_len;
  BlockTableWorkspace::State& tables = state.block_tables.state();
  tables.graph_bounds = bounds;  // queries and outputs that are not as planned have theirs at their first forward
  if (!state.use_block_tables) return;
  AttentionConfig config = state.attention;
  for (const AttentionLayer<FlashInferImpl>& layer : layers) {
    config.window_left = layer.impl->window_left();
    config.features = features_of(Layers(&layer, 1));
    for (const DType q : {state.q_data_type, state.planned_q_type}) {
      config.q = q;
      tables.prepare_for_graphs(config);
    }
  }
}

/// Where the configuration bounds batches, their page tables' memory is had now.
void reserve_arrays(State& state) {
  const auto max_num_seqs = static_cast<size_t>(state.config.scheduler.max_num_seqs);
  if (max_num_seqs == 0 || state.config.model.max_model_len == 0) return;
  const size_t rows =
      std::max(max_num_seqs, state.padding ? static_cast<size_t>(state.padding->max_capture_size()) : 0);
  const auto pages = static_cast<size_t>(pages_for(state.config.model.max_model_len, state.spec.page_size));
  state.paged_kv_indptr.reserve(rows + 1);
  state.paged_kv_last_page_len.reserve(rows);
  state.paged_kv_seq_lens.reserve(rows);
  if (on_gpu(state.context)) {
    state.gpu_paged_kv_seq_lens.reserve(rows * sizeof(int32_t));
    state.gpu_paged_kv_arrays.reserve((2 * rows + 1 + max_num_seqs * pages) * sizeof(int32_t));
  } else {
    state.paged_kv_indices.reserve(max_num_seqs * pages);
  }
  state.cascade.suffix_len.reserve(rows);
  state.cascade.first_pos.reserve(rows);
  state.section_cu_q.reserve(rows + 1);
}

}  // namespace

FlashInferMetadataBuilder::State::State(const Context& given_context, const EngineConfig& engine,
                                        const FlashInferOptions& given_options)
    : context(given_context),
      config(engine),
      options(given_options),
      profile(given_options.profile),
      dispatch(dispatch_of(engine, given_options)),
      block_tables(given_context, engine.determinism, given_options.force_kernel),
      gpu_paged_kv_seq_lens(given_context.device()),
      gpu_paged_kv_arrays(given_context.device()) {}

size_t FlashInferMetadataBuilder::State::held_bytes() {
  size_t bytes = block_tables.state().held_bytes();
  if (plans) bytes += plans->workspace().bytes;
  if (dcp) bytes += dcp->workspace().bytes;
  for (auto& [padded, graph] : graph_plans) bytes += graph.workspace().bytes;
  for (auto& [padded, graph] : graph_dcp) bytes += graph.workspace().bytes;
  return bytes;
}

PrepareOptions FlashInferMetadataBuilder::State::graph_options(int32_t padded) const {
  PrepareOptions prepare_options;
  prepare_options.force_kernel = options.force_kernel;
  GraphBounds bounds;
  bounds.max_requests = bounds.max_tokens = padded;
  bounds.max_q_len = std::min(padded, reorder_threshold);
  bounds.max_kv_len = config.model.max_model_len;
  prepare_options.bounds = bounds;
  return prepare_options;
}

/// Collective where it is the first of its size: every rank builds the same batches.
DcpStepPlans& FlashInferMetadataBuilder::State::graph_dcp_for(int32_t padded) {
  return graph_dcp.try_emplace(padded, context, config, windows, dcp_keys, graph_options(padded)).first->second;
}

StepPlans& FlashInferMetadataBuilder::State::graph_plans_for(int32_t padded) {
  const auto found = graph_plans.find(padded);
  if (found != graph_plans.end()) return found->second;
  std::vector<LayerWindow> layer_windows;
  for (const WindowOp& window : windows) {
    layer_windows.push_back({"of the group", window.window_left, window.op.config().window_right});
  }
  return graph_plans
      .emplace(padded, StepPlans(prepare_windows(context, attention, layer_windows, graph_options(padded))))
      .first->second;
}

FlashInferMetadataBuilder::FlashInferMetadataBuilder(const Context& context, const AttentionSpec& spec, Layers layers,
                                                     const EngineConfig& config, const FlashInferOptions& options) {
  check_engine_config(context, spec, config, options.profile);
  check_cascade_options(options.cascade, options.max_cascade_levels);
  state_ = std::make_unique<State>(context, config, options);
  State& state = *state_;
  state.spec = spec;
  state.num_qo_heads = config.model.get_num_attention_heads(config.parallel);
  state.kv_cache_dtype = resolve_kv_cache_dtype(spec, config);
  check_layers(layers, spec, state.num_qo_heads, state.kv_cache_dtype);
  check_options(spec, config, options);
  state.hyperparameters = infer_global_hyperparameters(get_per_layer_parameters<FlashInferImpl>(layers));
  const bool native = state.profile == BackendProfile::kNative;
  if (native) {
    state.use_block_tables = serves_forced_block_tables(state);
  } else if (state.profile != BackendProfile::kVllm2025_07) {
    state.use_block_tables = state.dispatch.can_use_trtllm_attention(state.num_qo_heads, spec.num_kv_heads);
  }
  check_layer_facts(state, layers);
  check_query_ranks(config, uses_dcp(config), layers);
  check_profile(state);
  choose_query_types(state);
  // Drafts are verified in the one plan like any other tokens; the originals need the block-table kernels for that.
  EngineConfig counted = config;
  // December 2025 counts the drafts, parallel or not.
  if (state.profile == BackendProfile::kVllm2025_12 && counted.speculative)
    counted.speculative->parallel_drafting = false;
  state.reorder_threshold = backends::reorder_batch_threshold(counted, 1, native || state.use_block_tables, native);

  AttentionConfig& attention = state.attention;
  attention.num_q_heads = state.num_qo_heads;
  attention.num_kv_heads = spec.num_kv_heads;
  attention.head_dim_qk = spec.head_size;
  attention.head_dim_v = spec.head_size;
  attention.q = state.planned_q_type;
  attention.kv = state.kv_cache_dtype;
  attention.out = options.output_dtype == DType::kUnset ? config.model.dtype : options.output_dtype;
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
    const bool all_cached = is_fp8(state.planned_q_type) || std::ranges::any_of(layers, [](const auto& layer) {
                              return layer.impl->kv_sharing_target_layer_name().has_value();
                            });
    state.dcp_keys = all_cached ? DcpKeys::kCached : DcpKeys::kNewBesideCache;
    state.dcp.emplace(context, config, state.windows, state.dcp_keys, prepare_options);
    state.dcp->reserve(options.workspace_buffer_size);
  } else {
    state.plans.emplace(state.windows);
    state.plans->reserve(options.workspace_buffer_size);
    state.step_cascade = make_step_levels(options.cascade, options.max_cascade_levels, state.windows);
  }
  set_up_graphs(state);
  set_up_block_table_graphs(state, layers);
  reserve_arrays(state);
}

FlashInferMetadataBuilder::FlashInferMetadataBuilder(FlashInferMetadataBuilder&&) noexcept = default;
FlashInferMetadataBuilder& FlashInferMetadataBuilder::operator=(FlashInferMetadataBuilder&&) noexcept = default;
FlashInferMetadataBuilder::~FlashInferMetadataBuilder() = default;

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
bool FlashInferMetadataBuilder::use_trtllm_decode_attention() const noexcept {
  return state_->use_block_tables;
}
bool FlashInferMetadataBuilder::use_cascade_attention(const CascadeHeuristicInput& input) const {
  const bool native = state_->profile == BackendProfile::kNative;
  const bool july = state_->profile == BackendProfile::kVllm2025_07;
  if (!native && !(july && state_->kv_cache_dtype == state_->config.model.dtype)) return false;
  return backends::use_cascade_attention(input);
}
SplitSizes FlashInferMetadataBuilder::split_sizes() const noexcept {
  const bool invariant = state_->config.determinism >= Determinism::kBatchInvariant;
  if (!invariant || state_->profile == BackendProfile::kVllm2025_07) return {};
  if (state_->profile == BackendProfile::kNative)
    return {2048, 2048, false};  // prepare's fixed splits, for all queries
  return {2048, 4096, true};
}
size_t FlashInferMetadataBuilder::workspace_buffer_size() const noexcept {
  constexpr size_t kMebibyte = size_t{1} << 20;
  const bool invariant = state_->config.determinism >= Determinism::kBatchInvariant;
  switch (state_->profile) {
    case BackendProfile::kNative: return state_->held_bytes();
    case BackendProfile::kVllm2025_07: return 256 * kMebibyte;
    case BackendProfile::kVllm2025_12:
    case BackendProfile::kVllm2026_03: break;
  }
  const size_t given = state_->options.workspace_buffer_size;
  return given > 0 ? given : (invariant ? 2048 : 394) * kMebibyte;
}
bool FlashInferMetadataBuilder::use_tensor_cores() const noexcept {
  if (state_->profile != BackendProfile::kVllm2025_07 || state_->options.force_tensor_cores) return true;
  return state_->num_qo_heads / state_->spec.num_kv_heads > 4;
}
int32_t FlashInferMetadataBuilder::decode_cudagraph_max_bs() const noexcept {
  return state_->graph_max_bs;
}

}  // namespace folio::inline v0::backends
