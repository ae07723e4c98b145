#include "folio/backends/cascade_heuristic.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace folio::inline v0::backends {
namespace {

constexpr int32_t kMinPrefix = 256;
constexpr size_t kMinRequests = 8;
/// FlashAttention's default tile, both ways.
constexpr int64_t kTile = 128;

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace

bool use_cascade_attention(const CascadeHeuristicInput& input) {
  core::require(
      input.num_query_heads >= 1 && input.num_kv_heads >= 1 && input.num_sms >= 1 && input.dcp_world_size >= 1,
      "num_query_heads is ", input.num_query_heads, ", num_kv_heads ", input.num_kv_heads, ", num_sms ", input.num_sms,
      ", dcp_world_size ", input.dcp_world_size, "; all are 1 or more");
  if (input.common_prefix_len < kMinPrefix) return false;
  if (input.use_alibi || input.use_sliding_window || input.use_local_attention) return false;
  if (input.query_lens.size() < kMinRequests) return false;
  if (input.dcp_world_size > 1) return false;

  const int64_t group_size = input.num_query_heads / input.num_kv_heads;
  const bool all_single = std::ranges::all_of(input.query_lens, [](int32_t len) { return len == 1; });
  const bool would_divide_keys = group_size > 1 && all_single;
  if (!would_divide_keys) return true;

  const auto num_reqs = static_cast<int64_t>(input.query_lens.size());
  const int64_t prefix_tiles = ceil_div(input.common_prefix_len, kTile);
  const int64_t cascade_waves = ceil_div(input.num_query_heads * ceil_div(num_reqs, kTile), input.num_sms);
  const int64_t divided_tiles = num_reqs * input.num_kv_heads * ceil_div(group_size, kTile) * prefix_tiles;
  return cascade_waves * prefix_tiles < ceil_div(divided_tiles, input.num_sms);
}

}  // namespace folio::inline v0::backends
