// One layer: gather the queries, attend to this rank's shard, combine, attend to the new tokens, merge.
#include <algorithm>
#include <cstring>

#include "attention/run_args.hpp"
#include "core/error.hpp"
#include "distributed/combine_call.hpp"
#include "distributed/dcp_state.hpp"
#include "folio/merge.hpp"

namespace folio::inline v0::distributed {
namespace {

void check_tensor(const char* name, const ConstTensorView& tensor, DType dtype, int64_t tokens, int64_t heads,
                  int64_t dim) {
  core::require(tensor.rank == 3, name, " has rank ", tensor.rank, "; it must be [tokens, heads, head_dim]");
  core::require(tensor.dtype == dtype, name, " is ", tensor.dtype, "; it must be ", dtype);
  core::require(tensor.shape[0] >= tokens && tensor.shape[1] == heads && tensor.shape[2] == dim, name, " is [",
                tensor.shape[0], ", ", tensor.shape[1], ", ", tensor.shape[2], "]; it must be [", tokens, " or more, ",
                heads, ", ", dim, "]");
  core::require((tensor.strides[2] == 1 || dim == 1) && tensor.strides[0] >= 0 && tensor.strides[1] >= 0, name,
                " has strides ", tensor.strides[0], ", ", tensor.strides[1], " and ", tensor.strides[2],
                "; the last must be 1, none negative");
  core::require(tensor.data != nullptr || tokens == 0, name, " has no memory");
}

template <typename Tensor>
Tensor first_tokens(Tensor tensor, int64_t tokens) {
  tensor.shape[0] = tokens;
  return tensor;
}

/// One call of `run`.
class Run {
 public:
  Run(DcpState& state, const DcpPlan& plan, const DcpArgs& args, Workspace workspace, Stream stream)
      : state_(state),
        config_(state.config.attention),
        plan_(plan),
        args_(args),
        layout_(run_layout(state, plan)),
        memory_(static_cast<std::byte*>(workspace.data)),
        stream_(stream) {
    check(workspace);
  }

  void cached_pass() {
    gather();
    const SegmentArgs segment = cached_segment();
    const Workspace scratch{memory_ + layout_.attention, layout_.attention_bytes};
    folio::run(*plan_.cached, cached_args(segment), scratch, stream_);
    if (state_.group->size() == 1) return;
    CombineCall call{state_.context, *state_.group,
                     state_view(layout_.partial, layout_.partial_lse, state_.all_heads())};
    call.head_groups = config_.num_kv_heads;
    call.out = TensorView(floats(layout_.combined), DType::kFloat32, {tokens(), heads(), config_.head_dim_v});
    call.lse = {floats(layout_.combined_lse), heads(), 1, LseBase::kE};
    call.workspace = {memory_ + layout_.combine, layout_.combine_bytes};
    call.stream = stream_;
    if (state_.config.combine == DcpCombine::kAllToAll) {
      all_to_all_combine(call);
    } else {
      all_gather_reduce_scatter(call);
    }
  }

  void fresh_pass() {
    const SegmentArgs segment = fresh_segment();
    const Workspace scratch{memory_ + layout_.attention, layout_.attention_bytes};
    folio::run(*plan_.fresh, fresh_args(segment), scratch, stream_);
  }

  void merge() {
    const TensorView out = first_tokens(args_.out, tokens());
    const AttentionStateView older = state_view(layout_.combined, layout_.combined_lse, heads());
    const AttentionStateView newer = state_view(layout_.fresh, layout_.fresh_lse, heads());
    if (plan_.cached && plan_.fresh) {
      merge_state(state_.context, older, newer, out, args_.lse, args_.out_scale, stream_);
      return;
    }
    const AttentionStateView& only = plan_.cached ? older : newer;
    AttentionStatesView states;
    states.out = ConstTensorView(only.out.data, DType::kFloat32, {tokens(), 1, heads(), config_.head_dim_v});
    states.lse = only.lse;
    states.lse_token_stride = states.lse_state_stride = heads();
    states.lse_head_stride = 1;
    merge_states(state_.context, states, out, args_.lse, args_.out_scale, stream_);
  }

 private:
  int64_t tokens() const { return plan_.num_tokens; }
  int64_t heads() const { return state_.heads(); }
  float* floats(size_t offset) const { return reinterpret_cast<float*>(memory_ + offset); }

  /// A partial result in the workspace.
  AttentionStateView state_view(size_t out, size_t lse, int64_t num_heads) const {
    return {ConstTensorView(floats(out), DType::kFloat32, {tokens(), num_heads, config_.head_dim_v}), floats(lse),
            num_heads, 1, LseBase::kE};
  }

  /// Everything that only this rank knows to be wrong must be found before the others wait for it.
  void check(Workspace workspace) const {
    core::require(stream_.handle == nullptr, "a CPU context takes the default stream only");
    if (layout_.total > 0 && (workspace.data == nullptr || workspace.bytes < layout_.total)) {
      core::fail(ErrorCode::kWorkspaceTooSmall, "the workspace has ", workspace.bytes, " bytes; the plan needs ",
                 layout_.total);
    }
    core::require(reinterpret_cast<uintptr_t>(workspace.data) % 256 == 0, "the workspace is not aligned to 256 bytes");
    const bool replicated = state_.config.replicated_queries;
    check_tensor("q", args_.q, config_.q, tokens(), replicated ? state_.all_heads() : heads(), config_.head_dim_qk);
    check_tensor("out", args_.out, config_.out, tokens(), heads(), config_.head_dim_v);
    core::require(args_.q_scale.granularity == ScaleGranularity::kPerTensor,
                  "q_scale is not per tensor; one for all heads of all ranks is taken");
    core::require(args_.out_scale.granularity == ScaleGranularity::kPerTensor, "out_scale is not per tensor");
    if (plan_.cached) {
      const SegmentArgs segment = cached_segment();
      attention::check_args(detail::checked(*plan_.cached), cached_args(segment));
    }
    if (plan_.fresh) {
      const SegmentArgs segment = fresh_segment();
      attention::check_args(detail::checked(*plan_.fresh), fresh_args(segment));
    }
  }

  AttentionArgs common_args() const {
    AttentionArgs args;
    args.sm_scale = args_.sm_scale;
    args.logits_soft_cap = args_.logits_soft_cap;
    args.q_scale = args_.q_scale;
    return args;
  }

  SegmentArgs cached_segment() const {
    SegmentArgs segment;
    segment.cache = args_.cache;
    segment.table = args_.table;
    segment.k_scale = args_.k_scale;
    segment.v_scale = args_.v_scale;
    return segment;
  }

  SegmentArgs fresh_segment() const {
    SegmentArgs segment;
    if (plan_.reads_new_tokens) {
      segment.ragged = {args_.k, args_.v, state_.indptr.data()};
    } else {
      segment.ragged.k = ConstTensorView(nullptr, config_.ragged_kv, {0, config_.num_kv_heads, config_.head_dim_qk});
      segment.ragged.v = ConstTensorView(nullptr, config_.ragged_kv, {0, config_.num_kv_heads, config_.head_dim_v});
      segment.ragged.indptr = state_.no_tokens.data();
    }
    return segment;
  }

  AttentionArgs cached_args(const SegmentArgs& segment) const {
    AttentionArgs args = common_args();
    const bool in_order = state_.queries_are_in_order();
    args.q = in_order ? first_tokens(args_.q, tokens())
                      : ConstTensorView(memory_ + layout_.queries, config_.q,
                                        {tokens(), state_.all_heads(), config_.head_dim_qk});
    args.alibi_slopes = args_.alibi_slopes;
    if (config_.features.has(Feature::kAlibi) && !in_order) args.alibi_slopes = floats(layout_.slopes);
    args.out = TensorView(floats(layout_.partial), DType::kFloat32, {tokens(), state_.all_heads(), config_.head_dim_v});
    args.lse = {floats(layout_.partial_lse), state_.all_heads(), 1, LseBase::kE};
    args.segments = {&segment, 1};
    return args;
  }

  AttentionArgs fresh_args(const SegmentArgs& segment) const {
    AttentionArgs args = common_args();
    args.q = first_tokens(args_.q, tokens());
    args.alibi_slopes = args_.alibi_slopes;
    if (state_.config.replicated_queries) {
      const int64_t first = state_.group->rank() * heads();
      args.q.data = static_cast<const std::byte*>(args_.q.data) + first * args_.q.strides[1] * size_of(config_.q);
      args.q.shape[1] = heads();
      if (args.alibi_slopes != nullptr) args.alibi_slopes += first;
    }
    args.sinks = args_.sinks;
    args.out = TensorView(floats(layout_.fresh), DType::kFloat32, {tokens(), heads(), config_.head_dim_v});
    args.lse = {floats(layout_.fresh_lse), heads(), 1, LseBase::kE};
    args.segments = {&segment, 1};
    return args;
  }

  /// Brings every rank's queries and slopes to `queries` and `slopes`.
  void gather() {
    if (state_.queries_are_in_order()) return;
    const int32_t world = state_.group->size();
    if (!state_.gathers()) {
      if (args_.alibi_slopes == nullptr) std::fill_n(floats(layout_.slopes), state_.all_heads(), 0.0f);
      for (int32_t r = 0; r < world; ++r) {
        const int64_t first = r * heads();
        const auto* q = static_cast<const std::byte*>(args_.q.data) + first * args_.q.strides[1] * size_of(config_.q);
        const float* slopes = args_.alibi_slopes == nullptr ? nullptr : args_.alibi_slopes + first;
        arrange(r, q, args_.q.strides[0], args_.q.strides[1], slopes);
      }
      return;
    }
    write_piece(memory_ + layout_.send);
    state_.group->all_gather(memory_ + layout_.send, memory_ + layout_.gathered, layout_.piece, stream_);
    const bool alibi = config_.features.has(Feature::kAlibi);
    for (int32_t r = 0; r < world; ++r) {
      const std::byte* piece = memory_ + layout_.gathered + static_cast<size_t>(r) * layout_.piece;
      GatherHeader header;
      std::memcpy(&header, piece, sizeof(header));
      core::require(header.digest == plan_.digest, "rank ", r,
                    " of the group runs another batch or configuration than rank ", state_.group->rank());
      arrange(r, piece + layout_.queries_in_piece, heads() * config_.head_dim_qk, config_.head_dim_qk,
              alibi ? reinterpret_cast<const float*>(piece + layout_.slopes_in_piece) : nullptr);
    }
  }

  void write_piece(std::byte* piece) const {
    const GatherHeader header{plan_.digest};
    std::memcpy(piece, &header, sizeof(header));
    const auto num_heads = static_cast<size_t>(heads());
    if (args_.alibi_slopes != nullptr) {
      std::memcpy(piece + layout_.slopes_in_piece, args_.alibi_slopes, num_heads * sizeof(float));
    } else if (config_.features.has(Feature::kAlibi)) {  // a layer without; slopes of 0 are the same
      std::memset(piece + layout_.slopes_in_piece, 0, num_heads * sizeof(float));
    }
    const size_t row = static_cast<size_t>(config_.head_dim_qk) * static_cast<size_t>(size_of(config_.q));
    const auto* q = static_cast<const std::byte*>(args_.q.data);
    std::byte* to = piece + layout_.queries_in_piece;
    for (int64_t t = 0; t < tokens(); ++t) {
      for (int64_t h = 0; h < heads(); ++h, to += row) {
        std::memcpy(to, q + (t * args_.q.strides[0] + h * args_.q.strides[1]) * size_of(config_.q), row);
      }
    }
  }

  /// Puts the heads of rank r where they stand among those of all ranks. Strides in elements.
  void arrange(int32_t r, const std::byte* q, int64_t token_stride, int64_t head_stride, const float* slopes) {
    const int64_t per_group = heads() / config_.num_kv_heads;
    const size_t row = static_cast<size_t>(config_.head_dim_qk) * static_cast<size_t>(size_of(config_.q));
    for (int64_t h = 0; h < heads(); ++h) {
      const int64_t head = h / per_group * per_group * state_.group->size() + r * per_group + h % per_group;
      if (slopes != nullptr) floats(layout_.slopes)[head] = slopes[h];
      std::byte* to = memory_ + layout_.queries + static_cast<size_t>(head) * row;
      for (int64_t t = 0; t < tokens(); ++t, to += static_cast<size_t>(state_.all_heads()) * row) {
        std::memcpy(to, q + (t * token_stride + h * head_stride) * size_of(config_.q), row);
      }
    }
  }

  DcpState& state_;
  const AttentionConfig& config_;
  const DcpPlan& plan_;
  const DcpArgs& args_;
  const RunLayout layout_;
  std::byte* memory_;
  Stream stream_;
};

}  // namespace

size_t DcpAttention::workspace_size(const DcpPlan& plan) const {
  return run_layout(*state_, plan).total;
}

void DcpAttention::run(const DcpPlan& plan, const DcpArgs& args, Workspace workspace, Stream stream) {
  if (plan.num_tokens == 0) return;
  Run layer(*state_, plan, args, workspace, stream);
  if (plan.cached) layer.cached_pass();
  if (plan.fresh) layer.fresh_pass();
  layer.merge();
}

}  // namespace folio::inline v0::distributed
