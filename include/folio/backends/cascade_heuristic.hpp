#pragma once

#include <cstdint>
#include <span>

#include "folio/types/export.hpp"

namespace folio::inline v0::backends {

/// What vLLM's rule for shared prefixes looks at.
struct CascadeHeuristicInput {
  int32_t common_prefix_len = 0;        ///< tokens, cut already to whole pages that every request had computed
  std::span<const int32_t> query_lens;  ///< [R]
  int32_t num_query_heads = 0;          ///< >= 1
  int32_t num_kv_heads = 0;             ///< >= 1
  bool use_alibi = false;
  bool use_sliding_window = false;
  bool use_local_attention = false;
  int32_t num_sms = 0;  ///< SMs of the GPU, >= 1
  int32_t dcp_world_size = 1;
};

/// Whether vLLM (March 2026) would read a batch's shared prefix once for all requests. It does with a prefix of 256
/// tokens and 8 requests, without ALiBi, windows, local attention and context parallelism; always where any request
/// has several queries or every head has keys of its own; otherwise where its count of waves over the SMs,
/// in tiles of 128 by 128, is lower than that of dividing every request's keys. O(R). Pure; throws kInvalidArgument for
/// counts below 1.
FOLIO_API bool use_cascade_attention(const CascadeHeuristicInput& input);

}  // namespace folio::inline v0::backends
