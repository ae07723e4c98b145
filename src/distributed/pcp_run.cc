// One layer of divided queries: gather the new tokens, attend to them, reach the older ones, merge.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "attention/run_args.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "distributed/combine_call.hpp"
#include "distributed/dcp_state.hpp"
#include "distributed/pcp_state.hpp"
#include "folio/distributed/context_parallel.hpp"
#include "folio/kv_cache.hpp"
#include "folio/merge.hpp"
#include "folio/page_table.hpp"
#include "kernels/cuda/common/merge_states/ranks.hpp"
#include "kernels/cuda/common/tables/tables.hpp"
#include "kvcache/page_rows.hpp"

namespace folio::inline v0::distributed {

int64_t PcpState::fresh_row() const {
  const AttentionConfig& c = attention();
  return core::checked_mul(int64_t{c.num_kv_heads}, int64_t{c.head_dim_qk} + c.head_dim_v,
                           int64_t{size_of(c.ragged_kv)});
}

int64_t PcpState::piece_rows(int32_t max_tokens) const {
  return int64_t{max_tokens} + core::ceil_div(static_cast<int64_t>(sizeof(PcpHeader)), fresh_row());
}

int32_t max_rank_tokens(const GraphBounds& bounds, int32_t world) {
  const int64_t share = int64_t{bounds.max_tokens} / world + 2 * int64_t{bounds.max_requests};
  return static_cast<int32_t>(std::min<int64_t>(share, bounds.max_tokens));
}

int32_t PcpState::max_fresh_pages(int32_t num_requests, int32_t max_tokens) const {
  const int64_t tokens = std::min<int64_t>(config.bounds->max_tokens, int64_t{world()} * max_tokens);
  return core::checked_cast<int32_t>(tokens / kFreshPage + num_requests);
}

int32_t PcpState::max_table_pages(int32_t num_requests) const {
  const int32_t tokens = max_dcp_context_len(config.bounds->max_kv_len, world(), config.interleave);
  return core::checked_cast<int32_t>(core::checked_mul(int64_t{pages_for(tokens, attention().page_size)},
                                                       2 * int64_t{world()}, int64_t{num_requests}));
}

namespace {

/// What the parts of a workspace depend on.
struct PcpSizes {
  int32_t max_tokens = 0;
  PcpExchange exchange = PcpExchange::kAutomatic;
  int64_t fresh_pages = 0;
  int64_t table_pages = 0;
  int64_t own_rows = 0;
  int64_t older_rows = 0;
  size_t attention_bytes = 0;
};

PcpSizes sizes_within_bounds(const PcpState& state, int32_t num_requests, int32_t max_tokens) {
  PcpSizes sizes;
  sizes.max_tokens = max_tokens;
  sizes.exchange = PcpExchange::kPassQ;
  sizes.fresh_pages = state.max_fresh_pages(num_requests, max_tokens);
  sizes.table_pages = state.max_table_pages(num_requests);
  sizes.own_rows = 2 * int64_t{num_requests};
  sizes.older_rows = state.world() * (sizes.own_rows + 1);
  sizes.attention_bytes = std::max(folio::workspace_size(state.fresh_op), folio::workspace_size(state.shard_op));
  return sizes;
}

PcpSizes sizes_of(const PcpState& state, const PcpPlan& plan) {
  if (state.bounded()) return sizes_within_bounds(state, plan.num_requests, plan.max_tokens);
  PcpSizes sizes;
  sizes.max_tokens = plan.max_tokens;
  sizes.exchange = plan.exchange;
  sizes.fresh_pages = state.fresh_pages;
  if (plan.exchange != PcpExchange::kAutomatic) sizes.table_pages = state.table_indptr(plan.exchange).back();
  sizes.own_rows = state.own.size();
  sizes.older_rows = state.older_rows(plan.exchange).size();
  if (plan.fresh) sizes.attention_bytes = folio::workspace_size(*plan.fresh);
  if (plan.older) sizes.attention_bytes = std::max(sizes.attention_bytes, folio::workspace_size(*plan.older));
  return sizes;
}

PcpLayout layout_of(const PcpState& state, const PcpSizes& sizes) {
  PcpLayout layout;
  if (sizes.max_tokens == 0) return layout;
  const AttentionConfig& c = state.attention();
  const int64_t world = state.world(), tokens = sizes.max_tokens;
  const auto take = [&layout](int64_t a, int64_t b, int64_t bytes) {
    const size_t begin = layout.total;
    layout.total =
        core::checked_add(begin, attention::round_up_to_alignment(static_cast<size_t>(core::checked_mul(a, b, bytes))));
    return begin;
  };
  layout.pieces = take(world, state.piece_rows(sizes.max_tokens), state.fresh_row());
  layout.fresh = take(sizes.fresh_pages, kFreshPage, state.fresh_row());
  layout.num_states = 1;
  if (sizes.exchange == PcpExchange::kPassQ) {
    layout.num_states += state.world();
    layout.queries = take(world * tokens, int64_t{c.num_q_heads} * c.head_dim_qk, size_of(c.q));
    layout.sent = take(world * tokens, state.partial_row(), sizeof(float));
    layout.table = take(sizes.table_pages, 1, sizeof(int32_t));
  } else if (sizes.exchange == PcpExchange::kPassKv) {
    layout.num_states += 1;
    const int64_t key = core::checked_mul(state.older_tokens, int64_t{c.num_kv_heads}, int64_t{size_of(c.kv)});
    layout.older_values = static_cast<size_t>(core::checked_mul(key, int64_t{c.head_dim_qk}));
    layout.older_piece =
        core::checked_add(layout.older_values, static_cast<size_t>(core::checked_mul(key, int64_t{c.head_dim_v})));
    layout.older = take(world, static_cast<int64_t>(layout.older_piece), 1);
    layout.table = take(sizes.table_pages, 1, sizeof(int32_t));
  }
  layout.states = take(layout.num_states * tokens, state.partial_row(), sizeof(float));
  layout.own_q_scale = take(sizes.own_rows, c.num_kv_heads, sizeof(float));
  layout.row_scales = take(3 * sizes.older_rows, c.num_kv_heads, sizeof(float));
  layout.attention_bytes = sizes.attention_bytes;
  layout.attention = take(static_cast<int64_t>(layout.attention_bytes), 1, 1);
  return layout;
}

}  // namespace

PcpLayout pcp_layout(const PcpState& state, const PcpPlan& plan) {
  if (plan.step != state.step) core::fail(ErrorCode::kStalePlan, "the PcpAttention has planned again since");
  return layout_of(state, sizes_of(state, plan));
}

PcpLayout pcp_layout(const PcpState& state) {
  return layout_of(state, sizes_within_bounds(state, state.config.bounds->max_requests, state.max_rank_tokens()));
}

namespace {

/// One call of `run`.
class Run {
 public:
  Run(PcpState& state, const PcpPlan& plan, const PcpArgs& args, Workspace workspace, Stream stream)
      : state_(state),
        config_(state.attention()),
        plan_(plan),
        args_(args),
        layout_(pcp_layout(state, plan)),
        memory_(static_cast<std::byte*>(workspace.data)),
        stream_(stream) {
    check(workspace);
  }

  /// Everything that only this rank knows to be wrong is found here, before the others wait for it.
  void pack() {
    if (state_.gpu() != nullptr && plan_.exchange != PcpExchange::kAutomatic) read_table();
    pack_fresh();
    if (plan_.exchange == PcpExchange::kPassQ) pack_queries();
    if (plan_.exchange == PcpExchange::kPassKv) pack_older();
  }

  void fresh_pass() {
    gather_fresh();
    if (!plan_.fresh) return;
    const SegmentArgs segment = fresh_segment();
    folio::run(*plan_.fresh, own_args(layout_.num_states - 1, {&segment, 1}), scratch(), stream_);
  }

  void older_pass() {
    if (plan_.exchange == PcpExchange::kPassQ) pass_q();
    if (plan_.exchange == PcpExchange::kPassKv) pass_kv();
  }

  void merge() {
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

 private:
  int64_t tokens() const { return state_.rows(plan_); }
  int64_t rank() const { return state_.group->rank(); }
  int64_t head_stride() const { return config_.head_dim_v + kLsePadding; }
  float* floats(size_t offset) const { return reinterpret_cast<float*>(memory_ + offset); }
  Workspace scratch() const { return {memory_ + layout_.attention, layout_.attention_bytes}; }
  size_t piece_bytes() const { return static_cast<size_t>(state_.piece_rows(plan_.max_tokens) * state_.fresh_row()); }
  std::byte* piece(int64_t of_rank) const { return memory_ + layout_.pieces + of_rank * ssize(piece_bytes()); }
  std::byte* older_piece(int64_t of_rank) const {
    return memory_ + layout_.older + of_rank * ssize(layout_.older_piece);
  }
  static int64_t ssize(size_t size) { return static_cast<int64_t>(size); }

  static bool is_per_request(const Scale& scale) {
    return scale.granularity == ScaleGranularity::kPerRequest ||
           scale.granularity == ScaleGranularity::kPerRequestAndHead;
  }

  void check_scale(const char* name, const Scale& scale) const {
    if (state_.gpu() != nullptr && is_per_request(scale)) {
      core::fail(ErrorCode::kUnsupported, name,
                 " is per request; on a GPU PcpAttention takes scales per tensor and head");
    }
    core::require(!is_per_request(scale) || scale.data != nullptr, name, " is per request and has no data");
    core::require(scale.request_stride >= 0, name, ".request_stride is ", scale.request_stride);
  }

  static float scale_of(const Scale& scale, int64_t request, int32_t head) {
    if (scale.data == nullptr) return scale.value;
    switch (scale.granularity) {
      case ScaleGranularity::kPerHead: return scale.data[head];
      case ScaleGranularity::kPerRequest: return scale.data[request];
      case ScaleGranularity::kPerRequestAndHead: return scale.data[request * scale.request_stride + head];
      default: return scale.data[0];
    }
  }

  /// A scale per request as one per row of a plan; others are themselves.
  Scale for_rows_of(const ChunkRows& rows, const Scale& scale, float* memory) const {
    if (!is_per_request(scale)) return scale;
    float* next = memory;
    for (const int32_t request : rows.request) {
      for (int32_t h = 0; h < config_.num_kv_heads; ++h) *next++ = request < 0 ? 1.0f : scale_of(scale, request, h);
    }
    return {1.0f, memory, ScaleGranularity::kPerRequestAndHead, config_.num_kv_heads};
  }

  void expand_scales() {
    const ChunkRows& rows = state_.older_rows(plan_.exchange);
    const int64_t each = int64_t{rows.size()} * config_.num_kv_heads;
    float* const memory = floats(layout_.row_scales);
    own_q_scale_ = for_rows_of(state_.own, args_.q_scale, floats(layout_.own_q_scale));
    row_q_scale_ = for_rows_of(rows, args_.q_scale, memory);
    row_k_scale_ = for_rows_of(rows, args_.k_scale, memory + each);
    row_v_scale_ = for_rows_of(rows, args_.v_scale, memory + 2 * each);
  }

  void check_capture() const {
    const attention::GpuBackend* const gpu = state_.gpu();
    if (gpu == nullptr || !gpu->is_capturing(stream_)) return;
    core::require(state_.bounded(), "the stream is captured; graphs need PcpConfig::bounds");
    core::require(state_.world() == 1 || state_.group->enqueues(),
                  "the stream is captured, and the group's operations wait on the host: graphs need a group whose "
                  "ProcessGroup::enqueues is true");
  }

  void check(Workspace workspace) {
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
    core::require(
        cache.format == config_.kv_format && cache.dtype == config_.kv && cache.page_size == config_.page_size,
        "the cache is ", cache.dtype, " in format ", to_string(cache.format), " with page_size ", cache.page_size,
        "; the attention was prepared for ", config_.kv, " in format ", to_string(config_.kv_format),
        " with page_size ", config_.page_size);
    if (plan_.older) {
      attention::check_args(detail::checked(*plan_.older), own_args(0, gathered_segments()));
    }
  }

  AttentionArgs common_args() const {
    AttentionArgs args;
    args.sm_scale = args_.sm_scale;
    args.logits_soft_cap = args_.logits_soft_cap;
    args.alibi_slopes = args_.alibi_slopes;
    args.q_scale = own_q_scale_;
    return args;
  }

  /// Results as rows with their LSEs behind them: `rows` of them from `begin` on.
  void set_out(AttentionArgs& args, float* begin, int64_t rows) const {
    args.out = TensorView(begin, DType::kFloat32, {rows, config_.num_q_heads, config_.head_dim_v});
    args.out.strides = {state_.partial_row(), head_stride(), 1};
    args.lse = {begin + config_.head_dim_v, state_.partial_row(), head_stride(), LseBase::kE};
  }

  /// This rank's queries, into one of the states.
  AttentionArgs own_args(int32_t state, std::span<const SegmentArgs> segments) const {
    AttentionArgs args = common_args();
    args.q = first_tokens(args_.q, tokens());
    args.segments = segments;
    if (state == layout_.num_states - 1) args.sinks = args_.sinks;
    set_out(args, floats(layout_.states) + state * plan_.max_tokens * state_.partial_row(), tokens());
    return args;
  }

  const int32_t* ints(size_t array) const { return state_.image.at<int32_t>(array); }

  /// A row for every entry of `indptr` but the last, which lies at `array`. With bounds there may be `most` indices in
  /// later steps: what is captured must not know this step's number.
  PageTableView table_of(const std::vector<int32_t>& indptr, size_t array, const int32_t* indices, int32_t most) const {
    const int32_t entries = state_.bounded() ? most : indptr.back();
    return csr_table({indices, static_cast<size_t>(entries)}, {ints(array), indptr.size()});
  }
  PageTableView table_of(const std::vector<int32_t>& indptr, size_t array, const int32_t* indices) const {
    return csr_table({indices, static_cast<size_t>(indptr.back())}, {ints(array), indptr.size()});
  }

  /// The pieces' rows of new tokens, k's or v's, from rank 0's first on.
  ConstTensorView piece_tensor(int64_t first_element, int64_t dim) const {
    const int64_t rows = state_.world() * state_.piece_rows(plan_.max_tokens);
    ConstTensorView tensor(piece(0) + first_element * size_of(config_.ragged_kv), config_.ragged_kv,
                           {rows, config_.num_kv_heads, dim});
    tensor.strides[0] = state_.fresh_row() / size_of(config_.ragged_kv);
    return tensor;
  }

  /// This rank's piece as a cache of one page, in which each token's keys precede its values.
  KvCacheView own_piece() const {
    KvCacheView cache;
    cache.dtype = config_.ragged_kv;
    cache.num_pages = 1;
    cache.page_size = plan_.max_tokens;
    cache.num_kv_heads = config_.num_kv_heads;
    cache.head_dim_qk = config_.head_dim_qk;
    cache.head_dim_v = config_.head_dim_v;
    const int64_t element = size_of(config_.ragged_kv), row = state_.fresh_row() / element;
    cache.k = piece(rank());
    cache.v = piece(rank()) + element * config_.num_kv_heads * config_.head_dim_qk;
    cache.k_strides = {plan_.max_tokens * row, row, config_.head_dim_qk};
    cache.v_strides = {plan_.max_tokens * row, row, config_.head_dim_v};
    return cache;
  }

  KvCacheView fresh_cache() const {
    KvCacheShape shape;
    shape.num_pages =
        state_.bounded() ? state_.max_fresh_pages(plan_.num_requests, plan_.max_tokens) : state_.fresh_pages;
    shape.page_size = kFreshPage;
    shape.num_kv_heads = config_.num_kv_heads;
    shape.head_dim_qk = config_.head_dim_qk;
    shape.head_dim_v = config_.head_dim_v;
    shape.dtype = config_.ragged_kv;
    std::byte* const keys = memory_ + layout_.fresh;
    return make_nhd_view(shape, keys, keys + k_elements(shape) * size_of(shape.dtype));
  }

  SegmentArgs fresh_segment() const {
    SegmentArgs segment;
    segment.cache = fresh_cache();
    segment.table = table_of(state_.fresh.indptr, state_.arrays.fresh_indptr, ints(state_.arrays.fresh_indices),
                             static_cast<int32_t>(state_.fresh.indices.size()));
    return segment;
  }

  void pack_fresh() {
    CacheWriteArgs write;
    write.k = args_.k;
    write.v = args_.v;
    write.slot_mapping = state_.image.at<int64_t>(state_.arrays.own_slots);
    write.num_slots = tokens();
    write.cache = own_piece();
    write_kv_cache(state_.context, write, stream_);
    if (state_.gpu() != nullptr) return;
    const PcpHeader mine = header();
    std::memcpy(piece(rank()) + plan_.max_tokens * state_.fresh_row(), &mine, sizeof(mine));
  }

  /// Brings all new tokens to pages in order of their positions, and checks that the ranks run the same.
  void gather_fresh() {
    state_.group->all_gather(piece(rank()), piece(0), piece_bytes(), stream_);
    if (state_.gpu() == nullptr) check_headers();
    CacheWriteArgs write;
    write.k = piece_tensor(0, config_.head_dim_qk);
    write.v = piece_tensor(int64_t{config_.num_kv_heads} * config_.head_dim_qk, config_.head_dim_v);
    write.slot_mapping = state_.image.at<int64_t>(state_.arrays.fresh_slots);
    write.num_slots = ssize(state_.fresh_slots.size());
    write.cache = fresh_cache();
    write_kv_cache(state_.context, write, stream_);
  }

  void check_headers() const {
    const PcpHeader mine = header();
    for (int32_t r = 0; r < state_.world(); ++r) {
      PcpHeader theirs;
      std::memcpy(&theirs, piece(r) + plan_.max_tokens * state_.fresh_row(), sizeof(theirs));
      check_header(mine, theirs, r);
    }
  }

  PcpHeader header() const {
    PcpHeader header;
    header.digest = plan_.digest;
    const float by_default = 1.0f / std::sqrt(static_cast<float>(config_.head_dim_qk));
    header.sm_scale = args_.sm_scale == 0.0f ? by_default : args_.sm_scale;
    header.logits_soft_cap = args_.logits_soft_cap;
    if (args_.alibi_slopes != nullptr) header.slopes = digest_of(args_.alibi_slopes, config_.num_q_heads);
    header.q_scale = digest_of(args_.q_scale);
    if (plan_.exchange != PcpExchange::kPassKv) return header;
    header.k_scale = digest_of(args_.k_scale);
    header.v_scale = digest_of(args_.v_scale);
    return header;
  }

  /// Of its values, one for every KV head, of every request where they differ.
  uint64_t digest_of(const Scale& scale) const {
    Digest digest;
    const int32_t requests = is_per_request(scale) ? plan_.num_requests : 1;
    for (int32_t i = 0; i < requests; ++i) {
      if (is_per_request(scale) && state_.q_len[static_cast<size_t>(i)] == 0) continue;  // it has no scale
      for (int32_t h = 0; h < config_.num_kv_heads; ++h) digest.add(std::bit_cast<uint32_t>(scale_of(scale, i, h)));
    }
    return digest.value();
  }
  static uint64_t digest_of(const float* values, int64_t count) {
    Digest digest;
    for (int64_t i = 0; i < count; ++i) digest.add(std::bit_cast<uint32_t>(values[i]));
    return digest.value();
  }

  void check_header(const PcpHeader& mine, const PcpHeader& theirs, int32_t r) const {
    const auto own = rank();
    core::require(theirs.digest == mine.digest, "rank ", r,
                  " of the group runs another batch or configuration than rank ", own);
    const auto require_same = [&](const char* name, bool same) {
      core::require(same, name, " of rank ", r, " of the group is not that of rank ", own, "; all ranks give the same");
    };
    require_same("sm_scale", theirs.sm_scale == mine.sm_scale);
    require_same("logits_soft_cap", theirs.logits_soft_cap == mine.logits_soft_cap);
    require_same("alibi_slopes", theirs.slopes == mine.slopes);
    require_same("q_scale", theirs.q_scale == mine.q_scale);
    require_same("k_scale", theirs.k_scale == mine.k_scale);
    require_same("v_scale", theirs.v_scale == mine.v_scale);
  }

  int32_t* table_memory() const { return reinterpret_cast<int32_t*>(memory_ + layout_.table); }

  /// The pages of older tokens, from the table that this layer is given: for every chunk of every rank (pass-Q), or for
  /// every request.
  void read_table() const {
    const std::vector<int32_t>& indptr = state_.table_indptr(plan_.exchange);
    if (const attention::GpuBackend* const gpu = state_.gpu()) {
      kernels::cuda::TableRowsParams params;
      params.table = args_.table;
      params.row = ints(state_.arrays.table_row);
      params.first_column = ints(state_.arrays.table_first);
      params.indptr = ints(state_.arrays.table_indptr);
      params.num_rows = static_cast<int32_t>(state_.table_row.size());
      params.out = table_memory();
      gpu->enqueue(params, stream_);
      return;
    }
    for (size_t n = 0; n < state_.table_row.size(); ++n) {
      const int32_t begin = indptr[n], pages = indptr[n + 1] - begin, first = state_.table_first[n];
      if (pages == 0) continue;
      const std::span<const int32_t> row = kvcache::row_pages(args_.table, state_.table_row[n], int64_t{first} + pages);
      std::copy(row.begin() + first, row.end(), table_memory() + begin);
    }
  }

  SegmentArgs shard_segment() const {
    SegmentArgs segment;
    segment.cache = args_.cache;
    segment.table = table_of(state_.shard.indptr, state_.arrays.table_indptr, table_memory(),
                             state_.bounded() ? state_.max_table_pages(plan_.num_requests) : 0);
    segment.k_scale = row_k_scale_;
    segment.v_scale = row_v_scale_;
    return segment;
  }

  /// The queries of all ranks, padded, into what is sent back.
  AttentionArgs shard_args(std::span<const SegmentArgs> segments) const {
    const int64_t rows = int64_t{state_.world()} * plan_.max_tokens;
    AttentionArgs args = common_args();
    args.q_scale = row_q_scale_;
    args.q = ConstTensorView(memory_ + layout_.queries, config_.q, {rows, config_.num_q_heads, config_.head_dim_qk});
    args.segments = segments;
    set_out(args, floats(layout_.sent), rows);
    return args;
  }

  size_t query_bytes() const {
    return static_cast<size_t>(int64_t{config_.num_q_heads} * config_.head_dim_qk * size_of(config_.q));
  }

  std::byte* own_queries() const {
    return memory_ + layout_.queries + rank() * plan_.max_tokens * ssize(query_bytes());
  }

  void pack_queries() const {
    if (const attention::GpuBackend* const gpu = state_.gpu()) {
      const int64_t element = size_of(config_.q);
      kernels::cuda::ArrangeParams params;
      params.from = static_cast<const std::byte*>(args_.q.data);
      params.token_stride = args_.q.strides[0] * element;
      params.head_stride = args_.q.strides[1] * element;
      params.to = own_queries();
      params.num_tokens = tokens();
      params.heads = config_.num_q_heads;
      params.row_bytes = config_.head_dim_qk * element;
      if (tokens() > 0) gpu->enqueue(params, stream_);
      return;
    }
    const auto head = static_cast<size_t>(int64_t{config_.head_dim_qk} * size_of(config_.q));
    const auto element = static_cast<size_t>(size_of(config_.q));
    const auto copy = [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        for (int64_t h = 0; h < config_.num_q_heads; ++h) {
          const auto from = static_cast<size_t>(t * args_.q.strides[0] + h * args_.q.strides[1]) * element;
          std::memcpy(own_queries() + t * ssize(query_bytes()) + h * ssize(head),
                      static_cast<const std::byte*>(args_.q.data) + from, head);
        }
      }
    };
    for_rows(state_.context, tokens(), int64_t{config_.num_q_heads} * config_.head_dim_qk, copy);
  }

  void pass_q() {
    const size_t bytes = static_cast<size_t>(plan_.max_tokens) * query_bytes();
    state_.group->all_gather(own_queries(), memory_ + layout_.queries, bytes, stream_);
    const SegmentArgs segment = shard_segment();
    folio::run(*plan_.older, shard_args({&segment, 1}), scratch(), stream_);
    const size_t partials = static_cast<size_t>(plan_.max_tokens * state_.partial_row()) * sizeof(float);
    state_.group->all_to_all(floats(layout_.sent), floats(layout_.states), partials, stream_);
  }

  /// Pass-KV: this rank's pages with older tokens, to its piece.
  void pack_older() {
    const int64_t own = int64_t{state_.older_indptr.back()} * config_.page_size;
    const TensorView k(older_piece(rank()), config_.kv, {own, config_.num_kv_heads, config_.head_dim_qk});
    const TensorView v(older_piece(rank()) + layout_.older_values, config_.kv,
                       {own, config_.num_kv_heads, config_.head_dim_v});
    gather_kv(state_.context, args_.cache, table_of(state_.older_indptr, state_.arrays.table_indptr, table_memory()),
              {ints(state_.arrays.older_len), state_.older_len.size()}, k, v, {}, {}, stream_);
  }

  std::span<const SegmentArgs> gathered_segments() const {
    KvCacheShape shape;
    shape.num_pages = state_.older_tokens / config_.page_size;
    shape.page_size = config_.page_size;
    shape.num_kv_heads = config_.num_kv_heads;
    shape.head_dim_qk = config_.head_dim_qk;
    shape.head_dim_v = config_.head_dim_v;
    shape.dtype = config_.kv;
    for (int32_t p = 0; p < state_.world(); ++p) {
      const ChunkKeys& keys = state_.gathered[static_cast<size_t>(p)];
      SegmentArgs& segment = state_.arguments[static_cast<size_t>(p)];
      segment.cache = make_nhd_view(shape, older_piece(p), older_piece(p) + layout_.older_values);
      const StepArrays::Table& table = state_.arrays.gathered[static_cast<size_t>(p)];
      segment.table = table_of(keys.indptr, table.indptr, ints(table.indices));
      segment.k_scale = row_k_scale_;
      segment.v_scale = row_v_scale_;
    }
    return state_.arguments;
  }

  void pass_kv() {
    state_.group->all_gather(older_piece(rank()), older_piece(0), layout_.older_piece, stream_);
    if (plan_.older) folio::run(*plan_.older, own_args(0, gathered_segments()), scratch(), stream_);
  }

  PcpState& state_;
  const AttentionConfig& config_;
  const PcpPlan& plan_;
  const PcpArgs& args_;
  const PcpLayout layout_;
  std::byte* memory_;
  Stream stream_;
  Scale own_q_scale_, row_q_scale_, row_k_scale_, row_v_scale_;  ///< for the rows of plans
};

}  // namespace

size_t PcpAttention::workspace_size(const PcpPlan& plan) const {
  return pcp_layout(*state_, plan).total;
}

size_t PcpAttention::workspace_size() const {
  core::require(state_->bounded(), "without a plan only PcpConfig::bounds says how much a step needs");
  return pcp_layout(*state_).total;
}

void PcpAttention::run(const PcpPlan& plan, const PcpArgs& args, Workspace workspace, Stream stream) {
  if (plan.max_tokens == 0) return;
  Run layer(*state_, plan, args, workspace, stream);
  layer.pack();
  layer.fresh_pass();
  layer.older_pass();
  layer.merge();
}

}  // namespace folio::inline v0::distributed
