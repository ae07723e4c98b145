#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "folio/types/export.hpp"

namespace folio::inline v0::backends {

/// The largest batch that vLLM captures by default: twice the most requests, each of `tokens_per_decode` tokens, and at
/// most `limit` (512; 1024 on data-centre Blackwell). Throws kInvalidArgument for values below 1.
FOLIO_API int32_t default_max_capture_size(int32_t max_num_seqs, int32_t tokens_per_decode = 1, int32_t limit = 512);

/// The batch sizes that vLLM captures by default, ascending: 1, 2, 4, then every 8th below 256, then every 16th; none
/// above `max_capture_size`. Throws kInvalidArgument for a size below 1.
FOLIO_API std::vector<int32_t> default_capture_sizes(int32_t max_capture_size);

/// Which captured size a batch is padded to, in O(1).
class FOLIO_API GraphPadding {
 public:
  /// `capture_sizes`: ascending, from 1 on, at least one; throws kInvalidArgument otherwise. O(largest size) memory.
  explicit GraphPadding(std::span<const int32_t> capture_sizes);

  /// The smallest captured size >= num_tokens; 0 for 0. Throws kInvalidArgument for more than the largest.
  int32_t pad_for_cudagraph(int32_t num_tokens) const;
  int32_t max_capture_size() const noexcept { return static_cast<int32_t>(padded_.size()) - 1; }

 private:
  std::vector<int32_t> padded_;  ///< by number of tokens
};

/// Integers of a schedule for up to `num_reqs` requests as FlashAttention 3 lays it out: a counter of tiles, then four
/// values for each request, requests rounded up to a multiple of four. Throws kInvalidArgument for negative numbers and
/// for sizes beyond 32 bits.
FOLIO_API int32_t fa3_scheduler_metadata_size(int32_t num_reqs);

/// What stands in the rows of padding requests in a captured batch.
struct GraphPadValues {
  int32_t seq_len = 0;
  int32_t page_id = -1;
  friend bool operator==(const GraphPadValues&, const GraphPadValues&) = default;
};

/// The values that suit every builder of a model: the largest of each.
FOLIO_API GraphPadValues consolidate_pad_values(std::span<const GraphPadValues> builders) noexcept;

/// Sets the lengths of the requests from num_reqs on to the padding's. Throws kInvalidArgument for more requests than
/// lengths.
FOLIO_API void pad_seq_lens(std::span<int32_t> seq_lens, int32_t num_reqs, const GraphPadValues& values);

}  // namespace folio::inline v0::backends
