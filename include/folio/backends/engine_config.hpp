#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "folio/distributed/dcp_attention.hpp"
#include "folio/distributed/process_group.hpp"
#include "folio/types/attention.hpp"
#include "folio/types/dtype.hpp"
#include "folio/types/export.hpp"

namespace folio::inline v0::backends {

/// Whose rules a backend answers by: its names, limits, refusals and reorder. The arithmetic is the same under all of
/// them.
enum class BackendProfile : int32_t {
  kNative = 0,       ///< what Folio itself can do; the default
  kVllm2025_07 = 1,  ///< vLLM v1 of July 2025
  kVllm2025_12 = 2,  ///< vLLM v1 of December 2025
  kVllm2026_03 = 3,  ///< vLLM v1 of March 2026
};

/// "native", "vllm-2025-07", "vllm-2025-12", "vllm-2026-03".
FOLIO_API std::string_view to_string(BackendProfile profile);

/// The order of tokens and KV heads inside a page: NHD is [token][head][dim], HND is [head][token][dim]. One explicit
/// value of the configuration; nothing remembers it and nothing in the environment changes it.
enum class KvCacheLayout : int32_t { kNhd = 0, kHnd = 1 };

/// "NHD" or "HND"; anything else throws kInvalidArgument.
FOLIO_API KvCacheLayout kv_cache_layout_from_name(std::string_view name);
FOLIO_API std::string_view to_string(KvCacheLayout layout);

/// The KV cache's element type from an engine's string: "auto" is the model's dtype; "float32", "float16", "bfloat16";
/// "fp8" and "fp8_e4m3" are e4m3, "fp8_e5m2" is e5m2. Throws kInvalidArgument for any other name.
FOLIO_API DType kv_cache_dtype_from_name(std::string_view name, DType model_dtype);

struct ParallelConfig {
  int32_t tensor_parallel_size = 1;          ///< ranks that divide the heads; >= 1
  int32_t decode_context_parallel_size = 1;  ///< ranks that divide a request's KV by tokens; >= 1
  int32_t decode_context_parallel_rank = 0;
  int32_t cp_kv_cache_interleave_size = 1;  ///< neighbouring tokens that stay on one rank; divides the page size
  std::string dcp_comm_backend = "ag_rs";   ///< how ranks combine their results: "ag_rs" or "a2a"
  distributed::DcpTransport dcp_transport = distributed::DcpTransport::kAuto;  ///< as DcpConfig::transport
  /// The ranks that divide the KV, which all have the same KV heads; borrowed, for as long as there are builders.
  /// Needed where decode_context_parallel_size is above 1.
  distributed::ProcessGroup* dcp_group = nullptr;
  /// Every rank is given the queries of all ranks' heads (replicated weights): none are gathered, nor can ranks compare
  /// their steps. Layers say so too, in dcp_query_ranks.
  bool dcp_replicated_queries = false;
  /// Outputs have the heads of all ranks on every rank, rank 0's first, rather than its own. Needs
  /// dcp_replicated_queries and "ag_rs".
  bool dcp_all_heads_out = false;
  /// What partial results travel in, as DcpConfig::partial_dtype: float32, or a layer's 16-bit output dtype.
  DType dcp_partial_dtype = DType::kUnset;
};

struct ModelConfig {
  DType dtype = DType::kBFloat16;   ///< of activations: queries, new keys and values, outputs
  int32_t max_model_len = 0;        ///< longest request in tokens; builders refuse longer ones. 0 = no bound
  int32_t num_attention_heads = 0;  ///< of the whole model
  int32_t num_kv_heads = 0;         ///< of the whole model

  /// Heads of one rank. Throw kInvalidArgument where the heads do not divide; KV heads fewer than ranks are replicated.
  FOLIO_API int32_t get_num_attention_heads(const ParallelConfig& parallel) const;
  FOLIO_API int32_t get_num_kv_heads(const ParallelConfig& parallel) const;
};

struct CacheConfig {
  std::string cache_dtype = "auto";            ///< see kv_cache_dtype_from_name
  KvCacheLayout layout = KvCacheLayout::kNhd;  ///< of the caches that layers are given; others are refused
};

struct SchedulerConfig {
  int32_t max_num_seqs = 0;            ///< most requests of a batch; builders refuse more. 0 = no bound
  int32_t max_num_batched_tokens = 0;  ///< most tokens of a batch; builders refuse more. 0 = no bound
};

struct SpeculativeConfig {
  int32_t num_speculative_tokens = 0;
  bool parallel_drafting = false;
};

/// Which batches the engine replays from captured graphs.
enum class DecodeGraphMode : int32_t { kNone = 0, kFull = 1 };

struct CompilationConfig {
  DecodeGraphMode decode_graph_mode = DecodeGraphMode::kNone;
  int32_t max_capture_size = 0;  ///< most tokens of a captured batch
};

/// What an engine is configured with, as far as attention backends are concerned. A backend that cannot honour a value
/// refuses it when it is constructed.
struct EngineConfig {
  ModelConfig model;
  CacheConfig cache;
  ParallelConfig parallel;
  SchedulerConfig scheduler;
  std::optional<SpeculativeConfig> speculative;
  CompilationConfig compilation;
  Determinism determinism = Determinism::kRunToRun;  ///< vLLM's batch-invariant mode is kBatchInvariant
  std::optional<bool> use_block_table_kernels;  ///< force the kernels that take dense tables (TensorRT-LLM's) on or off
};

/// One group of layers that share a KV cache format and page tables. Sizes are those of one rank.
struct AttentionSpec {
  int32_t page_size = 16;  ///< tokens per page
  int32_t num_kv_heads = 0;
  int32_t head_size = 0;
  DType dtype = DType::kBFloat16;  ///< as stored: the model's, or fp8
};

/// From how many scheduled tokens on a request counts as prefill rather than decode: requests with at most this many do
/// not. `base`; where the backend can verify drafts as decodes, at least 1 + the speculative tokens (twice them with
/// parallel drafting); 1 under decode context parallelism, unless the backend takes several tokens a request there.
FOLIO_API int32_t reorder_batch_threshold(const EngineConfig& config, int32_t base, bool supports_spec_as_decode,
                                          bool supports_dcp_with_varlen);

}  // namespace folio::inline v0::backends
