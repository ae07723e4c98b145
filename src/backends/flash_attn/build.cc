#include <algorithm>

#include "backends/common/batch_checks.hpp"
#include "backends/flash_attn/builder_state.hpp"
#include "core/error.hpp"
#include "folio/distributed/context_parallel.hpp"

namespace folio::inline v0::backends {
namespace {

/// The keys of a step as the plan takes them: one segment, or shared prefixes and what is left of each request.
struct StepKeys {
  std::array<KvSegment, kMaxCascadeLevels + 1> segments;
  size_t count = 1;
};

/// The batch with the lengths of the keys that the group's layers attend to.
CommonAttentionMetadata with_key_lengths(AttentionType type, const CommonAttentionMetadata& batch, StepState& step) {
  CommonAttentionMetadata keys = batch;
  const auto num_reqs = static_cast<size_t>(batch.num_reqs);
  if (type == AttentionType::kEncoderDecoder) {
    if (!batch.encoder_seq_lens.empty()) keys.seq_lens = batch.encoder_seq_lens;
  } else if (type != AttentionType::kDecoder) {
    core::require(batch.num_reqs >= 0 && batch.query_start_loc.size() > num_reqs, "query_start_loc has ",
                  batch.query_start_loc.size(), " entries; num_reqs is ", batch.num_reqs,
                  ", which needs one more than that");
    step.kv_lens.resize(num_reqs);
    for (size_t i = 0; i < num_reqs; ++i) {
      step.kv_lens[i] = batch.query_start_loc[i + 1] - batch.query_start_loc[i];
    }
    keys.seq_lens = step.kv_lens;
    keys.max_seq_len = batch.max_query_len;
  }
  return keys;
}

StepKeys cascade_keys(int32_t prefix, const CommonAttentionMetadata& batch, StepState& step) {
  const auto num_reqs = static_cast<size_t>(batch.num_reqs);
  step.cu_prefix_query_lens = {0, batch.num_actual_tokens};
  step.prefix_kv_lens = {prefix};
  step.prefix_group = {0, batch.num_reqs};
  step.kv_lens.resize(num_reqs);
  // Padding requests, shorter than the prefix, have no suffix.
  for (size_t i = 0; i < num_reqs; ++i) step.kv_lens[i] = std::max(batch.seq_lens[i] - prefix, 0);
  step.suffix_first_pos.assign(num_reqs, prefix);
  StepKeys keys;
  keys.count = 2;
  keys.segments[0].kv_len = step.prefix_kv_lens.data();
  keys.segments[0].group_indptr = step.prefix_group.data();
  keys.segments[0].num_groups = 1;
  keys.segments[1].kv_len = step.kv_lens.data();
  keys.segments[1].first_pos = step.suffix_first_pos.data();
  return keys;
}

StepKeys discovered_keys(const StepCascadeLevels& levels) {
  StepKeys keys;
  keys.segments = levels.segments;
  keys.count = static_cast<size_t>(levels.num_segments);
  return keys;
}

/// How many of each request's older tokens this rank holds; of cross attention all are older.
void localize_context(const ParallelConfig& parallel, AttentionType type, const CommonAttentionMetadata& batch,
                      std::vector<int32_t>& context_lens) {
  const bool crosses = type == AttentionType::kEncoderDecoder;
  const auto num_reqs = static_cast<size_t>(batch.num_reqs);
  context_lens.resize(num_reqs);
  for (int32_t i = 0; i < batch.num_reqs; ++i) {
    const auto at = static_cast<size_t>(i);
    context_lens[at] = crosses ? batch.seq_lens[at] : batch.num_computed_tokens(i);
  }
  distributed::get_dcp_local_seq_lens(context_lens, parallel.decode_context_parallel_size,
                                      parallel.decode_context_parallel_rank, parallel.cp_kv_cache_interleave_size,
                                      context_lens);
}

/// Seals the plans of a step over a divided cache: what each of its passes has.
void make_schedules(StepState& step, FlashAttentionMetadata& metadata, Stream stream) {
  distributed::DcpPlan& plan = metadata.dcp_plans.front()->plan;
  if (plan.cached) {
    metadata.scheduler_metadata = step.schedule->seal(*plan.cached, stream);
    plan.cached = step.schedule->plan();
  }
  if (plan.fresh) {
    metadata.new_tokens_scheduler_metadata = step.new_tokens_schedule->seal(*plan.fresh, stream);
    plan.fresh = step.new_tokens_schedule->plan();
  }
}

/// Plans the step for every window. Not causal, a layer without window sees every key; one with a window ends at its
/// query, which the op's causal mask says already.
WindowPlans plan_step(const CommonAttentionMetadata& batch, bool all_visible, const StepKeys& keys, StepState& step,
                      Stream stream) {
  StepKeys visible = keys;
  for (KvSegment& segment : visible.segments) {
    if (all_visible) segment.mask = SegmentMask::kAllVisible;
  }
  BatchView view;
  view.where = batch.where;
  view.max_kv_len = batch.where == Where::kDevice ? batch.max_seq_len : 0;
  view.num_requests = batch.num_reqs;
  view.num_tokens = batch.num_actual_tokens;
  view.max_q_len = batch.max_query_len;
  view.cu_q = batch.query_start_loc.data();
  view.segments = std::span(keys.segments).first(keys.count);
  BatchView without_window = view;
  without_window.segments = std::span(visible.segments).first(visible.count);
  return step.plans.plan(view, without_window, stream);
}

}  // namespace

FlashAttentionMetadata FlashAttentionMetadataBuilder::build(int32_t common_prefix_len,
                                                            const CommonAttentionMetadata& batch, bool fast_build,
                                                            Stream stream) {
  return build_step(common_prefix_len, batch, fast_build, /*may_discover=*/true, stream);
}

FlashAttentionMetadata FlashAttentionMetadataBuilder::build_step(int32_t common_prefix_len,
                                                                 const CommonAttentionMetadata& given, bool fast_build,
                                                                 bool may_discover, Stream stream) {
  State& state = *state_;
  const bool from_device = state.options.plan_from_device_lengths;
  const CommonAttentionMetadata batch = from_device ? given : host_batch(state.context, given);
  StepState& step = state.steps[state.next_step];
  const CommonAttentionMetadata checked = with_key_lengths(state.attn_type, batch, step);
  (from_device ? check_device_lengths : check_flash_attn_batch)(state.spec, state.config, state.attn_type, checked);
  // Of seq_lens, also where an encoder's count. Lengths on the device are not the host's to compare.
  if (!from_device) check_dcp_lengths(state.config, state.is_encoder() ? checked : batch);
  const bool aot = state.aot_schedule && !fast_build;
  if (aot && is_fp8(state.kv_cache_dtype)) {
    // Raises for e5m2 in vLLM's profile, whose capabilities take it.
    FlashAttentionBackend::get_fp8_dtype_for_flashattn(state.config.cache.cache_dtype, state.options.facts.profile);
  }
  int32_t prefix = 0;
  if (common_prefix_len != 0) {
    core::require(state.attn_type == AttentionType::kDecoder, "common_prefix_len is ", common_prefix_len,
                  " for layers of ", to_string(state.attn_type), " attention; decoders share prefixes");
    prefix = from_device ? 0 : usable_prefix(common_prefix_len, state.spec.page_size, checked);
    if (state.options.cascade != CascadeMode::kHeuristic || from_device) {
      prefix = 0;
    } else if (state.is_compatible()) {
      core::require(!state.has_alibi, "Cascade attention does not support ALiBi.");
      core::require(state.windows.size() == 1 && state.aot_window == SlidingWindow{},
                    "Cascade attention does not support sliding window.");
    }
    // What is shared between requests is not divided over ranks as well.
    if (state.config.determinism >= Determinism::kBatchInvariant || step.dcp) prefix = 0;
  }

  for (const StepState& earlier : state.steps) {
    if (earlier.schedule) earlier.schedule->report();
  }
  // Nothing is refused from here on but by the schedulers, after which this step's memory holds no plan.
  if (step.schedule) step.schedule->invalidate();
  if (step.new_tokens_schedule) step.new_tokens_schedule->invalidate();
  state.next_step = (state.next_step + 1) % state.steps.size();
  const auto num_reqs = static_cast<size_t>(batch.num_reqs);
  FlashAttentionMetadata metadata;
  StepKeys keys;
  if (prefix > 0) {
    keys = cascade_keys(prefix, checked, step);
    metadata.use_cascade = true;
    metadata.common_prefix_len = prefix;
    metadata.prefix_request =
        first_with_queries(checked.query_start_loc.first(static_cast<size_t>(checked.num_reqs) + 1));
    metadata.cu_prefix_query_lens = step.cu_prefix_query_lens;
    metadata.prefix_kv_lens = step.prefix_kv_lens;
    metadata.suffix_kv_lens = step.kv_lens;
  }
  if (step.cascade) {
    const bool discovers = may_discover && state.options.cascade == CascadeMode::kAuto;
    metadata.cascade = discovers ? step.cascade->find(checked, stream) : step.cascade->share(prefix, checked, stream);
    metadata.use_cascade = prefix > 0 || metadata.cascade.num_levels > 0;
  }
  if (metadata.cascade.num_segments > 0) {
    keys = discovered_keys(metadata.cascade);
  } else if (prefix == 0) {
    keys.segments[0].kv_len = checked.seq_lens.data();
    if (state.is_encoder()) keys.segments[0].source = KvSource::kRagged;
  }
  const bool all_visible = state.attn_type == AttentionType::kDecoder && !batch.causal;
  if (step.dcp) {
    metadata.dcp_plans = step.dcp->plan(checked, /*num_decodes=*/0, stream);
    if (!from_device) {
      localize_context(state.config.parallel, state.attn_type, checked, step.kv_lens);
      metadata.dcp_context_kv_lens = step.kv_lens;
    }
    metadata.max_dcp_context_kv_len =
        distributed::max_dcp_context_len(batch.max_seq_len, state.config.parallel.decode_context_parallel_size,
                                         state.config.parallel.cp_kv_cache_interleave_size);
  } else {
    metadata.plans = plan_step(checked, all_visible, keys, step, stream);
  }
  if (aot && step.dcp) {
    make_schedules(step, metadata, stream);
  } else if (aot) {
    metadata.scheduler_metadata = step.schedule->seal(metadata.plans.front()->plan, stream);
    metadata.plans.front()->plan = step.schedule->plan();
    if (metadata.use_cascade) metadata.prefix_scheduler_metadata = metadata.scheduler_metadata;
  }

  const CompilationConfig& graphs = state.config.compilation;
  if (graphs.decode_graph_mode == DecodeGraphMode::kFull && batch.num_actual_tokens <= graphs.max_capture_size) {
    metadata.max_num_splits = state.max_num_splits;
  }
  if (state.config.determinism >= Determinism::kBatchInvariant) metadata.max_num_splits = 1;
  metadata.num_reqs = batch.num_reqs;
  metadata.num_actual_tokens = batch.num_actual_tokens;
  metadata.max_query_len = batch.max_query_len;
  metadata.max_seq_len = checked.max_seq_len;
  metadata.query_start_loc = given.query_start_loc.first(num_reqs + 1);
  if (!from_device) {
    metadata.seq_lens = checked.seq_lens.first(num_reqs);
    metadata.query_start_loc_host = checked.query_start_loc.first(num_reqs + 1);
  }
  metadata.block_table = batch.block_table;
  metadata.slot_mapping = batch.slot_mapping;
  metadata.causal = batch.causal;
  metadata.attn_type = state.attn_type;
  metadata.q_data_type = state.q_data_type;
  metadata.data_type = state.kv_cache_dtype;
  metadata.output_data_type = state.output_data_type;
  metadata.page_size = state.spec.page_size;
  metadata.kv_cache_layout = state.config.cache.layout;
  metadata.workspace = step.dcp ? step.dcp->workspace() : step.plans.workspace();
  return metadata;
}

FlashAttentionMetadata FlashAttentionMetadataBuilder::build_for_drafting(const CommonAttentionMetadata& batch,
                                                                         Stream stream) {
  return build_step(0, batch, /*fast_build=*/true, /*may_discover=*/false, stream);
}

FlashAttentionMetadata FlashAttentionMetadataBuilder::build_for_cudagraph_capture(const CommonAttentionMetadata& batch,
                                                                                  Stream stream) {
  return build_step(0, batch, /*fast_build=*/false, /*may_discover=*/false, stream);
}

namespace {

/// The step's requests and tokens must fit in the table. Encoders read none: theirs may be empty.
void check_table_size(const FlashAttentionMetadata& metadata, const BlockTableView& block_table, int32_t num_ranks) {
  core::require(block_table.num_rows >= metadata.num_reqs, "the block table has ", block_table.num_rows,
                " rows; num_reqs is ", metadata.num_reqs);
  core::require(block_table.row_stride >= block_table.num_columns, "the block table has ", block_table.num_columns,
                " columns and a row stride of ", block_table.row_stride);
  const int64_t table_tokens = int64_t{block_table.num_columns} * metadata.page_size * num_ranks;
  core::require(!metadata.seq_lens.empty() || metadata.num_reqs == 0 || metadata.max_seq_len <= table_tokens,
                "max_seq_len is ", metadata.max_seq_len, "; a row of the block table has ", block_table.num_columns,
                " pages of ", metadata.page_size, " tokens");
  for (size_t i = 0; i < metadata.seq_lens.size(); ++i) {
    core::require(metadata.seq_lens[i] <= table_tokens, "request ", i, " has a seq_len of ", metadata.seq_lens[i],
                  "; a row of the block table has ", block_table.num_columns, " pages of ", metadata.page_size,
                  " tokens");
  }
}

}  // namespace

FlashAttentionMetadata FlashAttentionMetadataBuilder::update_block_table(const FlashAttentionMetadata& metadata,
                                                                         const BlockTableView& block_table,
                                                                         std::span<const int64_t> slot_mapping,
                                                                         const BlockTableView& block_table_host) const {
  if (!state_->is_encoder()) {
    check_table_size(metadata, block_table, state_->config.parallel.decode_context_parallel_size);
  }
  FlashAttentionMetadata updated = metadata;
  if (metadata.cascade.num_segments > 0) {
    static_cast<void>(workspace_size(metadata.plans.front()->plan));  // throws for a stale plan, whose levels are gone
    const BlockTableView& readable = on_gpu(state_->context) ? block_table_host : block_table;
    const bool found = state_->options.cascade == CascadeMode::kAuto;
    if (found) check_table_copy(readable, block_table, metadata.num_reqs);
    updated.cascade = found ? with_block_table(metadata.cascade, metadata.query_start_loc_host, metadata.page_size,
                                               metadata.block_table, readable, block_table)
                            : moved_to(block_table, metadata.cascade, metadata.block_table);
  }
  updated.block_table = block_table;
  updated.slot_mapping = slot_mapping;
  return updated;
}

}  // namespace folio::inline v0::backends
