// One layer: gather the queries, attend to this rank's shard, combine, attend to the new tokens, merge. Over peer
// memory the combine is part of the merge.
#include <cstring>
#include <exception>

#include "attention/merge_output.hpp"
#include "attention/run_args.hpp"
#include "core/error.hpp"
#include "distributed/combine_call.hpp"
#include "distributed/dcp_state.hpp"
#include "folio/merge.hpp"
#include "kernels/cuda/common/merge_states/ranks.hpp"

namespace folio::inline v0::distributed {
namespace {

/// One call of `run`, or of `start`: its exchange of partial results may have a stream of its own.
class Run {
 public:
  Run(DcpState& state, const DcpPlan& plan, const DcpArgs& args, Workspace workspace, Stream stream)
      : state_(state),
        config_(state.config.attention),
        plan_(plan),
        args_(args),
        layout_(run_layout(state, plan)),
        memory_(static_cast<std::byte*>(workspace.data)),
        gpu_(state.gpu()),
        stream_(stream),
        exchange_(stream) {
    check(workspace);
  }

  /// Whether the layer has an exchange of partial results that the host need not wait for.
  bool can_fork() const { return plan_.cached && state_.exchange != nullptr; }

  /// The layer. `side`: null, or what the exchange is enqueued on; the caller joins it.
  void enqueue(attention::GpuSideStream* side) {
    try {
      enqueue_passes(side);
    } catch (const std::exception&) {
      // The others have an exchange that this rank does not come to. What it ran next would be taken for it.
      if (plan_.over_peer_memory) state_.peers.memory->abandon(*gpu_, *state_.group, stream_);
      throw;
    }
  }

 private:
  void enqueue_passes(attention::GpuSideStream* side) {
    if (plan_.cached) {
      gather();
      attend_to_cache();
      if (side != nullptr) exchange_ = side->fork(stream_);
      combine();
    }
    if (plan_.fresh) {
      fresh_pass();
      if (side != nullptr) exchange_ = side->fork(stream_);
    }
    merge();
  }

  void attend_to_cache() {
    const SegmentArgs segment = cached_segment();
    const Workspace scratch{memory_ + layout_.attention, layout_.attention_bytes};
    folio::run(*plan_.cached, cached_args(segment), scratch, stream_);
  }

  /// Over the group; over peer memory it is part of the merge.
  void combine() {
    if (state_.group->size() == 1 || plan_.over_peer_memory) return;
    const DType partial = state_.partial_dtype();
    CombineCall call{state_.context, *state_.group,
                     state_view(layout_.partial, layout_.partial_lse, state_.all_heads(), partial)};
    call.head_groups = config_.num_kv_heads;
    call.out = TensorView(floats(layout_.combined), DType::kFloat32, {tokens(), out_heads(), config_.head_dim_v});
    call.lse = {floats(layout_.combined_lse), out_heads(), 1, LseBase::kE};
    call.workspace = {memory_ + layout_.combine, layout_.combine_bytes};
    call.stream = exchange_;
    if (partial != DType::kFloat32 && state_.config.all_heads_out) {
      all_to_all_all_gather(call);
    } else if (partial != DType::kFloat32 || state_.config.combine == DcpCombine::kAllToAll) {
      all_to_all_combine(call);
    } else if (state_.config.all_heads_out) {
      all_gather_all_reduce(call);
    } else {
      all_gather_reduce_scatter(call);
    }
  }

  void fresh_pass() {
    const SegmentArgs segment = fresh_segment();
    const Workspace scratch{memory_ + layout_.attention, layout_.attention_bytes};
    for (int32_t part = 0; part < fresh_parts(); ++part) {
      folio::run(*plan_.fresh, fresh_args(segment, part), scratch, stream_);
    }
  }

  /// Combines, over peer memory, and merges what the passes have left.
  void merge() {
    if (plan_.over_peer_memory) return combine_over_peers();
    const TensorView out = first_tokens(args_.out, tokens());
    const AttentionStateView older = state_view(layout_.combined, layout_.combined_lse, out_heads());
    const AttentionStateView newer = state_view(layout_.fresh, layout_.fresh_lse, out_heads());
    if (plan_.cached && plan_.fresh) {
      merge_state(state_.context, older, newer, out, args_.lse, args_.out_scale, exchange_);
      return;
    }
    const AttentionStateView& only = plan_.cached ? older : newer;
    AttentionStatesView states;
    states.out = ConstTensorView(only.out.data, DType::kFloat32, {tokens(), 1, out_heads(), config_.head_dim_v});
    states.lse = only.lse;
    states.lse_token_stride = states.lse_state_stride = out_heads();
    states.lse_head_stride = 1;
    merge_states(state_.context, states, out, args_.lse, args_.out_scale, exchange_);
  }

  int64_t tokens() const { return plan_.num_tokens; }
  int64_t heads() const { return state_.heads(); }
  int64_t out_heads() const { return state_.out_heads(); }
  /// The ranks whose heads attend to the new tokens here, one after the other: all, or this one.
  int32_t fresh_parts() const { return state_.config.all_heads_out ? state_.group->size() : 1; }
  float* floats(size_t offset) const { return reinterpret_cast<float*>(memory_ + offset); }

  bool gathers_over_peers() const { return plan_.over_peer_memory && state_.gathers(); }
  /// Where the queries and slopes of all ranks lie, the heads of each KV head together.
  const std::byte* all_queries() const {
    if (!gathers_over_peers()) return memory_ + layout_.queries;
    return state_.peers.memory->own() + state_.peers.memory->ranks().layout.queries;
  }
  const float* all_slopes() const {
    if (!gathers_over_peers()) return floats(layout_.slopes);
    const PeerMemory& peers = *state_.peers.memory;
    return reinterpret_cast<const float*>(peers.own() + peers.ranks().layout.slopes);
  }

  /// A partial result in the workspace.
  AttentionStateView state_view(size_t out, size_t lse, int64_t num_heads, DType dtype = DType::kFloat32) const {
    return {ConstTensorView(memory_ + out, dtype, {tokens(), num_heads, config_.head_dim_v}), floats(lse), num_heads, 1,
            LseBase::kE};
  }

  /// Everything that only this rank knows to be wrong must be found before the others wait for it.
  void check(Workspace workspace) const {
    core::require(gpu_ != nullptr || stream_.handle == nullptr, "a CPU context takes the default stream only");
    if (gpu_ != nullptr && !plan_.over_peer_memory && !state_.group->enqueues()) {
      check_capture(state_, gpu_->is_capturing(stream_));
    }
    if (plan_.over_peer_memory) {
      state_.peers.memory->report(*state_.group);
      attention::check_merge_output("DcpAttention::run", state_.context, first_tokens(args_.out, tokens()), args_.lse,
                                    args_.out_scale);
    }
    if (layout_.total > 0 && (workspace.data == nullptr || workspace.bytes < layout_.total)) {
      core::fail(ErrorCode::kWorkspaceTooSmall, "the workspace has ", workspace.bytes, " bytes; the plan needs ",
                 layout_.total);
    }
    core::require(reinterpret_cast<uintptr_t>(workspace.data) % 256 == 0, "the workspace is not aligned to 256 bytes");
    const bool replicated = state_.config.replicated_queries;
    check_rows("q", args_.q, config_.q, tokens(), replicated ? state_.all_heads() : heads(), config_.head_dim_qk);
    check_rows("out", args_.out, config_.out, tokens(), out_heads(), config_.head_dim_v);
    core::require(args_.out_scale.granularity == ScaleGranularity::kPerTensor, "out_scale is not per tensor");
    if (plan_.cached) {
      const SegmentArgs segment = cached_segment();
      attention::check_args(detail::checked(*plan_.cached), cached_args(segment));
    }
    if (plan_.fresh) {
      const SegmentArgs segment = fresh_segment();
      attention::check_args(detail::checked(*plan_.fresh), fresh_args(segment, 0));
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

  /// Rows of k and v that each request's new tokens take.
  const std::vector<int32_t>& host_indptr() const { return plan_.reads_new_tokens ? state_.indptr : state_.no_tokens; }

  SegmentArgs fresh_segment() const {
    SegmentArgs segment;
    if (plan_.reads_new_tokens) {
      segment.ragged = {args_.k, args_.v, host_indptr().data()};
    } else {
      segment.ragged.k = ConstTensorView(nullptr, config_.ragged_kv, {0, config_.num_kv_heads, config_.head_dim_qk});
      segment.ragged.v = ConstTensorView(nullptr, config_.ragged_kv, {0, config_.num_kv_heads, config_.head_dim_v});
      segment.ragged.indptr = host_indptr().data();
    }
    if (gpu_ != nullptr) segment.ragged.indptr = state_.device.indptr;
    return segment;
  }

  AttentionArgs cached_args(const SegmentArgs& segment) const {
    AttentionArgs args = common_args();
    const bool in_order = state_.queries_are_in_order();
    args.q = in_order ? first_tokens(args_.q, tokens())
                      : ConstTensorView(all_queries(), config_.q, {tokens(), state_.all_heads(), config_.head_dim_qk});
    args.alibi_slopes = args_.alibi_slopes;
    if (config_.features.has(Feature::kAlibi) && !in_order) args.alibi_slopes = all_slopes();
    args.out = TensorView(memory_ + layout_.partial, state_.partial_dtype(),
                          {tokens(), state_.all_heads(), config_.head_dim_v});
    args.lse = {floats(layout_.partial_lse), state_.all_heads(), 1, LseBase::kE};
    args.segments = {&segment, 1};
    return args;
  }

  /// One rank's heads: this one's, or under all_heads_out those of rank `part`.
  AttentionArgs fresh_args(const SegmentArgs& segment, int32_t part) const {
    const bool all = state_.config.all_heads_out;
    AttentionArgs args = common_args();
    args.q = first_tokens(args_.q, tokens());
    args.alibi_slopes = args_.alibi_slopes;
    if (state_.config.replicated_queries) {
      const int64_t first = (all ? part : state_.group->rank()) * heads();
      args.q.data = static_cast<const std::byte*>(args_.q.data) + first * args_.q.strides[1] * size_of(config_.q);
      args.q.shape[1] = heads();
      if (args.alibi_slopes != nullptr) args.alibi_slopes += first;
    }
    const int64_t first_out = part * heads();  // 0 but under all_heads_out
    args.sinks = args_.sinks == nullptr ? nullptr : args_.sinks + first_out;
    args.out = TensorView(floats(layout_.fresh) + first_out * config_.head_dim_v, DType::kFloat32,
                          {tokens(), heads(), config_.head_dim_v});
    args.out.strides[0] = out_heads() * config_.head_dim_v;
    args.lse = {floats(layout_.fresh_lse) + first_out, out_heads(), 1, LseBase::kE};
    args.segments = {&segment, 1};
    return args;
  }

  /// Brings every rank's queries and slopes to all_queries() and all_slopes().
  void gather() {
    if (state_.queries_are_in_order()) return;
    if (gathers_over_peers()) return gather_over_peers();
    const int64_t row = config_.head_dim_qk * int64_t{size_of(config_.q)};
    kernels::cuda::ArrangeParams own;
    own.from = static_cast<const std::byte*>(args_.q.data);
    own.rank_stride = heads() * args_.q.strides[1] * size_of(config_.q);
    own.token_stride = args_.q.strides[0] * size_of(config_.q);
    own.head_stride = args_.q.strides[1] * size_of(config_.q);
    own.num_tokens = tokens();
    own.heads = static_cast<int32_t>(heads());
    own.groups = config_.num_kv_heads;
    own.row_bytes = row;
    own.slopes = reinterpret_cast<const std::byte*>(args_.alibi_slopes);
    own.slopes_rank_stride = heads() * static_cast<int64_t>(sizeof(float));
    kernels::cuda::ArrangeParams all = own;
    all.ranks = state_.group->size();
    all.to = memory_ + layout_.queries;
    all.slopes_to = floats(layout_.slopes);
    if (state_.gathers()) {
      const bool alibi = config_.features.has(Feature::kAlibi);
      std::byte* const piece = memory_ + layout_.send;
      own.to = piece + layout_.queries_in_piece;
      // A layer without slopes beside layers with them: slopes of 0 are the same.
      own.slopes_to = alibi ? reinterpret_cast<float*>(piece + layout_.slopes_in_piece) : nullptr;
      send_header(piece, own);
      arrange(own);
      const std::byte* const gathered = memory_ + layout_.gathered;
      state_.group->all_gather(piece, memory_ + layout_.gathered, layout_.piece, stream_);
      compare_headers(gathered, all);
      all.from = gathered + layout_.queries_in_piece;
      all.rank_stride = all.slopes_rank_stride = static_cast<int64_t>(layout_.piece);
      all.token_stride = heads() * row;
      all.head_stride = row;
      all.slopes = alibi ? gathered + layout_.slopes_in_piece : nullptr;
    }
    arrange(all);
  }

  void gather_over_peers() const {
    kernels::cuda::PeerQueriesParams params;
    params.ranks = state_.peers.memory->ranks();
    params.from = static_cast<const std::byte*>(args_.q.data);
    params.token_stride = args_.q.strides[0] * size_of(config_.q);
    params.head_stride = args_.q.strides[1] * size_of(config_.q);
    params.num_tokens = tokens();
    params.heads = static_cast<int32_t>(heads());
    params.groups = config_.num_kv_heads;
    params.row_bytes = config_.head_dim_qk * int64_t{size_of(config_.q)};
    params.sends_slopes = config_.features.has(Feature::kAlibi);
    params.slopes = args_.alibi_slopes;
    params.sent.header = header_of(state_, plan_, args_);
    params.sent.q_scales = q_scales_of(state_, plan_, args_);
    params.header_fault = &state_.status->run;
    gpu_->enqueue(params, stream_);
  }

  void combine_over_peers() const {
    const kernels::cuda::PeerRanks& ranks = state_.peers.memory->ranks();
    const int32_t world = state_.group->size();
    const int64_t rows = tokens() * out_heads();
    kernels::cuda::CombineParams merge;
    kernels::cuda::CombineSource& older = merge.sources[0];
    older.dtype = state_.partial_dtype();
    older.num_states = world;
    older.head_stride = config_.head_dim_v;
    older.token_stride = out_heads() * older.head_stride;
    older.state_stride = rows * older.head_stride;
    older.lse_head_stride = 1;
    older.lse_token_stride = out_heads();
    older.lse_state_stride = rows;
    if (plan_.fresh) {
      kernels::cuda::CombineSource& newer = merge.sources[1];
      newer = older;
      newer.dtype = DType::kFloat32;
      newer.num_states = 1;
      newer.out = floats(layout_.fresh);
      newer.lse = floats(layout_.fresh_lse);
    }
    merge.num_tokens = tokens();
    merge.num_heads = static_cast<int32_t>(out_heads());
    merge.head_dim = config_.head_dim_v;
    merge.out = args_.out.data;
    merge.out_dtype = args_.out.dtype;
    merge.out_scale = args_.out_scale;
    merge.out_token_stride = args_.out.strides[0];
    merge.out_head_stride = args_.out.strides[1];
    merge.lse = args_.lse;
    kernels::cuda::PeerCombineParams params;
    params.ranks = ranks;
    params.heads = {world, static_cast<int32_t>(heads()), config_.num_kv_heads};
    params.all_heads = state_.config.all_heads_out;
    params.partial = memory_ + layout_.partial;
    params.lse = floats(layout_.partial_lse);
    params.row_bytes = config_.head_dim_v * int64_t{size_of(older.dtype)};
    for (size_t i = 0; i < 2; ++i) {
      const std::byte* const half = state_.peers.memory->own() + ranks.layout.halves[i];
      older.out = half;
      older.lse = reinterpret_cast<const float*>(half + kernels::cuda::peer_lses_at(world, rows, params.row_bytes));
      params.merges[i] = merge;
    }
    gpu_->enqueue(params, exchange_);
  }

  /// What this rank runs, at the head of its piece: on a GPU by the kernel that arranges its queries.
  void send_header(std::byte* piece, kernels::cuda::ArrangeParams& params) const {
    const kernels::cuda::GatherHeader header = header_of(state_, plan_, args_);
    if (gpu_ == nullptr) {
      std::memcpy(piece, &header, sizeof(header));
      return;
    }
    params.sent.to = reinterpret_cast<kernels::cuda::GatherHeader*>(piece);
    params.sent.header = header;
    params.sent.q_scales = q_scales_of(state_, plan_, args_);
  }

  /// On a CPU throws where another rank runs something else; on a GPU the kernel that arranges all queries compares.
  void compare_headers(const std::byte* gathered, kernels::cuda::ArrangeParams& params) const {
    const int32_t world = state_.group->size(), own = state_.group->rank();
    if (gpu_ != nullptr) {
      params.gathered = {gathered, static_cast<int64_t>(layout_.piece), world, own, &state_.status->run};
      return;
    }
    const auto header_at = [&](int32_t r) {
      kernels::cuda::GatherHeader header;
      std::memcpy(&header, gathered + static_cast<size_t>(r) * layout_.piece, sizeof(header));
      return header;
    };
    for (int32_t r = 0; r < world; ++r) check_header(header_at(own), header_at(r), r, own, "");
  }

  void arrange(const kernels::cuda::ArrangeParams& params) const {
    if (gpu_ != nullptr) {
      gpu_->enqueue(params, stream_);
      return;
    }
    const int32_t all = params.ranks * params.heads;
    const auto row = static_cast<size_t>(params.row_bytes);
    for (int32_t place = 0; place < all; ++place) {
      const auto [rank, head] = kernels::cuda::head_owner(place, params.ranks, params.heads, params.groups);
      const std::byte* from = params.from + rank * params.rank_stride + head * params.head_stride;
      std::byte* to = params.to + place * params.row_bytes;
      for (int64_t t = 0; t < params.num_tokens; ++t, from += params.token_stride, to += all * params.row_bytes) {
        std::memcpy(to, from, row);
      }
      if (params.slopes_to == nullptr) continue;
      float& slope = params.slopes_to[place];
      slope = 0.0f;
      if (params.slopes != nullptr) {
        slope = reinterpret_cast<const float*>(params.slopes + rank * params.slopes_rank_stride)[head];
      }
    }
  }

  DcpState& state_;
  const AttentionConfig& config_;
  const DcpPlan& plan_;
  const DcpArgs& args_;
  const RunLayout layout_;
  std::byte* memory_;
  const attention::GpuBackend* gpu_;  ///< null on a CPU
  Stream stream_;
  Stream exchange_;  ///< of the exchange of partial results and all behind it
};

}  // namespace

size_t DcpAttention::workspace_size(const DcpPlan& plan) const {
  return run_layout(*state_, plan).total;
}

size_t DcpAttention::workspace_size() const {
  return largest_run_layout(*state_).total;
}

void DcpAttention::run(const DcpPlan& plan, const DcpArgs& args, Workspace workspace, Stream stream) {
  check_finished(*state_);
  if (plan.num_tokens > 0) Run(*state_, plan, args, workspace, stream).enqueue(nullptr);
}

void DcpAttention::start(const DcpPlan& plan, const DcpArgs& args, Workspace workspace, Stream stream) {
  DcpState& state = *state_;
  check_finished(state);
  state.forked = false;
  if (plan.num_tokens > 0) {
    Run layer(state, plan, args, workspace, stream);
    if (layer.can_fork()) {
      // Joined where anything throws: a capture that is left with a fork could not be ended.
      attention::Fork fork(*state.exchange, stream);
      layer.enqueue(state.exchange.get());
      fork.leave();
      state.forked = true;
    } else {
      layer.enqueue(nullptr);
    }
  }
  state.started = true;
}

void DcpAttention::finish(Stream stream) {
  DcpState& state = *state_;
  core::require(state.started, "finish is called, and no layer was started");
  core::require(state.gpu() != nullptr || stream.handle == nullptr, "a CPU context takes the default stream only");
  if (state.forked) state.exchange->join(stream);
  state.started = false;
}

}  // namespace folio::inline v0::distributed
