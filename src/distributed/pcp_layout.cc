// How much memory a step of divided queries takes, and the parts of a run's workspace.
#include <algorithm>

#include "attention/run_args.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "distributed/pcp_state.hpp"
#include "folio/distributed/context_parallel.hpp"
#include "folio/page_table.hpp"

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

size_t PcpAttention::workspace_size(const PcpPlan& plan) const {
  return pcp_layout(*state_, plan).total;
}

size_t PcpAttention::workspace_size() const {
  core::require(state_->bounded(), "without a plan only PcpConfig::bounds says how much a step needs");
  return pcp_layout(*state_).total;
}

}  // namespace folio::inline v0::distributed
