#include <algorithm>

#include "backends/common/batch_checks.hpp"
#include "backends/common/dcp_step.hpp"
#include "backends/flashinfer/builder_state.hpp"
#include "core/error.hpp"
#include "folio/backends/flashinfer/backend.hpp"

namespace folio::inline v0::backends {
void check_engine_config(const Context& context, const AttentionSpec& spec, const EngineConfig& config) {
  if (context.device().type != DeviceType::kCpu) {
    core::fail(ErrorCode::kUnsupported, "the FlashInfer backend takes CPU contexts");
  }
  check_dcp_config(config, spec);
  if (config.compilation.decode_graph_mode != DecodeGraphMode::kNone) {
    core::fail(ErrorCode::kUnsupported, "decode_graph_mode is kFull; the FlashInfer backend takes kNone");
  }
  if (config.use_block_table_kernels.value_or(false)) {
    core::fail(ErrorCode::kUnsupported,
               "use_block_table_kernels is true; the FlashInfer backend has its planned kernels only");
  }
}

void check_profile(const AttentionSpec& spec, const EngineConfig& config, const GlobalHyperparameters& hyperparameters,
                   BackendProfile profile) {
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
  // The originals have sinks in the kernels that take block tables only.
  if (hyperparameters.first.has_sinks) {
    core::fail(ErrorCode::kUnsupported,
               "FlashInfer backend currently does not support attention sinks, please use trtllm on blackwell or flash "
               "attention on earlier GPUs.");
  }
}

void check_same_hyperparameters(const GlobalHyperparameters& hyperparameters, BackendProfile profile) {
  if (profile == BackendProfile::kNative) return;
  if (profile != BackendProfile::kVllm2025_07) {
    core::require(
        hyperparameters.has_same_window_lefts,
        "Window left is not the same for all layers. One potential fix is to set disable_sliding_window=True");
  }
  core::require(hyperparameters.has_same_all_params,
                "FlashInfer backend currently only supports models in which all layers share the same values for the "
                "following hyperparameters: `window_left`, `logits_soft_cap`, `sm_scale`.");
}

void check_batch(const AttentionSpec& spec, const EngineConfig& config, const CommonAttentionMetadata& batch) {
  core::require(batch.where == Where::kHost, "the batch's arrays are on a device; the context is a CPU's");
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
  check_dcp_lengths(config, batch);
}

}  // namespace folio::inline v0::backends
