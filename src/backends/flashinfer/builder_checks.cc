#include <algorithm>

#include "backends/flashinfer/builder_state.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "folio/backends/flashinfer/backend.hpp"

namespace folio::inline v0::backends {
namespace {

/// `value` within an optional bound of the configuration.
void require_bound(const char* name, int32_t value, const char* bound_name, int32_t bound) {
  core::require(value >= 0, name, " is ", value, "; it must not be negative");
  core::require(bound == 0 || value <= bound, name, " is ", value, "; ", bound_name, " is ", bound);
}

void check_sizes(const EngineConfig& config, const CommonAttentionMetadata& batch) {
  require_bound("num_reqs", batch.num_reqs, "max_num_seqs", config.scheduler.max_num_seqs);
  require_bound("num_actual_tokens", batch.num_actual_tokens, "max_num_batched_tokens",
                config.scheduler.max_num_batched_tokens);
  const auto num_reqs = static_cast<size_t>(batch.num_reqs);
  core::require(batch.query_start_loc.size() > num_reqs, "query_start_loc has ", batch.query_start_loc.size(),
                " entries; num_reqs is ", batch.num_reqs, ", which needs one more than that");
  core::require(batch.seq_lens.size() >= num_reqs, "seq_lens has ", batch.seq_lens.size(), " entries; num_reqs is ",
                batch.num_reqs);
  core::require(batch.slot_mapping.size() <= static_cast<size_t>(batch.num_actual_tokens), "slot_mapping has ",
                batch.slot_mapping.size(), " entries; num_actual_tokens is ", batch.num_actual_tokens);
  core::require(batch.block_table.num_rows >= batch.num_reqs, "the block table has ", batch.block_table.num_rows,
                " rows; num_reqs is ", batch.num_reqs);
  core::require(batch.block_table.row_stride >= batch.block_table.num_columns, "the block table has ",
                batch.block_table.num_columns, " columns and a row stride of ", batch.block_table.row_stride);
}

}  // namespace

void check_engine_config(const Context& context, const EngineConfig& config) {
  if (context.device().type != DeviceType::kCpu) {
    core::fail(ErrorCode::kUnsupported, "the FlashInfer backend takes CPU contexts");
  }
  if (config.parallel.decode_context_parallel_size != 1) {
    core::fail(ErrorCode::kUnsupported, "decode_context_parallel_size is ",
               config.parallel.decode_context_parallel_size, "; the FlashInfer backend takes 1");
  }
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
  if (!batch.encoder_seq_lens.empty() || !batch.dcp_local_seq_lens.empty() || !batch.logits_indices_padded.empty()) {
    core::fail(
        ErrorCode::kUnsupported,
        "encoder_seq_lens, dcp_local_seq_lens and logits_indices_padded are not taken by the FlashInfer backend; "
        "leave them empty");
  }
  check_sizes(config, batch);

  core::require(batch.query_start_loc[0] == 0, "query_start_loc begins with ", batch.query_start_loc[0],
                "; it must begin with 0");
  const int64_t table_tokens = int64_t{batch.block_table.num_columns} * spec.page_size;
  const int32_t max_model_len = config.model.max_model_len;
  for (int32_t i = 0; i < batch.num_reqs; ++i) {
    const auto at = static_cast<size_t>(i);
    const int32_t query_len = batch.query_start_loc[at + 1] - batch.query_start_loc[at];
    const int32_t seq_len = batch.seq_lens[at];
    core::require(query_len >= 0 && query_len <= batch.max_query_len, "request ", i, " has ", query_len,
                  " query tokens; max_query_len is ", batch.max_query_len);
    core::require(seq_len >= query_len && seq_len <= batch.max_seq_len, "request ", i, " has a seq_len of ", seq_len,
                  " and ", query_len, " query tokens; max_seq_len is ", batch.max_seq_len);
    core::require(max_model_len == 0 || seq_len <= max_model_len, "request ", i, " has a seq_len of ", seq_len,
                  "; max_model_len is ", max_model_len);
    core::require(seq_len <= table_tokens, "request ", i, " has a seq_len of ", seq_len,
                  "; a row of the block table has ", batch.block_table.num_columns, " pages of ", spec.page_size,
                  " tokens");
  }
  const int32_t num_tokens = batch.query_start_loc[static_cast<size_t>(batch.num_reqs)];
  core::require(num_tokens <= batch.num_actual_tokens, "the requests have ", num_tokens,
                " query tokens; num_actual_tokens is ", batch.num_actual_tokens);
}

}  // namespace folio::inline v0::backends
