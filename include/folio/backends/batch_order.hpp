#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "folio/backends/attention_metadata.hpp"
#include "folio/types/export.hpp"

namespace folio::inline v0::backends {

/// How an ordered batch divides: decodes stand in front, prefills behind them.
struct BatchSplit {
  int32_t num_decodes = 0;
  int32_t num_prefills = 0;
  int32_t num_decode_tokens = 0;
  int32_t num_prefill_tokens = 0;
  friend bool operator==(const BatchSplit&, const BatchSplit&) = default;
};

/// Divides an ordered batch at its first request of more than `decode_threshold` query tokens. With `require_uniform`,
/// all decodes have the first request's query length (or 0: padding), and requests of another length count as prefills.
/// Padded tokens belong to the last section. Trusts max_query_len. O(R). Throws kInvalidArgument where a uniform
/// batch's tokens are not padded to its requests.
FOLIO_API BatchSplit split_decodes_and_prefills(const CommonAttentionMetadata& batch, int32_t decode_threshold = 1,
                                                bool require_uniform = false);

/// As BatchSplit, with the requests of many tokens divided into those that have KV already (extends, in front) and
/// those that have none (prefills, behind).
struct ExtendSplit {
  int32_t num_decodes = 0;
  int32_t num_extends = 0;
  int32_t num_prefills = 0;
  int32_t num_decode_tokens = 0;
  int32_t num_extend_tokens = 0;
  int32_t num_prefill_tokens = 0;
  friend bool operator==(const ExtendSplit&, const ExtendSplit&) = default;
};

/// Divides a batch in the order decodes, extends, prefills. O(R).
FOLIO_API ExtendSplit split_decodes_prefills_and_extends(const CommonAttentionMetadata& batch,
                                                         int32_t decode_threshold = 1);

/// Exchanges two requests of the engine's batch: all their states.
using SwapStates = std::function<void(int32_t, int32_t)>;

/// Brings a batch into the order decodes, extends, prefills by swapping as few requests as needed; requests that stand
/// in the right section stay where they are. A request without computed tokens is a prefill, even one of a single
/// token; of the others, those with at most `decode_threshold` scheduled tokens are decodes, the rest extends. Both
/// spans are [R] and describe the batch before the call. True if anything was swapped. O(R log R). Throws
/// kInvalidArgument for spans of different lengths.
FOLIO_API bool reorder_batch_to_split_decodes_and_prefills(std::span<const int32_t> num_scheduled_tokens,
                                                           std::span<const int32_t> num_computed_tokens,
                                                           int32_t decode_threshold, const SwapStates& swap_states);

/// What vLLM's reorder of July 2025 did and what its `build` expects to find.
struct SingleTokenReorder {
  bool modified = false;
  BatchSplit split;
};

/// That reorder: requests of exactly one scheduled token are decodes, all others prefills; the last decodes trade
/// places with the first prefills until the decodes are in front. O(R).
FOLIO_API SingleTokenReorder reorder_batch_single_token_decodes(std::span<const int32_t> num_scheduled_tokens,
                                                                const SwapStates& swap_states);

}  // namespace folio::inline v0::backends
