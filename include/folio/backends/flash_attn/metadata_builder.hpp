#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "folio/attention.hpp"
#include "folio/backends/attention_layer.hpp"
#include "folio/backends/attention_metadata.hpp"
#include "folio/backends/cascade.hpp"
#include "folio/backends/cascade_heuristic.hpp"
#include "folio/backends/dcp_plans.hpp"
#include "folio/backends/engine_config.hpp"
#include "folio/backends/flash_attn/impl.hpp"
#include "folio/backends/window_plans.hpp"
#include "folio/context.hpp"
#include "folio/types/attention.hpp"

namespace folio::inline v0::backends {

struct FlashAttentionOptions {
  FlashAttentionFacts facts;
  /// Queries come as fp8 e4m3 with a q scale; needs an e4m3 cache. None: as the profile has it, which is never in the
  /// native one and always with fp8 caches in vLLM's, whose layers quantise.
  std::optional<bool> quantize_query;
  /// fp8 or kFloat4E2M1x2 (NVFP4; head sizes that are multiples of 16, one rank): outputs are quantised in the kernel,
  /// by the OutputQuantization that every `forward` then gets; native only. None: the model's dtype.
  std::optional<DType> output_dtype;
  /// Whether schedules are made ahead of time and handed out. None: as the profile has it, with version 3 and always in
  /// the native one; on a GPU where they are asked for, since every layer's comparison is a launch. Either way off
  /// in batch-invariant mode and for groups with several windows; on a GPU true is refused under decode context
  /// parallelism.
  std::optional<bool> aot_schedule;
  /// Most KV splits of a query under decode_graph_mode kFull, those of a shared prefix apart; vLLM's
  /// flash_attn_max_num_splits_for_cuda_graph. >= 1. All workers take part whatever it is (PrepareOptions::
  /// max_kv_splits). None: as the profile has it, 32 in vLLM's and as many as the work needs in the native one. Not
  /// looked at in batch-invariant mode, whose splits are fixed.
  std::optional<int32_t> max_num_splits_for_graphs;
  /// Steps whose metadata is valid at a time, each with plan memory and a workspace of its own. >= 1; on a GPU under
  /// decode_graph_mode kFull 1, whose memory all captured graphs read.
  int32_t steps_in_flight = 2;
  std::string force_kernel;  ///< as PrepareOptions::force_kernel
  /// On a GPU: `build` plans on the device, from query_start_loc and seq_lens (cross attention: encoder_seq_lens) as
  /// the stream's earlier work leaves them, and may be captured. No seq_lens_host is needed, only max_query_len and
  /// max_seq_len; max_num_seqs, max_num_batched_tokens and max_model_len must be configured. Prefixes are not shared
  /// then and schedules not handed out. A request beyond a bound is reported by the next build, see `plan` of
  /// folio/attention.hpp. For decoders and cross attention, over ranks too: capturing needs a group that enqueues
  /// (ProcessGroup::enqueues), and the ranks' lengths are compared on the device.
  bool plan_from_device_lengths = false;
  /// Who decides which requests of a step read the pages they begin with together; see `build`.
  CascadeMode cascade = CascadeMode::kHeuristic;
  int32_t max_cascade_levels = 4;  ///< kAuto: most shared prefixes inside each other, in [1, kMaxCascadeLevels]
};

/// What one step's layers need: made by FlashAttentionMetadataBuilder::build, read by FlashAttentionImpl::forward.
/// Spans point into the engine's arrays or, of schedules and cascades, into the builder's. Valid until the builder has
/// built as many further steps as it keeps in flight; `forward` on an older one throws kStalePlan. R = num_reqs, T =
/// num_actual_tokens.
struct FlashAttentionMetadata {
  int32_t num_reqs = 0;
  int32_t num_actual_tokens = 0;  ///< rows of q and output that count; what an engine hands over may be longer
  int32_t max_query_len = 0;
  int32_t max_seq_len = 0;
  std::span<const int32_t> query_start_loc;  ///< [R + 1], as the batch has it: on a GPU there, like table and slots
  /// [R], on the host: keys that each request's queries attend among. Of encoders their own tokens, of cross attention
  /// the encoder's. Empty where the step was planned from device lengths.
  std::span<const int32_t> seq_lens;
  std::span<const int32_t> query_start_loc_host;  ///< [R + 1], on the host: what was planned from
  BlockTableView block_table;
  std::span<const int64_t> slot_mapping;
  bool causal = true;

  bool use_cascade = false;       ///< some keys are read once for several requests
  int32_t common_prefix_len = 0;  ///< kHeuristic: tokens that all requests share; 0 without a cascade and under kAuto
  int32_t prefix_request = 0;     ///< whose row of the block table that prefix is read off: the first with queries
  std::span<const int32_t> cu_prefix_query_lens;  ///< [2]: 0, T. Empty without such a prefix, like the next two
  std::span<const int32_t> prefix_kv_lens;        ///< [1]
  std::span<const int32_t> suffix_kv_lens;        ///< [R]: seq_lens less the prefix; 0 for padding requests
  StepCascadeLevels cascade;                      ///< kAuto: what requests share

  int32_t max_dcp_context_kv_len = 0;  ///< 0 without decode context parallelism
  /// [R], this rank's share of the older tokens, of cross attention of the encoder's; empty without,
  /// and with plan_from_device_lengths.
  std::span<const int32_t> dcp_context_kv_lens;

  /// The schedule, where one was made ahead of time: the very memory that `forward` executes, and refuses truncated or
  /// changed (on a GPU the next build does). Prefix and suffix of a cascade are one schedule, which both fields show.
  std::span<const int32_t> scheduler_metadata;
  std::span<const int32_t> prefix_scheduler_metadata;
  /// Under decode context parallelism scheduler_metadata is the schedule for this rank's share of the cache, and this
  /// the one for keys beside it. Each is empty where the step has no such pass.
  std::span<const int32_t> new_tokens_scheduler_metadata;
  int32_t max_num_splits = 0;  ///< most KV splits of a query; 0 = as the work needs

  AttentionType attn_type = AttentionType::kDecoder;  ///< of the group's layers
  DType q_data_type = DType::kUnset;                  ///< what forward expects queries to be
  DType data_type = DType::kUnset;                    ///< of the KV cache
  DType output_data_type = DType::kUnset;             ///< what forward expects the output to be
  int32_t page_size = 0;
  KvCacheLayout kv_cache_layout = KvCacheLayout::kNhd;  ///< CacheConfig::layout: what forward's cache must lie as
  WindowPlans plans;                                    ///< one for each window of the group's layers, in front
  DcpWindowPlans dcp_plans;                             ///< instead of `plans`, under decode context parallelism
  Workspace workspace;                                  ///< this step's: one forward at a time
};

/// Plans every step for one group of layers that share a KV cache format, page tables and kind of attention. Owns the
/// plans' memory and workspaces. Not safe for simultaneous use by several threads.
class FOLIO_API FlashAttentionMetadataBuilder {
 public:
  static constexpr bool supports_update_block_table = true;

  /// Chooses kernels for the group's layers (their implementations are read here and not kept). Layers may differ in
  /// window, soft cap, scale, ALiBi and sinks, and must all decode, all encode, or all attend to an encoder. Under
  /// decode_graph_mode kFull every size is bounded by the configuration's, which must then be given.
  /// Throws kInvalidArgument for contradictions (head counts, dtypes), kUnsupported for what is not offered.
  FlashAttentionMetadataBuilder(const Context& context, const AttentionSpec& spec,
                                std::span<const AttentionLayer<FlashAttentionImpl>> layers, const EngineConfig& config,
                                const FlashAttentionOptions& options = {});
  FlashAttentionMetadataBuilder(FlashAttentionMetadataBuilder&&) noexcept;
  FlashAttentionMetadataBuilder& operator=(FlashAttentionMetadataBuilder&&) noexcept;
  ~FlashAttentionMetadataBuilder();

  /// Plans a step. The batch is only read, in any order of requests. O(R + work tiles) whatever the contexts' lengths,
  /// and under kAuto the table entries that requests share; allocates nothing once warm.
  ///
  /// FlashAttentionOptions::cascade says whose business shared prefixes are. Under kOff, common_prefix_len is not used.
  ///
  /// Under kAuto it is not needed: the block table itself says which neighbouring requests begin with the same pages,
  /// at several levels, and what saves more bytes than it costs is read once for them (StepCascade). Steps of other
  /// kinds than decoders', drafts and captured batches, steps in batch-invariant mode or under decode context
  /// parallelism, and under kVllm2026_03 groups with windows or ALiBi are planned without.
  ///
  /// Under kHeuristic, with common_prefix_len > 0, a multiple of the page size, requests share their rows' first
  /// pages: their keys are read once for all, off the first row that has queries. The prefix is cut to whole pages that
  /// every request had computed before this step (so that no query sees too much, and none is left without a suffix);
  /// where that leaves nothing, and in batch-invariant mode, where a request's bits may not depend on its neighbours,
  /// the step is planned without. Windows, ALiBi, soft caps and scales apply as ever, sinks once; kVllm2026_03 refuses
  /// windows and ALiBi there, as its original does in `forward`.
  ///
  /// `causal` counts for decoders only: encoders and cross attention never are. Not causal, a layer without window sees
  /// all keys; one with a window of w still sees the w last keys only, as the original's windows end at the query.
  ///
  /// On a GPU the plans' upload is enqueued on `stream`, from the host's copies of the lengths, or with
  /// plan_from_device_lengths kernels that plan from those there; nothing waits, unless more than four builds are still
  /// to be copied (and, over ranks, but for the other ranks' hosts: DcpAttention::plan). Under decode_graph_mode kFull
  /// all plans go into the same memory, which any batch within the configuration's sizes fits: an engine captures
  /// `forward` once for each padded size, and replays it after a build.
  ///
  /// fast_build makes no schedule ahead of time. Throws kInvalidArgument for a batch that contradicts itself or the
  /// configuration, naming the field.
  FlashAttentionMetadata build(int32_t common_prefix_len, const CommonAttentionMetadata& batch, bool fast_build = false,
                               Stream stream = {});
  /// For draft models, whose steps are too short to be worth a schedule: without prefix, fast.
  FlashAttentionMetadata build_for_drafting(const CommonAttentionMetadata& batch, Stream stream = {});
  /// For the batches that an engine captures: without prefix.
  FlashAttentionMetadata build_for_cudagraph_capture(const CommonAttentionMetadata& batch, Stream stream = {});

  /// The same step for another KV cache group, whose layers differ in nothing but where their pages are: a shallow
  /// copy, with the same schedule. O(R); with prefixes found by kAuto, which must be shared in this table too and whose
  /// rows must lie as far apart as those of the step's, O(shared entries) besides: on a GPU it looks at
  /// `block_table_host`, a copy that is laid out alike. A group of encoders reads no table: an empty one will do.
  /// Throws kInvalidArgument where the table is too small for the step or does not share what was planned as shared;
  /// kStalePlan.
  FlashAttentionMetadata update_block_table(const FlashAttentionMetadata& metadata, const BlockTableView& block_table,
                                            std::span<const int64_t> slot_mapping,
                                            const BlockTableView& block_table_host = {}) const;

  /// vLLM's rule for when sharing a prefix pays; see there.
  static bool use_cascade_attention(const CascadeHeuristicInput& input) {
    return backends::use_cascade_attention(input);
  }

  /// The profile's answer, see FlashAttentionBackend::get_cudagraph_support.
  GraphSupport get_cudagraph_support() const;
  /// No order of requests is needed, so none is asked for.
  std::optional<int32_t> reorder_batch_threshold() const noexcept { return std::nullopt; }

  bool aot_schedule() const noexcept;  ///< whether builds that are not fast make schedules
  /// The window that schedules are made for: the layers' where they have one in common, otherwise (-1, -1).
  SlidingWindow aot_sliding_window() const noexcept;
  /// Integers of the memory that holds a step's schedule under decode_graph_mode kFull; it does not move. 0 otherwise.
  int64_t scheduler_metadata_capacity() const noexcept;
  DType kv_cache_dtype() const noexcept;
  DType q_data_type() const noexcept;
  DType output_data_type() const noexcept;
  const GlobalHyperparameters& global_hyperparameters() const noexcept;
  std::string kernel_name() const;  ///< which kernel runs

 private:
  struct State;
  FlashAttentionMetadata build_step(int32_t common_prefix_len, const CommonAttentionMetadata& batch, bool fast_build,
                                    bool may_discover, Stream stream);
  std::unique_ptr<State> state_;
};

}  // namespace folio::inline v0::backends
