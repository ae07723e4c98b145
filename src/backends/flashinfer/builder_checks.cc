#include <algorithm>

#include "backends/common/batch_checks.hpp"
#include "backends/common/dcp_step.hpp"
#include "backends/flashinfer/builder_state.hpp"
#include "core/error.hpp"
#include "folio/backends/flashinfer/backend.hpp"
#include "folio/types/nvfp4.hpp"

namespace folio::inline v0::backends {
namespace {

/// The originals have sinks in the kernels that take block tables only.
[[noreturn]] void refuse_sinks() {
  core::fail(ErrorCode::kUnsupported,
             "FlashInfer backend currently does not support attention sinks, please use trtllm on blackwell or flash "
             "attention on earlier GPUs.");
}

}  // namespace

void check_engine_config(const Context& context, const AttentionSpec& spec, const EngineConfig& config,
                         BackendProfile profile) {
  check_dcp_config(context, config, spec);
  if (config.compilation.decode_graph_mode == DecodeGraphMode::kFull) {
    core::require(config.scheduler.max_num_seqs > 0 && config.model.max_model_len > 0,
                  "decode_graph_mode is kFull, which fixes shapes: max_num_seqs and max_model_len must be given");
  }
  if (config.use_block_table_kernels.value_or(false) && profile == BackendProfile::kVllm2025_07) {
    core::fail(ErrorCode::kUnsupported,
               "use_block_table_kernels is true; the FlashInfer backend of vllm-2025-07 has its planned kernels only");
  }
}

void check_options(const AttentionSpec& spec, const EngineConfig& config, const FlashInferOptions& options) {
  const bool native = options.profile == BackendProfile::kNative;
  const bool july = options.profile == BackendProfile::kVllm2025_07;
  const DType out = options.output_dtype;
  core::require(native || out == DType::kUnset, "output_dtype is ", out, "; the profile ", to_string(options.profile),
                " takes quantised outputs from forward to forward");
  const bool fp4 = out == DType::kFloat4E2M1x2;
  core::require(out == DType::kUnset || out == DType::kFloat8E4M3 || fp4, "output_dtype is ", out,
                "; fp8_e4m3 and fp4_e2m1x2 are offered");
  core::require(!fp4 || spec.head_size % kNvfp4BlockSize == 0, "output_dtype is fp4_e2m1x2 with a head_size of ",
                spec.head_size, "; it needs a multiple of ", kNvfp4BlockSize);
  if (fp4 && uses_dcp(config)) {
    core::fail(ErrorCode::kUnsupported, "output_dtype is fp4_e2m1x2 under decode context parallelism; ",
               config.model.dtype, " and fp8_e4m3 are offered");
  }
  core::require(!native || !options.quantize_query || !options.disable_q_quantization,
                "quantize_query and disable_q_quantization are both set");
  core::require(july || !options.force_tensor_cores, "force_tensor_cores is set; only the profile vllm-2025-07 has it");
  core::require(options.capture_sizes.empty() || config.compilation.decode_graph_mode == DecodeGraphMode::kFull,
                "capture_sizes has ", options.capture_sizes.size(), " entries; decode_graph_mode is kNone");
  const bool invariant = config.determinism >= Determinism::kBatchInvariant;
  core::require(options.workspace_buffer_size == 0 || !(july || (!native && invariant)), "workspace_buffer_size is ",
                options.workspace_buffer_size, "; the profile ", to_string(options.profile),
                invariant && !july ? " has 2 GiB under batch invariance" : " has 256 MiB");
}

void check_layer_facts(const FlashInferMetadataBuilder::State& state,
                       std::span<const AttentionLayer<FlashInferImpl>> layers) {
  const auto text = [](bool value) { return value ? "true" : "false"; };
  for (const AttentionLayer<FlashInferImpl>& layer : layers) {
    const FlashInferImpl& impl = *layer.impl;
    core::require(impl.profile() == state.profile, "layer ", layer.name, " has the profile ", to_string(impl.profile()),
                  "; its builder's is ", to_string(state.profile));
    core::require(impl.disable_q_quantization() == state.options.disable_q_quantization, "layer ", layer.name,
                  " has a disable_q_quantization of ", text(impl.disable_q_quantization()), "; its builder's is ",
                  text(state.options.disable_q_quantization));
    const bool served = impl.support_trtllm_attn();
    core::require(state.profile == BackendProfile::kNative || served == state.use_block_tables, "layer ", layer.name,
                  " has a support_trtllm_attn of ", text(served), "; its builder's dispatch says ",
                  text(state.use_block_tables), ": both are to be given one dispatch");
  }
}

void check_profile(const FlashInferMetadataBuilder::State& state) {
  const BackendProfile profile = state.profile;
  const AttentionSpec& spec = state.spec;
  const EngineConfig& config = state.config;
  if (profile == BackendProfile::kNative) return;
  const auto refuse = [&](const char* name, const auto& value) {
    core::fail(ErrorCode::kUnsupported, name, " ", value, " is not supported by ", FlashInferBackend::get_name(profile),
               " of ", to_string(profile), "; the native profile may take it");
  };
  FlashInferBackend::validate_head_size(spec.head_size, profile);
  if (!FlashInferBackend::supports_page_size(spec.page_size, profile)) refuse("page_size", spec.page_size);
  if (std::ranges::count(FlashInferBackend::supported_dtypes(profile), config.model.dtype) == 0) {
    refuse("model dtype", config.model.dtype);
  }
  const auto kv_cache_dtypes = FlashInferBackend::supported_kv_cache_dtypes(profile);
  if (std::ranges::count(kv_cache_dtypes, std::string_view(config.cache.cache_dtype)) == 0) {
    refuse("cache_dtype", config.cache.cache_dtype);
  }
  if (state.hyperparameters.first.has_sinks && !state.use_block_tables) refuse_sinks();
  const bool has_bug = profile != BackendProfile::kVllm2025_07 && spec.head_size == 256 && spec.page_size == 16;
  core::require(!has_bug || state.dispatch.device().capability != DeviceCapability{10, 0},
                "There is a bug in FlashInfer block_size 16 head size 256 support. Please avoid this combination by "
                "passing --block-size 32 or --block-size 64.");
  FlashInferFacts facts;
  facts.profile = profile;
  facts.device = state.dispatch.device();
  const KvCacheLayout required = FlashInferBackend::get_required_kv_cache_layout(facts).value_or(config.cache.layout);
  core::require(config.cache.layout == required, "CacheConfig::layout is ", to_string(config.cache.layout), "; ",
                to_string(profile), " requires ", to_string(required), " on devices of compute capability 10.x");
}

void check_same_hyperparameters(const GlobalHyperparameters& hyperparameters, BackendProfile profile) {
  if (profile != BackendProfile::kVllm2025_07) {
    core::require(
        hyperparameters.has_same_window_lefts,
        "Window left is not the same for all layers. One potential fix is to set disable_sliding_window=True");
  }
  core::require(hyperparameters.has_same_all_params,
                "FlashInfer backend currently only supports models in which all layers share the same values for the "
                "following hyperparameters: `window_left`, `logits_soft_cap`, `sm_scale`.");
}

namespace {

/// vLLM: decodes wherever the kernels are there, prefills as the dispatch says.
void choose_vllm_paths(const FlashInferMetadataBuilder::State& state, const CommonAttentionMetadata& batch,
                       FlashInferMetadata& metadata) {
  TrtllmAttentionQuery query;
  query.num_qo_heads = state.num_qo_heads;
  query.num_kv_heads = state.spec.num_kv_heads;
  query.num_tokens = metadata.split.num_prefill_tokens;
  query.max_seq_len = batch.max_seq_len;
  query.dcp_world_size = state.config.parallel.decode_context_parallel_size;
  query.kv_cache_dtype = state.config.cache.cache_dtype;
  query.q_dtype = state.q_data_type;
  query.is_prefill = true;
  query.force_use_trtllm = state.dispatch.force_use_trtllm_attention();  // the original forgets it here
  query.has_sinks = state.hyperparameters.first.has_sinks;
  query.has_spec = state.reorder_threshold > 1;
  metadata.prefill_use_trtllm = state.dispatch.use_trtllm_attention(query);
  metadata.decode_use_trtllm = state.use_block_tables && query.dcp_world_size <= 1;
}

}  // namespace

void choose_paths(const FlashInferMetadataBuilder::State& state, const CommonAttentionMetadata& batch,
                  FlashInferMetadata& metadata) {
  metadata.q_data_type = state.q_data_type;
  if (state.profile == BackendProfile::kNative) {
    metadata.prefill_use_trtllm = metadata.decode_use_trtllm = state.use_block_tables && !metadata.use_cascade;
    return;
  }
  if (state.profile != BackendProfile::kVllm2025_07) choose_vllm_paths(state, batch, metadata);
  bool all_block_tables = metadata.prefill_use_trtllm && metadata.decode_use_trtllm;
  if (state.profile == BackendProfile::kVllm2026_03) {  // it looks at the parts that the batch has
    all_block_tables = (metadata.prefill_use_trtllm || metadata.split.num_prefills == 0) &&
                       (metadata.decode_use_trtllm || metadata.split.num_decodes == 0);
  }
  if (!all_block_tables) {
    if (state.hyperparameters.first.has_sinks) refuse_sinks();
    check_same_hyperparameters(state.hyperparameters, state.profile);
  }
  if (metadata.use_cascade) metadata.prefill_use_trtllm = metadata.decode_use_trtllm = false;
  // For this batch only: the original's assignment lasts for good.
  if (!all_block_tables || metadata.use_cascade) metadata.q_data_type = state.planned_q_type;
}

void check_batch(const AttentionSpec& spec, const EngineConfig& config, const CommonAttentionMetadata& batch) {
  if (!batch.causal)
    core::fail(ErrorCode::kUnsupported, "causal is false; the FlashInfer backend takes causal batches");
  if (!batch.causal_per_request.empty() || !batch.mm_req_doc_ranges.empty()) {
    core::fail(ErrorCode::kUnsupported,
               "causal_per_request and mm_req_doc_ranges are not taken by the FlashInfer backend; leave them empty");
  }
  if (!batch.encoder_seq_lens.empty() || !batch.logits_indices_padded.empty()) {
    core::fail(ErrorCode::kUnsupported,
               "encoder_seq_lens and logits_indices_padded are not taken by the FlashInfer backend; leave them empty");
  }
  check_batch_lengths(spec, config, batch);
  const std::span<const int32_t> seq_lens = batch.seq_lens.first(static_cast<size_t>(batch.num_reqs));
  const bool has_keys = std::ranges::any_of(seq_lens, [](int32_t seq_len) { return seq_len > 0; });
  core::require(batch.block_table.data != nullptr || !has_keys, "the block table has no data; seq_lens has keys");
  check_dcp_lengths(config, batch);
}

}  // namespace folio::inline v0::backends
