#include <algorithm>

#include "backends/common/batch_checks.hpp"
#include "backends/flashinfer/block_table_state.hpp"
#include "backends/flashinfer/builder_state.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends {
namespace {

using State = FlashInferMetadataBuilder::State;

int32_t longest_query(const CommonAttentionMetadata& batch, int32_t first_request) {
  int32_t longest = 0;
  for (int32_t i = first_request; i < batch.num_reqs; ++i) longest = std::max(longest, batch.query_len(i));
  return longest;
}

BatchSplit split_of(const State& state, const CommonAttentionMetadata& batch) {
  if (state.profile != BackendProfile::kVllm2025_07) {
    return split_decodes_and_prefills(batch, state.reorder_threshold, /*require_uniform=*/true);
  }
  core::require(state.reordered.has_value(), "reorder_batch has not been called for this builder");
  const BatchSplit& split = *state.reordered;
  core::require(split.num_decodes + split.num_prefills == batch.num_reqs &&
                    split.num_decode_tokens + split.num_prefill_tokens == batch.num_actual_tokens,
                "reorder_batch saw ", split.num_decodes + split.num_prefills, " requests of ",
                split.num_decode_tokens + split.num_prefill_tokens, " tokens; the batch has ", batch.num_reqs, " of ",
                batch.num_actual_tokens);
  return split;
}

/// Which requests the block-table family leaves to plans.
PlannedPart planned_part(const FlashInferMetadata& metadata) {
  const BatchSplit& split = metadata.split;
  const bool decodes = !metadata.decode_use_trtllm;
  const bool prefills = !metadata.prefill_use_trtllm;
  if (decodes && prefills) return {0, metadata.num_reqs, 0, metadata.num_actual_tokens};
  if (decodes) return {0, split.num_decodes, 0, split.num_decode_tokens};
  if (prefills) return {split.num_decodes, split.num_prefills, split.num_decode_tokens, split.num_prefill_tokens};
  return {};
}

/// The part's lengths, in one segment or, with shared prefixes, in several.
void plan_part(State& state, const CommonAttentionMetadata& batch, StepPlans& plans, FlashInferMetadata& metadata,
               Stream stream) {
  const PlannedPart& part = metadata.planned;
  const auto first = static_cast<size_t>(part.first_request);
  const auto count = static_cast<size_t>(part.num_requests);
  std::array<KvSegment, kMaxCascadeLevels + 1> segments;
  size_t num_segments = 1;
  segments[0].kv_len = batch.seq_lens.data() + first;
  if (metadata.cascade.num_levels > 0) {
    segments = metadata.cascade.segments;
    num_segments = static_cast<size_t>(metadata.cascade.num_segments);
  } else if (metadata.use_cascade) {
    num_segments = 2;
    CascadeLengths& cascade = state.cascade;
    const int32_t prefix = metadata.common_prefix_len;
    cascade.suffix_len.resize(count);
    cascade.first_pos.resize(count);
    for (size_t r = 0; r < count; ++r) {  // a padding request has neither prefix nor suffix
      cascade.suffix_len[r] = std::max(0, batch.seq_lens[r] - prefix);
      cascade.first_pos[r] = prefix;
    }
    cascade.prefix_len = {prefix};
    cascade.group_indptr = {0, part.num_requests};
    segments[0].kv_len = cascade.prefix_len.data();
    segments[0].group_indptr = cascade.group_indptr.data();
    segments[0].num_groups = 1;
    segments[1].kv_len = cascade.suffix_len.data();
    segments[1].first_pos = cascade.first_pos.data();
  }
  BatchView view;
  view.num_requests = part.num_requests;
  view.num_tokens = part.num_tokens;
  if (metadata.num_padded_reqs == 0) {  // a fixed shape is held against the lengths themselves
    view.max_q_len = batch.max_query_len;
    view.max_kv_len = batch.max_seq_len;
  }
  view.cu_q = batch.query_start_loc.data();
  if (part.first_token > 0) {
    state.section_cu_q.resize(count + 1);
    for (size_t r = 0; r <= count; ++r) state.section_cu_q[r] = batch.query_start_loc[first + r] - part.first_token;
    view.cu_q = state.section_cu_q.data();
  }
  view.segments = std::span(segments).first(num_segments);
  metadata.plans = plans.plan(view, stream);
  metadata.workspace = plans.workspace();
}

/// Rows that a captured batch of decodes has; 0 where it is not replayed from a graph.
int32_t padded_rows(const State& state, const FlashInferMetadata& metadata) {
  const BatchSplit& split = metadata.split;
  const bool pure_decode = split.num_decodes > 0 && split.num_prefills == 0;
  if (!state.padding || !pure_decode || metadata.use_cascade || split.num_decode_tokens > state.graph_max_bs) return 0;
  return state.padding->pad_for_cudagraph(std::max(split.num_decode_tokens, split.num_decodes));
}

/// Captured layers read the plans of their block-table kernels where they were: these are made now, for all of them.
void plan_block_tables(State& state, const CommonAttentionMetadata& batch, Stream stream) {
  auto num_reqs = static_cast<size_t>(batch.num_reqs);  // but for the padding behind them, which `forward` leaves out
  while (num_reqs > 0 && batch.query_len(static_cast<int32_t>(num_reqs) - 1) == 0) --num_reqs;
  state.block_tables.state().plan_for_graphs(batch.query_start_loc.first(num_reqs + 1), batch.seq_lens.first(num_reqs),
                                             stream);
}

/// What requests share, where one plan of no fixed shape has them all.
StepCascadeLevels discover(State& state, const CommonAttentionMetadata& batch, const FlashInferMetadata& metadata,
                           Stream stream) {
  const bool one_plan = metadata.planned.num_requests == metadata.num_reqs && metadata.num_padded_reqs == 0;
  if (!state.step_cascade || !one_plan || batch.num_reqs == 0) return {};
  return state.step_cascade->find(batch, stream);
}

}  // namespace

FlashInferMetadata FlashInferMetadataBuilder::build(int32_t common_prefix_len, const CommonAttentionMetadata& given,
                                                    Stream stream) {
  State& state = *state_;
  const CommonAttentionMetadata batch = host_batch(state.context, given);
  check_batch(state.spec, state.config, batch);
  if (state.profile == BackendProfile::kVllm2025_07) {
    check_same_hyperparameters(state.hyperparameters, state.profile);
  }
  FlashInferMetadata metadata;
  metadata.split = split_of(state, batch);
  metadata.common_prefix_len = usable_prefix(common_prefix_len, state.spec.page_size, batch);
  // How many keys are shared depends on the other requests, and so would a request's bits.
  if (state.config.determinism >= Determinism::kBatchInvariant) metadata.common_prefix_len = 0;
  if (state.options.cascade != CascadeMode::kHeuristic) metadata.common_prefix_len = 0;
  if (state.dcp) metadata.common_prefix_len = 0;  // what requests share is not divided over ranks as well
  metadata.use_cascade = metadata.common_prefix_len > 0;
  metadata.prefix_request = first_with_queries(batch.query_start_loc.first(static_cast<size_t>(batch.num_reqs) + 1));
  metadata.profile = state.profile;
  metadata.num_reqs = batch.num_reqs;
  metadata.num_actual_tokens = batch.num_actual_tokens;
  choose_paths(state, batch, metadata);
  metadata.num_padded_reqs = padded_rows(state, metadata);
  metadata.planned = planned_part(metadata);
  metadata.cascade = discover(state, batch, metadata, stream);
  metadata.use_cascade = metadata.use_cascade || metadata.cascade.num_levels > 0;
  ++state.generation;
  metadata.current_generation = &state.generation;
  metadata.generation = state.generation;
  if (state.dcp) {
    DcpStepPlans& plans = metadata.num_padded_reqs > 0 ? state.graph_dcp_for(metadata.num_padded_reqs) : *state.dcp;
    metadata.dcp_plans = plans.plan(batch, metadata.split.num_decodes, stream);
    metadata.workspace = plans.workspace();
  } else if (metadata.planned.num_requests > 0 || batch.num_reqs == 0) {
    StepPlans& plans = metadata.num_padded_reqs > 0 ? state.graph_plans_for(metadata.num_padded_reqs) : *state.plans;
    plan_part(state, batch, plans, metadata, stream);
  }
  metadata.block_table_workspace = &state.block_tables;
  if (metadata.num_padded_reqs > 0) plan_block_tables(state, batch, stream);
  metadata.log = &state.options.log;

  const auto num_reqs = static_cast<size_t>(batch.num_reqs);
  metadata.max_q_len = batch.max_query_len;
  // A short request that is not like the other decodes stands among the prefills, so their longest may be shorter.
  metadata.max_q_len_prefill =
      metadata.split.num_prefills > 0 ? longest_query(batch, metadata.split.num_decodes) : batch.max_query_len;
  metadata.max_seq_len = batch.max_seq_len;
  metadata.qo_indptr = given.query_start_loc.first(num_reqs + 1);
  metadata.seq_lens = given.seq_lens.first(num_reqs);
  metadata.qo_indptr_host = batch.query_start_loc.first(num_reqs + 1);
  metadata.seq_lens_host = batch.seq_lens.first(num_reqs);
  metadata.block_table = batch.block_table;
  metadata.slot_mapping = batch.slot_mapping;
  metadata.data_type = state.kv_cache_dtype;
  metadata.output_data_type = state.attention.out;
  metadata.num_qo_heads = state.num_qo_heads;
  metadata.num_kv_heads = state.spec.num_kv_heads;
  metadata.head_dim = state.spec.head_size;
  metadata.page_size = state.spec.page_size;
  metadata.kv_cache_layout = state.config.cache.layout;
  return metadata;
}

}  // namespace folio::inline v0::backends
