#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "folio/types/dtype.hpp"
#include "folio/types/export.hpp"

namespace folio::inline v0::backends {

/// What the wrappers of a backend with two of them stand for: two groups of layers, which see different keys.
enum class WrapperDispatch : int32_t {
  kNone = 0,            ///< one wrapper, for every layer
  kSlidingWindow = 1,   ///< wrapper 0: layers with the window; wrapper 1: layers without
  kCrossAttention = 2,  ///< wrapper 0: self attention; wrapper 1: cross attention
};

/// What one group of layers reads in the present step; see TokenPoolBackend. Views on the context's device, valid until
/// the next step's metadata. R requests (rows of SpecInfo::kv_indptr where it is given). Over ranks the tokens are this
/// rank's, from the sequence's begin.
struct KvWrapper {
  int32_t window_left = -1;             ///< keys left of a query that it sees; -1 = all
  std::span<const int32_t> qo_indptr;   ///< [R + 1], tokens
  std::span<const int32_t> kv_indptr;   ///< [R + 1], entries of kv_indices
  std::span<const int32_t> kv_indices;  ///< slots, or pages where page_size is above 1
  /// [R], tokens of the last page: 1 to page_size; 1 where there are no pages, as FlashInfer's padding has it.
  std::span<const int32_t> kv_last_page_len;
  std::span<const int32_t> kv_lens;    ///< (host) [R], tokens behind kv_indices; empty: only the device knows
  std::span<const int32_t> kv_starts;  ///< (host) [R], position in the sequence of the first of them; likewise
  /// Tokens of an entry of kv_indices: the configuration's page_size; or 1, for self-attention behind encoders that do
  /// not end with a page, and in captured shapes behind any.
  int32_t page_size = 1;
};

/// A step of decodes.
struct DecodeMetadata {
  std::span<const KvWrapper> decode_wrappers;
};

/// A step of extends, or of drafts that are verified.
struct PrefillMetadata {
  std::span<const KvWrapper> prefill_wrappers;
  /// The new tokens' keys are read from k and v, those before from the cache (kv_indices has only these). Otherwise all
  /// are read from the cache.
  bool use_ragged = false;
  bool extend_no_prefix = false;  ///< nothing was cached before
};

/// Whether FlashInfer would decode on tensor cores: pymllm's rule, for engines that ask. What Folio's kernels run on is
/// their own affair.
/// - forced: what pymllm reads from PYMLLM_FLASHINFER_USE_TENSOR_CORE.
/// - fp8 caches: true. 16-bit ones: from num_attention_heads / num_kv_heads >= 4 on, rounded down (28 / 8 is 3: false).
///   Others: false.
/// Throws kInvalidArgument for head counts below 1.
FOLIO_API bool should_use_tensor_core(DType kv_cache_dtype, int32_t num_attention_heads, int32_t num_kv_heads,
                                      std::optional<bool> forced = std::nullopt);

}  // namespace folio::inline v0::backends
