#pragma once

#include <cstdint>
#include <span>

namespace folio::inline v0::backends::token_pool {

/// Whether reading new tokens' keys from k and v, and cached ones from the cache, costs less than reading all from the
/// cache. cu_q: [R + 1]; prefix_lens: [R]. O(R).
bool ragged_costs_less(std::span<const int32_t> cu_q, std::span<const int32_t> prefix_lens);

}  // namespace folio::inline v0::backends::token_pool
