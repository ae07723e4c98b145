#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "folio/attention.hpp"
#include "folio/backends/attention_layer.hpp"
#include "folio/backends/attention_metadata.hpp"
#include "folio/backends/batch_order.hpp"
#include "folio/backends/cascade.hpp"
#include "folio/backends/cascade_heuristic.hpp"
#include "folio/backends/dcp_plans.hpp"
#include "folio/backends/dispatch.hpp"
#include "folio/backends/engine_config.hpp"
#include "folio/backends/flashinfer/block_table.hpp"
#include "folio/backends/flashinfer/impl.hpp"
#include "folio/backends/once_log.hpp"
#include "folio/backends/window_plans.hpp"
#include "folio/context.hpp"
#include "folio/types/attention.hpp"

namespace folio::inline v0::backends {

struct FlashInferOptions {
  BackendProfile profile = BackendProfile::kNative;
  /// Native: the step is planned for fp8 e4m3 queries with a q scale; needs an e4m3 cache. The vLLM profiles decide by
  /// themselves.
  bool quantize_query = false;
  /// Native: what steps are planned to write, kFloat8E4M3 or kFloat4E2M1x2 by the OutputQuantization that every
  /// `forward` then gets: with shared prefixes and scales per head as ever, under decode context parallelism fp8 only.
  /// kUnset: the model's dtype.
  DType output_dtype = DType::kUnset;
  /// What the vLLM profiles ask which kernels there are. None: one without probes, which has no block-table kernels.
  std::optional<KernelDispatch> dispatch;
  bool disable_q_quantization = false;  ///< VLLM_FLASHINFER_DISABLE_Q_QUANTIZATION; the layers' are to be the same
  bool force_tensor_cores = false;      ///< VLLM_FLASHINFER_FORCE_TENSOR_CORES; kVllm2025_07, elsewhere refused
  std::string force_kernel;             ///< as PrepareOptions::force_kernel
  /// Under DecodeGraphMode::kFull: tokens of the batches that are captured, ascending. The largest is
  /// max_capture_size, where that is given. Empty: vLLM's default_capture_sizes.
  std::vector<int32_t> capture_sizes;
  /// Bytes, VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE: the workspace that plans begin with; it grows where a step needs
  /// more. 0: what ordinary steps need. Refused where the original has a size of its own: kVllm2025_07, and vLLM's
  /// profiles under batch invariance.
  size_t workspace_buffer_size = 0;
  OnceLog log;  ///< takes warnings, each once: what was asked for is not done here, and what is done instead
  /// Who decides which requests of a step read the pages they begin with together; see `build`.
  CascadeMode cascade = CascadeMode::kHeuristic;
  int32_t max_cascade_levels = 4;  ///< kAuto: most shared prefixes inside each other, in [1, kMaxCascadeLevels]
};

/// Requests that a plan covers, and where their tokens begin in the batch.
struct PlannedPart {
  int32_t first_request = 0;
  int32_t num_requests = 0;
  int32_t first_token = 0;
  int32_t num_tokens = 0;
};

/// What one step's layers need: made by FlashInferMetadataBuilder::build, read by FlashInferImpl::forward. Spans point
/// into the engine's arrays. Valid until the builder builds again; `forward` on an older one throws kStalePlan.
/// R = num_reqs, T = num_actual_tokens.
struct FlashInferMetadata {
  int32_t num_reqs = 0;
  int32_t num_actual_tokens = 0;  ///< rows of q, k, v and output that count; what an engine hands over may be longer
  BatchSplit split;               ///< decodes in front, prefills behind
  int32_t max_q_len = 0;
  int32_t max_q_len_prefill = 0;  ///< the longest query among the prefills; max_q_len without prefills
  int32_t max_seq_len = 0;
  std::span<const int32_t> qo_indptr;  ///< [R + 1]: this and the next three as the batch has them, on a GPU there
  std::span<const int32_t> seq_lens;   ///< [R]
  BlockTableView block_table;
  std::span<const int64_t> slot_mapping;
  std::span<const int32_t> qo_indptr_host;  ///< [R + 1], on the host: what was planned from
  std::span<const int32_t> seq_lens_host;   ///< [R], likewise
  DType q_data_type = DType::kUnset;        ///< what forward expects queries to be
  DType data_type = DType::kUnset;          ///< of the KV cache
  DType output_data_type = DType::kUnset;   ///< what `plans` write; outputs of other types do without shared prefixes
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t page_size = 0;
  KvCacheLayout kv_cache_layout = KvCacheLayout::kNhd;  ///< CacheConfig::layout: what forward's cache must lie as
  bool prefill_use_trtllm = false;                      ///< the prefills go to the block-table family
  bool decode_use_trtllm = false;                       ///< the decodes do
  bool use_cascade = false;                             ///< some keys are read once for several requests
  int32_t common_prefix_len = 0;  ///< kHeuristic: tokens that all share, whole pages that every request has computed
  int32_t prefix_request = 0;     ///< whose row of the block table these are read off: the first with queries
  StepCascadeLevels cascade;      ///< kAuto: what requests share
  int32_t num_padded_reqs = 0;    ///< rows of a captured batch that this one is padded to; 0 = no graph
  WindowPlans plans;              ///< one for each window of the group's layers, in front
  DcpWindowPlans dcp_plans;       ///< instead of `plans`, under decode context parallelism
  PlannedPart planned;            ///< what they cover: all, or what the block-table family does not serve
  Workspace workspace;            ///< the builder's: one forward at a time
  BlockTableWorkspace* block_table_workspace = nullptr;  ///< likewise
  const OnceLog* log = nullptr;                          ///< the builder's
  BackendProfile profile = BackendProfile::kNative;
  const uint64_t* current_generation = nullptr;  ///< the builder's count of builds, and which this is
  uint64_t generation = 0;
};

/// A step's page tables in FlashInfer's form (CSR). Valid until asked for again.
struct PagedKvArrays {
  std::span<const int32_t> indptr;         ///< [R + 1], pages
  std::span<const int32_t> indices;        ///< [indptr[R]]
  std::span<const int32_t> last_page_len;  ///< [R]: 1..page_size, 0 for an empty request
  std::span<const int32_t> seq_lens;       ///< [R]; under decode context parallelism this rank's share, as all here
  /// With a common_prefix_len, the arrays above are of what follows the shared prefix; these are the prefix's.
  std::array<int32_t, 2> shared_qo_indptr{};
  std::array<int32_t, 2> shared_kv_page_indptr{};
  std::span<const int32_t> shared_kv_page_indices;
  int32_t shared_kv_last_page_len = 0;
};

/// How a batch-invariant build divides keys, in tokens; -1 = as it sees fit.
struct SplitSizes {
  int32_t decode_fixed_split_size = -1;
  int32_t prefill_fixed_split_size = -1;
  bool disable_split_kv = false;
  friend bool operator==(const SplitSizes&, const SplitSizes&) = default;
};

/// Copies the pages of every row, of which row r has indptr[r + 1] - indptr[r], one row after the other. O(pages).
/// Throws kInvalidArgument where `indices` or a row of the table is too short; nothing is written then.
FOLIO_API void copy_page_indices(const PageTableView& table, std::span<const int32_t> indptr,
                                 std::span<int32_t> indices);

/// Plans every step for one group of layers that share a KV cache format and page tables. Owns the plans' memory and
/// the workspace. Not safe for simultaneous use by several threads.
class FOLIO_API FlashInferMetadataBuilder {
 public:
  /// Chooses kernels for the group's layers (their implementations are read here and not kept). Layers may differ in
  /// window, soft cap, scale, ALiBi and sinks; the vLLM profiles refuse in `build` what their originals refused there.
  /// Throws kInvalidArgument for contradictions (head counts, dtypes), kUnsupported for what is not offered.
  FlashInferMetadataBuilder(const Context& context, const AttentionSpec& spec,
                            std::span<const AttentionLayer<FlashInferImpl>> layers, const EngineConfig& config,
                            const FlashInferOptions& options = {});
  FlashInferMetadataBuilder(FlashInferMetadataBuilder&&) noexcept;
  FlashInferMetadataBuilder& operator=(FlashInferMetadataBuilder&&) noexcept;
  ~FlashInferMetadataBuilder();

  /// Plans a step. The batch is only read. O(R + work tiles) whatever the contexts' lengths, and under kAuto the table
  /// entries that requests share; allocates nothing once warm. Throws kInvalidArgument for a batch that contradicts
  /// itself or the configuration, naming the field; kUnsupported.
  ///
  /// `common_prefix_len`: tokens, a multiple of the page size, that all requests begin with and for which their rows of
  /// the block table name the first one's pages. FlashInferOptions::cascade says what becomes of it:
  /// - kHeuristic: of these pages, those that every request has computed are read once for all.
  /// - kAuto: it is not needed. The block table itself says which neighbouring requests begin with the same pages, at
  ///   several levels, and what saves more bytes than it costs is read once for them (StepCascade). Neighbours matter:
  ///   SharedPrefixFinder::order, asked before reorder_batch, brings sharers together. Batches padded for a graph,
  ///   those of which a part goes to the block-table family, and those under batch invariance or decode context
  ///   parallelism are planned without.
  /// - kOff: it is not used.
  /// Outputs of another type than FlashInferOptions::output_dtype are computed without shared prefixes, whatever was
  /// planned; the log is told.
  ///
  /// On a GPU the plans' upload is enqueued on `stream`, from the host's copies of the lengths; nothing waits, unless
  /// more than four builds are still to be copied. Under decode_graph_mode kFull, batches of decodes up to
  /// decode_cudagraph_max_bs are planned into memory of their padded size: an engine captures `forward` once for each
  /// number of tokens (and slots, padding's being negative), and replays it after any later build of as many.
  FlashInferMetadata build(int32_t common_prefix_len, const CommonAttentionMetadata& batch, Stream stream = {});

  /// Brings the engine's batch into the order that `build` expects. Both spans are [R]. True if requests were swapped.
  /// Under kVllm2025_07 the counts found are kept, and `build` checks that its batch has them.
  bool reorder_batch(std::span<const int32_t> num_scheduled_tokens, std::span<const int32_t> num_computed_tokens,
                     const SwapStates& swap_states);

  /// The page tables of a step as CSR arrays, for those who want them: nothing in `forward` does. O(pages). On a GPU
  /// the pages themselves (indices, shared_kv_page_indices) lie in its memory, where they are gathered on `stream`, and
  /// all else on the host, as FlashInfer's `plan` takes them (WrapperPages). Batches for a graph have num_padded_reqs
  /// rows: beyond R, an indptr that stays, a last_page_len of 1 (FlashInfer takes 0 for a full page) and a length of 0.
  /// What kAuto shares is not taken out of them: they hold all pages of every request.
  PagedKvArrays paged_kv_arrays(const FlashInferMetadata& metadata, Stream stream = {});

  int32_t reorder_batch_threshold() const noexcept;  ///< requests of at most this many tokens are decodes
  int32_t num_qo_heads() const noexcept;
  int32_t num_kv_heads() const noexcept;
  int32_t head_dim() const noexcept;
  int32_t page_size() const noexcept;
  DType kv_cache_dtype() const noexcept;
  DType q_data_type() const noexcept;
  const GlobalHyperparameters& global_hyperparameters() const noexcept;
  std::string kernel_name() const;  ///< which kernel runs

  /// Whether the block-table family can serve this group: the dispatch's answer; native: only where it is forced on,
  /// and not under decode context parallelism, where the log is told and planned kernels are used.
  bool use_trtllm_decode_attention() const noexcept;
  /// Whether a batch's shared prefix should go to `build`. July 2025: FlashAttention's heuristic where cache and model
  /// have one dtype; later vLLM: never; native: the heuristic, over any cache. Throws as
  /// backends::use_cascade_attention.
  bool use_cascade_attention(const CascadeHeuristicInput& input) const;
  /// vLLM under batch invariance: 2048, 4096 and no further division (July 2025: none). Native: what kBatchInvariant
  /// does.
  SplitSizes split_sizes() const noexcept;
  /// Bytes: native, what workspaces hold now, those of captured sizes, block tables and ranks included; vLLM: what the
  /// original has: 256 MiB (July 2025), FlashInferOptions::workspace_buffer_size or 394 MiB, 2 GiB under batch
  /// invariance.
  size_t workspace_buffer_size() const noexcept;
  /// Whether the original would decode on tensor cores: July 2025: forced, or more than 4 q heads a KV head; else
  /// always.
  bool use_tensor_cores() const noexcept;
  /// The largest batch that is padded for a graph: (1 + drafts) x max_num_seqs, at most max_capture_size; 0 = no
  /// graphs.
  int32_t decode_cudagraph_max_bs() const noexcept;

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace folio::inline v0::backends
