#include <algorithm>
#include <string>

#include "backends/common/batch_checks.hpp"
#include "backends/common/dcp_step.hpp"
#include "backends/common/step_levels.hpp"
#include "backends/flash_attn/builder_state.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends {

void check_flash_attn_config(const Context& context, const AttentionSpec& spec, const EngineConfig& config,
                             const FlashAttentionOptions& options) {
  const int32_t ranks = config.parallel.decode_context_parallel_size;
  if (ranks > 1 && on_gpu(context) && options.aot_schedule.value_or(false)) {
    core::fail(ErrorCode::kUnsupported, "aot_schedule is true with a decode_context_parallel_size of ", ranks,
               " on a GPU; there a changed schedule is found when ranks already exchange what it left out");
  }
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
  const bool graphs = config.compilation.decode_graph_mode == DecodeGraphMode::kFull;
  core::require(!options.plan_from_device_lengths || on_gpu(context),
                "plan_from_device_lengths is set; the context is a CPU's, whose lengths are the host's");
  core::require((!graphs && !options.plan_from_device_lengths) ||
                    (config.scheduler.max_num_seqs > 0 && config.scheduler.max_num_batched_tokens > 0 &&
                     config.model.max_model_len > 0),
                graphs ? "decode_graph_mode is kFull" : "plan_from_device_lengths is set",
                "; max_num_seqs, max_num_batched_tokens and max_model_len must be given");
  if (options.plan_from_device_lengths &&
      (options.aot_schedule.value_or(false) || options.cascade == CascadeMode::kAuto)) {
    core::fail(ErrorCode::kUnsupported, "plan_from_device_lengths is set with aot_schedule ",
               options.aot_schedule.value_or(false) ? "true" : "false", " and cascade ", to_string(options.cascade),
               "; false, and off or heuristic are offered: the others are planned from host lengths");
  }
  if (!graphs) return;
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

namespace {

/// What this backend does not take, and for whose keys the rest is.
BatchRules rules_of(AttentionType attn_type, const CommonAttentionMetadata& batch) {
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
  return {.keys_in_pages = decodes || crosses, .queries_are_keys = decodes, .slots_are_for_queries = decodes};
}

}  // namespace

void check_flash_attn_batch(const AttentionSpec& spec, const EngineConfig& config, AttentionType attn_type,
                            const CommonAttentionMetadata& batch) {
  check_batch_lengths(spec, config, batch, rules_of(attn_type, batch));
}

void check_device_lengths(const AttentionSpec& spec, const EngineConfig& config, AttentionType attn_type,
                          const CommonAttentionMetadata& batch) {
  core::require(batch.where == Where::kDevice, "the batch's arrays are on the host; plan_from_device_lengths is set");
  const BatchRules rules = rules_of(attn_type, batch);
  check_batch_sizes(config, batch, rules);
  const auto require_within = [](const char* name, int32_t value, const char* bound_name, int64_t bound) {
    core::require(value >= 0 && value <= bound, name, " is ", value, "; it must be in [0, ", bound, "], ", bound_name);
  };
  require_within("max_query_len", batch.max_query_len, "max_num_batched_tokens",
                 config.scheduler.max_num_batched_tokens);
  require_within("max_seq_len", batch.max_seq_len, "max_model_len", config.model.max_model_len);
  // The lengths are not known here: whatever they are within the bound must be in the table.
  require_within("max_seq_len", batch.max_seq_len, "the tokens of a row of the block table",
                 core::checked_mul(int64_t{batch.block_table.num_columns}, int64_t{spec.page_size},
                                   int64_t{config.parallel.decode_context_parallel_size}));
  core::require(batch.dcp_local_seq_lens.empty(), "dcp_local_seq_lens is given with plan_from_device_lengths; ",
                "shares of lengths are made on the device: leave it empty");
  const auto check_bounds = [&batch](const char* name, std::span<const int32_t> lens) {
    core::require(lens.empty() || lens.size() >= static_cast<size_t>(batch.num_reqs), name, " has ", lens.size(),
                  " entries; num_reqs is ", batch.num_reqs);
    for (int32_t i = 0; i < batch.num_reqs && !lens.empty(); ++i) {
      const int32_t len = lens[static_cast<size_t>(i)];
      core::require(len >= 0 && len <= batch.max_seq_len, "request ", i, " has a ", name, " of ", len,
                    "; max_seq_len is ", batch.max_seq_len);
    }
  };
  check_bounds("seq_lens_host_upper_bound", batch.seq_lens_host_upper_bound);
  check_bounds("seq_lens_host", batch.seq_lens_host);
}

}  // namespace folio::inline v0::backends
