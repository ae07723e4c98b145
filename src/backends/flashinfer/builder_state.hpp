#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "backends/common/context_memory.hpp"
#include "backends/common/dcp_step.hpp"
#include "backends/common/layer_plans.hpp"
#include "backends/common/step_levels.hpp"
#include "folio/backends/dispatch.hpp"
#include "folio/backends/flashinfer/metadata_builder.hpp"
#include "folio/backends/graph_padding.hpp"

namespace folio::inline v0::backends {

/// Lengths of a batch with a shared prefix, as two segments; they grow to the largest batch.
struct CascadeLengths {
  std::array<int32_t, 1> prefix_len{};
  std::array<int32_t, 2> group_indptr{};
  std::vector<int32_t> suffix_len;  ///< [R]
  std::vector<int32_t> first_pos;   ///< [R]: of the suffixes
};

/// What a builder owns.
struct FlashInferMetadataBuilder::State {
  State(const Context& given_context, const EngineConfig& engine, const FlashInferOptions& given_options);

  Context context;
  EngineConfig config;
  AttentionSpec spec;
  FlashInferOptions options;
  BackendProfile profile = BackendProfile::kNative;
  KernelDispatch dispatch;
  bool use_block_tables = false;  ///< can_use_trtllm_attention; native: forced on
  GlobalHyperparameters hyperparameters;
  int32_t num_qo_heads = 0;
  DType kv_cache_dtype = DType::kUnset;
  DType q_data_type = DType::kUnset;     ///< where every part of a batch takes it
  DType planned_q_type = DType::kUnset;  ///< of the planned kernels
  int32_t reorder_threshold = 1;
  std::optional<BatchSplit> reordered;  ///< kVllm2025_07: what reorder_batch found
  std::vector<WindowOp> windows;        ///< in the order of the layers
  std::optional<StepPlans> plans;
  std::optional<DcpStepPlans> dcp;  ///< instead of `plans`, under decode context parallelism
  BlockTableWorkspace block_tables;

  AttentionConfig attention;  ///< of the planned kernels, but for the window
  std::optional<GraphPadding> padding;
  int32_t graph_max_bs = 0;
  std::map<int32_t, StepPlans> graph_plans;   ///< by padded size: plans of a fixed shape
  std::map<int32_t, DcpStepPlans> graph_dcp;  ///< likewise, under decode context parallelism
  DcpKeys dcp_keys = DcpKeys::kNewBesideCache;

  uint64_t generation = 0;
  CascadeLengths cascade;
  std::optional<StepLevels> step_cascade;  ///< where prefixes are discovered
  std::vector<int32_t> section_cu_q;       ///< of prefills that are planned alone
  std::vector<int32_t> paged_kv_indptr;    ///< grow to the largest batch asked for
  std::vector<int32_t> paged_kv_indices;
  std::vector<int32_t> paged_kv_last_page_len;
  std::vector<int32_t> paged_kv_seq_lens;
  KernelArray gpu_paged_kv_seq_lens;
  KernelArray gpu_paged_kv_arrays;

  /// The plans for a captured batch of that many rows.
  StepPlans& graph_plans_for(int32_t padded);
  DcpStepPlans& graph_dcp_for(int32_t padded);
  PrepareOptions graph_options(int32_t padded) const;
  /// Bytes of workspace that plans and block tables have now.
  size_t held_bytes();
};

/// What every construction checks: throws for what this backend, or the profile's original, does not take.
void check_engine_config(const Context& context, const AttentionSpec& spec, const EngineConfig& config,
                         BackendProfile profile);
void check_profile(const FlashInferMetadataBuilder::State& state);
void check_options(const AttentionSpec& spec, const EngineConfig& config, const FlashInferOptions& options);

/// Throws where a layer says otherwise of the group than its builder: the profile, disable_q_quantization, whether the
/// dispatch serves block tables.
void check_layer_facts(const FlashInferMetadataBuilder::State& state,
                       std::span<const AttentionLayer<FlashInferImpl>> layers);

/// What every build checks of a host batch, in O(R).
void check_batch(const AttentionSpec& spec, const EngineConfig& config, const CommonAttentionMetadata& batch);

/// Refuses layers that differ where the profile's original could plan for one set of values only.
void check_same_hyperparameters(const GlobalHyperparameters& hyperparameters, BackendProfile profile);

/// Sets metadata's prefill_use_trtllm and decode_use_trtllm, and q_data_type; refuses what the profile's original could
/// not do where part of the batch goes to its planned kernels: sinks, layers that differ.
void choose_paths(const FlashInferMetadataBuilder::State& state, const CommonAttentionMetadata& batch,
                  FlashInferMetadata& metadata);

}  // namespace folio::inline v0::backends
