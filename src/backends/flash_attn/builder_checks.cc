#include <algorithm>
#include <string>

#include "backends/common/batch_checks.hpp"
#include "backends/common/dcp_step.hpp"
#include "backends/common/step_levels.hpp"
#include "backends/flash_attn/builder_state.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends {

void check_flash_attn_config(const Context& context, const AttentionSpec& spec, const EngineConfig& config,
                             const FlashAttentionOptions& options) {
  check_dcp_config(context, config, spec);
  if (config.use_block_table_kernels.value_or(false)) {
    core::fail(ErrorCode::kUnsupported,
               "use_block_table_kernels is true; the FlashAttention backend has its planned kernels only, which read "
               "block tables as they are");
  }
  check_cascade_options(options.cascade, options.max_cascade_levels);
  core::require(options.steps_in_flight >= 1, "steps_in_flight is ", options.steps_in_flight, "; it is 1 or more");
  core::require(options.max_num_splits_for_graphs.value_or(1) >= 1, "max_num_splits_for_graphs is ",
                options.max_num_splits_for_graphs.value_or(0), "; it is 1 or more");
  if (config.compilation.decode_graph_mode != DecodeGraphMode::kFull) return;
  core::require(config.scheduler.max_num_seqs > 0 && config.scheduler.max_num_batched_tokens > 0 &&
                    config.model.max_model_len > 0,
                "decode_graph_mode is kFull; max_num_seqs, max_num_batched_tokens and max_model_len must be given");
  core::require(!on_gpu(context) || options.steps_in_flight == 1, "steps_in_flight is ", options.steps_in_flight,
                " under decode_graph_mode kFull; captured graphs read one step's plan: on a GPU it must be 1");
}

void check_flash_attn_profile(const AttentionSpec& spec, const EngineConfig& config, FlashAttentionLayers layers,
                              const FlashAttentionFacts& facts) {
  AttentionRequirements requirements;
  requirements.head_size = spec.head_size;
  requirements.dtype = config.model.dtype;
  requirements.kv_cache_dtype = config.cache.cache_dtype;
  requirements.page_size = spec.page_size;
  requirements.has_sinks = std::ranges::any_of(layers, [](const auto& layer) { return !layer.impl->sinks().empty(); });
  requirements.device = facts.platform.device;
  requirements.attn_type = layers.front().impl->attn_type();
  requirements.use_batch_invariant = config.determinism >= Determinism::kBatchInvariant;
  std::string reasons;
  for (const std::string& reason : FlashAttentionBackend::validate_configuration(requirements, facts)) {
    reasons += (reasons.empty() ? "" : "; ") + reason;
  }
  if (!reasons.empty()) {
    core::fail(ErrorCode::kUnsupported, FlashAttentionBackend::get_name(), " of ", to_string(facts.profile), ": ",
               reasons);
  }
}

void check_flash_attn_batch(const AttentionSpec& spec, const EngineConfig& config, AttentionType attn_type,
                            const CommonAttentionMetadata& batch) {
  if (!batch.logits_indices_padded.empty()) {
    core::fail(ErrorCode::kUnsupported,
               "logits_indices_padded is not taken by the FlashAttention backend; leave it empty "
               "(make_kv_sharing_fast_prefill_common_attn_metadata makes a batch of the tokens whose logits are "
               "wanted)");
  }
  if (!batch.causal_per_request.empty() || !batch.mm_req_doc_ranges.empty()) {
    core::fail(ErrorCode::kUnsupported,
               "causal_per_request and mm_req_doc_ranges are not taken by the FlashAttention backend; leave them empty "
               "(causal is for the whole batch)");
  }
  core::require(batch.encoder_seq_lens.empty() || attn_type == AttentionType::kEncoderDecoder,
                "encoder_seq_lens is given to layers of ", to_string(attn_type), " attention");
  const bool decodes = attn_type == AttentionType::kDecoder;
  const bool crosses = attn_type == AttentionType::kEncoderDecoder;
  check_batch_lengths(
      spec, config, batch,
      {.keys_in_pages = decodes || crosses, .queries_are_keys = decodes, .slots_are_for_queries = decodes});
  check_dcp_lengths(config, batch);
}

}  // namespace folio::inline v0::backends
