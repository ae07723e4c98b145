// One layer of divided queries: what is checked before any rank waits, the passes' arguments, the merge.
#include "distributed/pcp_run.hpp"

#include "attention/run_args.hpp"
#include "core/error.hpp"
#include "folio/merge.hpp"
#include "kvcache/page_rows.hpp"

namespace folio::inline v0::distributed {

PcpRun::PcpRun(PcpState& state, const PcpPlan& plan, const PcpArgs& args, Workspace workspace, Stream stream)
    : state_(state),
      config_(state.attention()),
      plan_(plan),
      args_(args),
      layout_(pcp_layout(state, plan)),
      memory_(static_cast<std::byte*>(workspace.data)),
      stream_(stream) {
  check(workspace);
}

void PcpRun::pack() {
  if (state_.gpu() != nullptr && plan_.exchange != PcpExchange::kAutomatic) read_table();
  pack_fresh();
  if (plan_.exchange == PcpExchange::kPassQ) pack_queries();
  if (plan_.exchange == PcpExchange::kPassKv) pack_older();
}

void PcpRun::fresh_pass() {
  gather_fresh();
  if (!plan_.fresh) return;
  const SegmentArgs segment = fresh_segment();
  folio::run(*plan_.fresh, own_args(layout_.num_states - 1, {&segment, 1}), scratch(), stream_);
}

void PcpRun::older_pass() {
  if (plan_.exchange == PcpExchange::kPassQ) pass_q();
  if (plan_.exchange == PcpExchange::kPassKv) pass_kv();
}

void PcpRun::merge() {
  if (tokens() == 0) return;
  const int64_t row = state_.partial_row(), state_stride = plan_.max_tokens * row;
  AttentionStatesView states;
  states.out = ConstTensorView(floats(layout_.states), DType::kFloat32,
                               {tokens(), layout_.num_states, config_.num_q_heads, config_.head_dim_v});
  states.out.strides = {row, state_stride, head_stride(), 1, 0};
  states.lse = floats(layout_.states) + config_.head_dim_v;
  states.lse_token_stride = row;
  states.lse_state_stride = state_stride;
  states.lse_head_stride = head_stride();
  merge_states(state_.context, states, first_tokens(args_.out, tokens()), args_.lse, args_.out_scale, stream_);
}

void PcpRun::check_scale(const char* name, const Scale& scale) const {
  if (state_.gpu() != nullptr && is_per_request(scale)) {
    core::fail(ErrorCode::kUnsupported, name,
               " is per request; on a GPU PcpAttention takes scales per tensor and head");
  }
  core::require(!is_per_request(scale) || scale.data != nullptr, name, " is per request and has no data");
  core::require(scale.request_stride >= 0, name, ".request_stride is ", scale.request_stride);
}

Scale PcpRun::for_rows_of(const ChunkRows& rows, const Scale& scale, float* memory) const {
  if (!is_per_request(scale)) return scale;
  float* next = memory;
  for (const int32_t request : rows.request) {
    for (int32_t h = 0; h < config_.num_kv_heads; ++h) *next++ = request < 0 ? 1.0f : scale_of(scale, request, h);
  }
  return {1.0f, memory, ScaleGranularity::kPerRequestAndHead, config_.num_kv_heads};
}

void PcpRun::expand_scales() {
  const ChunkRows& rows = state_.older_rows(plan_.exchange);
  const int64_t each = int64_t{rows.size()} * config_.num_kv_heads;
  float* const memory = floats(layout_.row_scales);
  own_q_scale_ = for_rows_of(state_.own, args_.q_scale, floats(layout_.own_q_scale));
  row_q_scale_ = for_rows_of(rows, args_.q_scale, memory);
  row_k_scale_ = for_rows_of(rows, args_.k_scale, memory + each);
  row_v_scale_ = for_rows_of(rows, args_.v_scale, memory + 2 * each);
}

void PcpRun::check_capture() const {
  const attention::GpuBackend* const gpu = state_.gpu();
  if (gpu == nullptr || !gpu->is_capturing(stream_)) return;
  core::require(state_.bounded(), "the stream is captured; graphs need PcpConfig::bounds");
  core::require(state_.world() == 1 || state_.group->enqueues(),
                "the stream is captured, and the group's operations wait on the host: graphs need a group whose "
                "ProcessGroup::enqueues is true");
}

void PcpRun::check(Workspace workspace) {
  attention::check_stream(state_.fresh_op.state(), stream_);
  check_capture();
  attention::check_workspace(workspace, layout_.total);
  check_rows("q", args_.q, config_.q, tokens(), config_.num_q_heads, config_.head_dim_qk);
  check_rows("k", args_.k, config_.ragged_kv, tokens(), config_.num_kv_heads, config_.head_dim_qk);
  check_rows("v", args_.v, config_.ragged_kv, tokens(), config_.num_kv_heads, config_.head_dim_v);
  check_rows("out", args_.out, config_.out, tokens(), config_.num_q_heads, config_.head_dim_v);
  check_scale("q_scale", args_.q_scale);
  check_scale("k_scale", args_.k_scale);
  check_scale("v_scale", args_.v_scale);
  core::require(args_.out_scale.granularity == ScaleGranularity::kPerTensor, "out_scale is not per tensor");
  expand_scales();
  if (plan_.fresh) {
    const SegmentArgs segment = fresh_segment();
    attention::check_args(detail::checked(*plan_.fresh), own_args(layout_.num_states - 1, {&segment, 1}));
  }
  if (plan_.exchange == PcpExchange::kAutomatic) return;
  kvcache::check_table(args_.table, plan_.num_requests);
  if (state_.gpu() == nullptr) read_table();  // which throws for a table that lacks entries
  if (plan_.exchange == PcpExchange::kPassQ) {
    const SegmentArgs segment = shard_segment();
    attention::check_args(detail::checked(*plan_.older), shard_args({&segment, 1}));
    return;
  }
  const KvCacheView& cache = args_.cache;
  core::require(cache.format == config_.kv_format && cache.dtype == config_.kv && cache.page_size == config_.page_size,
                "the cache is ", cache.dtype, " in format ", to_string(cache.format), " with page_size ",
                cache.page_size, "; the attention was prepared for ", config_.kv, " in format ",
                to_string(config_.kv_format), " with page_size ", config_.page_size);
  if (plan_.older) {
    attention::check_args(detail::checked(*plan_.older), own_args(0, gathered_segments()));
  }
}

AttentionArgs PcpRun::common_args() const {
  AttentionArgs args;
  args.sm_scale = args_.sm_scale;
  args.logits_soft_cap = args_.logits_soft_cap;
  args.alibi_slopes = args_.alibi_slopes;
  args.q_scale = own_q_scale_;
  return args;
}

void PcpRun::set_out(AttentionArgs& args, float* begin, int64_t rows) const {
  args.out = TensorView(begin, DType::kFloat32, {rows, config_.num_q_heads, config_.head_dim_v});
  args.out.strides = {state_.partial_row(), head_stride(), 1};
  args.lse = {begin + config_.head_dim_v, state_.partial_row(), head_stride(), LseBase::kE};
}

AttentionArgs PcpRun::own_args(int32_t state, std::span<const SegmentArgs> segments) const {
  AttentionArgs args = common_args();
  args.q = first_tokens(args_.q, tokens());
  args.segments = segments;
  if (state == layout_.num_states - 1) args.sinks = args_.sinks;
  set_out(args, floats(layout_.states) + state * plan_.max_tokens * state_.partial_row(), tokens());
  return args;
}

void PcpAttention::run(const PcpPlan& plan, const PcpArgs& args, Workspace workspace, Stream stream) {
  if (plan.max_tokens == 0) return;
  PcpRun layer(*state_, plan, args, workspace, stream);
  layer.pack();
  layer.fresh_pass();
  layer.older_pass();
  layer.merge();
}

}  // namespace folio::inline v0::distributed
