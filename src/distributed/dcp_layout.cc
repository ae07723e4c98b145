#include <algorithm>
#include <optional>

#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "distributed/dcp_state.hpp"

namespace folio::inline v0::distributed {
namespace {

constexpr size_t kPieceAlignment = 256;

/// Lays out pieces one after the other.
class Pieces {
 public:
  size_t take(size_t bytes) {
    const size_t begin = total_;
    total_ = core::checked_add(total_, core::checked_round_up(bytes, kPieceAlignment));
    return begin;
  }
  size_t take(int64_t a, int64_t b, int64_t c, int64_t element_bytes) {
    return take(static_cast<size_t>(core::checked_mul(a, b, c, element_bytes)));
  }
  size_t total() const { return total_; }

 private:
  size_t total_ = 0;
};

}  // namespace

void DcpDeviceMemory::reserve(const attention::GpuBackend& gpu, int32_t num_requests, int32_t world) {
  if (num_requests <= max_requests) return;
  max_requests = std::max(num_requests, static_cast<int32_t>(std::min<int64_t>(int64_t{max_requests} * 2, INT32_MAX)));
  Pieces pieces;
  const int64_t requests = max_requests;
  const size_t of_headers = pieces.take(world, 1, 1, sizeof(kernels::cuda::GatherHeader));
  const size_t of_indptr = pieces.take(requests + 1, 1, 1, sizeof(int32_t));
  const size_t of_first_pos = pieces.take(requests, 1, 1, sizeof(int32_t));
  const size_t of_cached_len = pieces.take(requests, 1, 1, sizeof(int32_t));
  const size_t of_fresh_len = pieces.take(requests, 1, 1, sizeof(int32_t));
  memory = gpu.allocate(pieces.total());
  auto* const begin = static_cast<std::byte*>(memory.get());
  headers = reinterpret_cast<kernels::cuda::GatherHeader*>(begin + of_headers);
  indptr = reinterpret_cast<int32_t*>(begin + of_indptr);
  first_pos = reinterpret_cast<int32_t*>(begin + of_first_pos);
  cached_len = reinterpret_cast<int32_t*>(begin + of_cached_len);
  fresh_len = reinterpret_cast<int32_t*>(begin + of_fresh_len);
}

namespace {

/// Workspaces of the passes that a plan has.
struct PassBytes {
  std::optional<size_t> cached;
  std::optional<size_t> fresh;
  bool over_peers = false;
};

RunLayout layout_of(const DcpState& state, int64_t tokens, const PassBytes& passes) {
  const AttentionConfig& config = state.config.attention;
  const int64_t heads = state.heads(), all_heads = state.all_heads(), out_heads = state.out_heads();
  const int64_t float_bytes = sizeof(float), q_bytes = size_of(config.q);
  RunLayout layout;
  Pieces pieces;
  if (passes.cached) {
    Pieces piece;
    piece.take(sizeof(kernels::cuda::GatherHeader));
    layout.slopes_in_piece = piece.take(heads, 1, 1, config.features.has(Feature::kAlibi) ? float_bytes : 0);
    layout.queries_in_piece = piece.take(tokens, heads, config.head_dim_qk, q_bytes);
    layout.piece = piece.total();
    if (state.gathers() && !passes.over_peers) {
      layout.send = pieces.take(layout.piece);
      layout.gathered = pieces.take(core::checked_mul(layout.piece, static_cast<size_t>(state.group->size())));
    }
    if (!state.queries_are_in_order() && !(state.gathers() && passes.over_peers)) {
      layout.queries = pieces.take(tokens, all_heads, config.head_dim_qk, q_bytes);
      layout.slopes = pieces.take(all_heads, 1, 1, float_bytes);
    }
    layout.partial = pieces.take(tokens, all_heads, config.head_dim_v, size_of(state.partial_dtype()));
    layout.partial_lse = pieces.take(tokens, all_heads, 1, float_bytes);
    if (state.group->size() > 1 && !passes.over_peers) {
      layout.combined = pieces.take(tokens, out_heads, config.head_dim_v, float_bytes);
      layout.combined_lse = pieces.take(tokens, out_heads, 1, float_bytes);
      layout.combine_bytes = combine_workspace_size(state.group->size(), tokens, state.all_heads(), config.head_dim_v);
      layout.combine = pieces.take(layout.combine_bytes);
    } else {
      layout.combined = layout.partial;
      layout.combined_lse = layout.partial_lse;
    }
    layout.attention_bytes = *passes.cached;
  }
  if (passes.fresh) {
    layout.fresh = pieces.take(tokens, out_heads, config.head_dim_v, float_bytes);
    layout.fresh_lse = pieces.take(tokens, out_heads, 1, float_bytes);
    layout.attention_bytes = std::max(layout.attention_bytes, *passes.fresh);
  }
  layout.attention = pieces.take(layout.attention_bytes);
  layout.total = pieces.total();
  return layout;
}

}  // namespace

RunLayout run_layout(const DcpState& state, const DcpPlan& plan) {
  PassBytes passes;
  if (plan.cached) passes.cached = folio::workspace_size(*plan.cached);
  if (plan.fresh) passes.fresh = folio::workspace_size(*plan.fresh);
  passes.over_peers = plan.over_peer_memory;
  return layout_of(state, plan.num_tokens, passes);
}

RunLayout largest_run_layout(const DcpState& state) {
  core::require(state.config.bounds.has_value(), "without DcpConfig::bounds a workspace is a plan's");
  const int32_t tokens = state.config.bounds->max_tokens;
  const bool over_peers = state.peers.memory != nullptr && state.peers.tokens >= tokens;  // needs less than without
  return layout_of(state, tokens,
                   {folio::workspace_size(state.cached_op), folio::workspace_size(state.fresh_op), over_peers});
}

}  // namespace folio::inline v0::distributed
