#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "backends/common/context_memory.hpp"
#include "backends/common/dcp_step.hpp"
#include "backends/common/layer_plans.hpp"
#include "backends/common/step_levels.hpp"
#include "folio/backends/flash_attn/metadata_builder.hpp"
#include "folio/sealed_plan.hpp"

namespace folio::inline v0::backends {

/// The memory that holds one step's schedule. Zero wherever no schedule is: an engine that hands a longer piece to a
/// replayed graph must not hand it another step's work.
class ScheduleMemory {
 public:
  /// `fixed_ints`: it holds that many and never moves; 0 = it grows to the longest schedule.
  ScheduleMemory(const AttentionOp& op, int64_t fixed_ints);

  /// Seals a plan into the memory, on a GPU by what is enqueued. Allocates nothing once warm.
  std::span<const int32_t> seal(const AttentionPlan& plan, Stream stream);
  /// Throws kInvalidArgument where a GPU has found a schedule changed.
  void report() const { sealed_.report(); }
  /// Makes what was sealed last stale.
  void invalidate() noexcept { sealed_.invalidate(); }
  /// The sealed plan: its work is what the memory holds.
  AttentionPlan plan() const { return sealed_.plan(); }
  int64_t capacity() const noexcept { return static_cast<int64_t>(memory_.bytes() / sizeof(int32_t)); }

 private:
  void reserve(int64_t ints);
  void clear(size_t from, size_t to, Stream stream);

  Device device_;
  SealedPlan sealed_;
  ContextMemory memory_;
  size_t used_ = 0;
  bool fixed_;
};

/// What one step in flight owns.
struct StepState {
  explicit StepState(std::span<const WindowOp> windows) : plans(windows) {}

  StepPlans plans;
  std::optional<DcpStepPlans> dcp;         ///< instead of `plans`, for caches divided over ranks
  std::optional<ScheduleMemory> schedule;  ///< where schedules are made ahead of time; of `dcp` for the cached keys
  std::optional<ScheduleMemory> new_tokens_schedule;  ///< of `dcp`, for the keys beside the cache
  std::optional<StepLevels> cascade;                  ///< where prefixes are discovered
  std::vector<int32_t> kv_lens;           ///< [R], encoders' own tokens, cascades' suffixes, or a rank's older tokens
  std::vector<int32_t> suffix_first_pos;  ///< [R], the prefix's length
  std::array<int32_t, 2> cu_prefix_query_lens{};
  std::array<int32_t, 1> prefix_kv_lens{};
  std::array<int32_t, 2> prefix_group{};  ///< the requests that share the prefix: all
};

/// What a builder owns.
struct FlashAttentionMetadataBuilder::State {
  explicit State(const Context& given_context) : context(given_context) {}

  Context context;
  EngineConfig config;
  AttentionSpec spec;
  FlashAttentionOptions options;
  GlobalHyperparameters hyperparameters;
  AttentionType attn_type = AttentionType::kDecoder;
  bool has_alibi = false;
  bool aot_schedule = false;
  int32_t max_num_splits = 0;  ///< of captured batches; 0 = as the work needs
  SlidingWindow aot_window;
  DType kv_cache_dtype = DType::kUnset;
  DType q_data_type = DType::kUnset;
  DType output_data_type = DType::kUnset;
  std::vector<WindowOp> windows;  ///< in the order of the layers
  std::vector<StepState> steps;
  size_t next_step = 0;

  bool is_encoder() const { return attn_type == AttentionType::kEncoder || attn_type == AttentionType::kEncoderOnly; }
  bool is_compatible() const { return options.facts.profile != BackendProfile::kNative; }
};

using FlashAttentionLayers = std::span<const AttentionLayer<FlashAttentionImpl>>;

/// What every construction checks: throws for what this backend, or the profile's original, does not take.
void check_flash_attn_config(const Context& context, const AttentionSpec& spec, const EngineConfig& config,
                             const FlashAttentionOptions& options);
void check_flash_attn_profile(const AttentionSpec& spec, const EngineConfig& config, FlashAttentionLayers layers,
                              const FlashAttentionFacts& facts);

/// What every build checks, in O(R).
void check_flash_attn_batch(const AttentionSpec& spec, const EngineConfig& config, AttentionType attn_type,
                            const CommonAttentionMetadata& batch);
/// Of a batch whose lengths the host does not know: sizes and bounds.
void check_device_lengths(const AttentionSpec& spec, const EngineConfig& config, AttentionType attn_type,
                          const CommonAttentionMetadata& batch);

}  // namespace folio::inline v0::backends
