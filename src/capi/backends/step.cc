#include "capi/backends/step.hpp"

namespace folio::inline v0::capi {

using backends::CommonAttentionMetadata;
using backends::EngineConfig;

EngineConfig to_engine(const folio_engine_config* config) {
  const folio_engine_config given = read_struct(config, "config");
  core::require(given.reserved == 0, "config.reserved is ", given.reserved, "; it is 0");
  EngineConfig converted;
  converted.model.dtype = to_dtype(given.dtype, "config.dtype");
  core::require(converted.model.dtype != DType::kUnset, "config.dtype is unset");
  converted.model.max_model_len = given.max_model_len;
  converted.model.num_attention_heads = given.num_attention_heads;
  converted.model.num_kv_heads = given.num_kv_heads;
  if (given.cache_dtype != nullptr) converted.cache.cache_dtype = given.cache_dtype;
  converted.cache.layout = to_layout(given.layout, "config.layout");
  if (given.tensor_parallel_size != 0) converted.parallel.tensor_parallel_size = given.tensor_parallel_size;
  converted.scheduler.max_num_seqs = given.max_num_seqs;
  converted.scheduler.max_num_batched_tokens = given.max_num_batched_tokens;
  if (given.num_speculative_tokens != 0) {
    converted.speculative.emplace().num_speculative_tokens = given.num_speculative_tokens;
  }
  if (given.full_decode_graphs != 0) converted.compilation.decode_graph_mode = backends::DecodeGraphMode::kFull;
  converted.compilation.max_capture_size = given.max_capture_size;
  converted.determinism = to_enum(given.determinism, Determinism::kScheduleInvariant, "config.determinism");
  return converted;
}

backends::AttentionSpec to_spec(const folio_attention_spec* spec) {
  const folio_attention_spec& given = deref(spec, "spec");
  backends::AttentionSpec converted;
  converted.page_size = given.page_size;
  converted.num_kv_heads = given.num_kv_heads;
  converted.head_size = given.head_size;
  converted.dtype = to_dtype(given.dtype, "spec.dtype");
  return converted;
}

backends::KvCacheLayout to_layout(folio_kv_cache_layout layout, const char* name) {
  return to_enum(layout, backends::KvCacheLayout::kHnd, name);
}

backends::CascadeMode to_cascade(folio_cascade_mode mode) {
  return to_enum(mode, backends::CascadeMode::kAuto, "options.cascade");
}

backends::BlockTableView to_block_table(const folio_block_table& table) {
  return {table.data, table.num_rows, table.num_columns, table.row_stride};
}

CommonAttentionMetadata to_batch(const folio_step_batch* batch) {
  const folio_step_batch given = read_struct(batch, "batch");
  const int64_t requests = given.num_reqs;
  core::require(requests >= 0, "batch.num_reqs is ", requests);
  CommonAttentionMetadata converted;
  converted.where = to_enum(given.where, Where::kDevice, "batch.where");
  converted.query_start_loc = to_span(given.query_start_loc, requests + 1, "batch.query_start_loc");
  converted.seq_lens = to_span(given.seq_lens, requests, "batch.seq_lens");
  converted.num_reqs = given.num_reqs;
  converted.num_actual_tokens = given.num_actual_tokens;
  converted.max_query_len = given.max_query_len;
  converted.max_seq_len = given.max_seq_len;
  converted.block_table = to_block_table(given.block_table);
  converted.slot_mapping = to_span(given.slot_mapping, given.num_slots, "batch.slot_mapping");
  converted.causal = given.non_causal == 0;
  converted.causal_per_request = to_optional_span(given.causal_per_request, requests, "batch.causal_per_request");
  // The same layout on both sides (layout.cc).
  converted.mm_req_doc_ranges =
      to_span(reinterpret_cast<const backends::BidirectionalRange*>(given.bidirectional_ranges),
              given.num_bidirectional_ranges, "batch.bidirectional_ranges");
  converted.query_start_loc_host =
      to_optional_span(given.query_start_loc_host, requests + 1, "batch.query_start_loc_host");
  converted.seq_lens_host = to_optional_span(given.seq_lens_host, requests, "batch.seq_lens_host");
  converted.seq_lens_host_upper_bound =
      to_optional_span(given.seq_lens_host_upper_bound, requests, "batch.seq_lens_host_upper_bound");
  converted.block_table_host = to_block_table(given.block_table_host);
  converted.encoder_seq_lens = to_optional_span(given.encoder_seq_lens, requests, "batch.encoder_seq_lens");
  converted.encoder_seq_lens_host =
      to_optional_span(given.encoder_seq_lens_host, requests, "batch.encoder_seq_lens_host");
  converted.positions = to_optional_span(given.positions, given.num_actual_tokens, "batch.positions");
  converted.is_prefilling = to_optional_span(given.is_prefilling, requests, "batch.is_prefilling");
  return converted;
}

ForwardArgs to_forward_args(const folio_forward_args* args) {
  const folio_forward_args given = read_struct(args, "args");
  ForwardArgs converted;
  converted.scales.q = to_scale(given.q_scale, "q_scale.granularity");
  converted.scales.k = to_scale(given.k_scale, "k_scale.granularity");
  converted.scales.v = to_scale(given.v_scale, "v_scale.granularity");
  converted.query = to_view(given.query, "query.dtype");
  converted.key = to_view(given.key, "key.dtype");
  converted.value = to_view(given.value, "value.dtype");
  converted.kv_cache = to_view(given.kv_cache, "kv_cache.dtype");
  converted.output = to_view(given.output, "output.dtype");
  converted.quantization.scale = given.output_scale;
  converted.quantization.block_scale = to_view(given.output_block_scale, "output_block_scale.dtype");
  converted.quantization.scale_where = to_enum(given.output_scale_where, Where::kDevice, "output_scale_where");
  return converted;
}

}  // namespace folio::inline v0::capi
