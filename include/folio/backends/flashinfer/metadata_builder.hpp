#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "folio/attention.hpp"
#include "folio/backends/attention_layer.hpp"
#include "folio/backends/attention_metadata.hpp"
#include "folio/backends/batch_order.hpp"
#include "folio/backends/dcp_plans.hpp"
#include "folio/backends/engine_config.hpp"
#include "folio/backends/flashinfer/impl.hpp"
#include "folio/backends/window_plans.hpp"
#include "folio/context.hpp"
#include "folio/types/attention.hpp"

namespace folio::inline v0::backends {

struct FlashInferOptions {
  BackendProfile profile = BackendProfile::kNative;
  bool quantize_query = false;  ///< queries come as fp8 e4m3 with a q scale; needs an e4m3 cache
  std::string force_kernel;     ///< as PrepareOptions::force_kernel
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
  std::span<const int32_t> qo_indptr;  ///< [R + 1]
  std::span<const int32_t> seq_lens;   ///< [R]
  BlockTableView block_table;
  std::span<const int64_t> slot_mapping;
  DType q_data_type = DType::kUnset;  ///< what forward expects queries to be
  DType data_type = DType::kUnset;    ///< of the KV cache
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t page_size = 0;
  WindowPlans plans;         ///< one for each window of the group's layers, in front
  DcpWindowPlans dcp_plans;  ///< instead of `plans`, under decode context parallelism
  Workspace workspace;       ///< the builder's: one forward at a time
};

/// A step's page tables in FlashInfer's form (CSR). Valid until asked for again.
struct PagedKvArrays {
  std::span<const int32_t> indptr;         ///< [R + 1], pages
  std::span<const int32_t> indices;        ///< [indptr[R]]
  std::span<const int32_t> last_page_len;  ///< [R]: 1..page_size, 0 for an empty request
};

/// Copies the pages of every row, of which row r has indptr[r + 1] - indptr[r], one row after the other. O(pages).
/// Throws kInvalidArgument where `indices` or the table is too short.
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

  /// Plans a step. The batch is only read. O(R + work items) whatever the contexts' lengths; allocates nothing once
  /// warm. `common_prefix_len` must be 0: shared prefixes are not offered here. Throws kInvalidArgument for a batch
  /// that contradicts itself or the configuration, naming the field; kUnsupported.
  FlashInferMetadata build(int32_t common_prefix_len, const CommonAttentionMetadata& batch);

  /// Brings the engine's batch into the order that `build` expects. Both spans are [R]. True if requests were swapped.
  /// Under kVllm2025_07 the counts found are kept, and `build` checks that its batch has them.
  bool reorder_batch(std::span<const int32_t> num_scheduled_tokens, std::span<const int32_t> num_computed_tokens,
                     const SwapStates& swap_states);

  /// The page tables of a step as CSR arrays, for those who want them: nothing in `forward` does. O(pages).
  PagedKvArrays paged_kv_arrays(const FlashInferMetadata& metadata);

  int32_t reorder_batch_threshold() const noexcept;  ///< requests of at most this many tokens are decodes
  int32_t num_qo_heads() const noexcept;
  int32_t num_kv_heads() const noexcept;
  int32_t head_dim() const noexcept;
  int32_t page_size() const noexcept;
  DType kv_cache_dtype() const noexcept;
  DType q_data_type() const noexcept;
  const GlobalHyperparameters& global_hyperparameters() const noexcept;
  std::string kernel_name() const;  ///< which kernel runs

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace folio::inline v0::backends
