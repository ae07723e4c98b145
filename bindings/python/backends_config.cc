#include "backends.hpp"
#include "backends_names.hpp"
#include "fields.hpp"
#include "rank_names.hpp"

namespace folio::python {

void bind_backends_config(nb::module_& m) {
  bind_enum<bk::AttentionType>(m);
  bind_enum<bk::BackendProfile>(m);
  bind_enum<bk::KvCacheLayout>(m);
  bind_enum<bk::DecodeGraphMode>(m);
  bind_enum<bk::CascadeMode>(m);
  bind_enum<bk::LogLevel>(m);
  fields_of<bk::ParallelConfig>(
      "ParallelConfig", "How a model is divided over ranks.",
      field("tensor_parallel_size", &bk::ParallelConfig::tensor_parallel_size, "Ranks that divide the heads; >= 1."),
      field("decode_context_parallel_size", &bk::ParallelConfig::decode_context_parallel_size,
            "Ranks that divide a request's KV by tokens; >= 1. Above 1 builders are given their group, dcp_group."),
      field("decode_context_parallel_rank", &bk::ParallelConfig::decode_context_parallel_rank,
            "This rank, as in the group."),
      field("cp_kv_cache_interleave_size", &bk::ParallelConfig::cp_kv_cache_interleave_size,
            "Neighbouring tokens that stay on one rank; divides the page size."),
      field("dcp_comm_backend", &bk::ParallelConfig::dcp_comm_backend,
            "How ranks combine their results: 'ag_rs' or 'a2a'."),
      field("dcp_replicated_queries", &bk::ParallelConfig::dcp_replicated_queries,
            "Every rank is given the queries of all ranks' heads; layers have a dcp_query_ranks of as many."),
      field("dcp_all_heads_out", &bk::ParallelConfig::dcp_all_heads_out,
            "Outputs have the heads of all ranks. Needs dcp_replicated_queries and 'ag_rs'."),
      field("dcp_transport", &bk::ParallelConfig::dcp_transport, "By what ranks exchange, a DcpTransport."),
      optional_dtype("dcp_partial_dtype", &bk::ParallelConfig::dcp_partial_dtype,
                     "What partial results travel in: None, float32, or a layer's 16-bit output dtype."))
      .bind(m);
  fields_of<bk::ModelConfig>(
      "ModelConfig", "The model, whole.",
      field("dtype", &bk::ModelConfig::dtype, "Of activations: queries, new keys and values, outputs."),
      field("max_model_len", &bk::ModelConfig::max_model_len,
            "Longest request in tokens; builders refuse longer ones. 0: no bound."),
      field("num_attention_heads", &bk::ModelConfig::num_attention_heads, "Of the whole model."),
      field("num_kv_heads", &bk::ModelConfig::num_kv_heads, "Of the whole model."))
      .bind(m);
  fields_of<bk::CacheConfig>(
      "CacheConfig", "The KV cache.",
      field("cache_dtype", &bk::CacheConfig::cache_dtype,
            "'auto' (the model's), 'float32', 'float16', 'bfloat16', 'fp8', 'fp8_e4m3' or 'fp8_e5m2'."),
      field("layout", &bk::CacheConfig::layout, "Of the caches that layers are given; others are refused."))
      .bind(m);
  fields_of<bk::SchedulerConfig>(
      "SchedulerConfig", "Bounds of a batch; 0: none.",
      field("max_num_seqs", &bk::SchedulerConfig::max_num_seqs, "Most requests of a batch."),
      field("max_num_batched_tokens", &bk::SchedulerConfig::max_num_batched_tokens, "Most tokens of a batch."))
      .bind(m);
  fields_of<bk::SpeculativeConfig>(
      "SpeculativeConfig", "Drafts that are verified.",
      field("num_speculative_tokens", &bk::SpeculativeConfig::num_speculative_tokens, "Drafts a request."),
      field("parallel_drafting", &bk::SpeculativeConfig::parallel_drafting, "Drafts are made at once."))
      .bind(m);
  fields_of<bk::CompilationConfig>(
      "CompilationConfig", "Captured graphs.",
      field("decode_graph_mode", &bk::CompilationConfig::decode_graph_mode, "Which batches are replayed."),
      field("max_capture_size", &bk::CompilationConfig::max_capture_size, "Most tokens of a captured batch."))
      .bind(m);
  fields_of<bk::EngineConfig>(
      "EngineConfig", "What an engine is configured with, as far as attention is concerned.",
      field("model", &bk::EngineConfig::model, "The model."), field("cache", &bk::EngineConfig::cache, "The KV cache."),
      field("parallel", &bk::EngineConfig::parallel, "Ranks."),
      field("scheduler", &bk::EngineConfig::scheduler, "Bounds of batches."),
      field("speculative", &bk::EngineConfig::speculative, "Drafts; None: none."),
      field("compilation", &bk::EngineConfig::compilation, "Captured graphs."),
      field("determinism", &bk::EngineConfig::determinism, "vLLM's batch-invariant mode is BATCH_INVARIANT."),
      field("use_block_table_kernels", &bk::EngineConfig::use_block_table_kernels,
            "Forces the kernels that take dense tables (TensorRT-LLM's) on or off."))
      .bind(m);
  fields_of<bk::AttentionSpec>("AttentionSpec",
                               "One group of layers that share a KV cache format and page tables; sizes of one rank.",
                               field("page_size", &bk::AttentionSpec::page_size, "Tokens per page."),
                               field("num_kv_heads", &bk::AttentionSpec::num_kv_heads, "KV heads of one rank."),
                               field("head_size", &bk::AttentionSpec::head_size, "Elements of a head."),
                               field("dtype", &bk::AttentionSpec::dtype, "As stored: the model's, or fp8."))
      .bind(m);
  m.def("reorder_batch_threshold", &bk::reorder_batch_threshold, nb::arg("config"), nb::arg("base"),
        nb::arg("supports_spec_as_decode"), nb::arg("supports_dcp_with_varlen"),
        "From how many scheduled tokens on a request counts as prefill rather than decode.");
}

}  // namespace folio::python
