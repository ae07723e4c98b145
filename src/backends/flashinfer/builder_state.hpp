#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "backends/common/dcp_step.hpp"
#include "backends/common/layer_plans.hpp"
#include "folio/backends/flashinfer/metadata_builder.hpp"

namespace folio::inline v0::backends {

/// What a builder owns.
struct FlashInferMetadataBuilder::State {
  EngineConfig config;
  AttentionSpec spec;
  BackendProfile profile = BackendProfile::kNative;
  GlobalHyperparameters hyperparameters;
  int32_t num_qo_heads = 0;
  DType kv_cache_dtype = DType::kUnset;
  DType q_data_type = DType::kUnset;
  int32_t reorder_threshold = 1;
  std::optional<BatchSplit> reordered;  ///< kVllm2025_07: what reorder_batch found
  std::vector<WindowOp> windows;        ///< in the order of the layers
  std::optional<StepPlans> plans;
  std::optional<DcpStepPlans> dcp;       ///< instead of `plans`, under decode context parallelism
  std::vector<int32_t> paged_kv_indptr;  ///< grow to the largest batch asked for
  std::vector<int32_t> paged_kv_indices;
  std::vector<int32_t> paged_kv_last_page_len;
};

/// What every construction checks: throws for what this backend, or the profile's original, does not take.
void check_engine_config(const Context& context, const AttentionSpec& spec, const EngineConfig& config);
void check_profile(const AttentionSpec& spec, const EngineConfig& config, const GlobalHyperparameters& hyperparameters,
                   BackendProfile profile);

/// What every build checks, in O(R).
void check_batch(const AttentionSpec& spec, const EngineConfig& config, const CommonAttentionMetadata& batch);

/// Refuses layers that differ where the profile's original could plan for one set of values only.
void check_same_hyperparameters(const GlobalHyperparameters& hyperparameters, BackendProfile profile);

}  // namespace folio::inline v0::backends
