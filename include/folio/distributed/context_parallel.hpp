#pragma once

#include <cstdint>
#include <span>

#include "folio/types/export.hpp"

namespace folio::inline v0::distributed {

/// Decode context parallelism: `world` ranks hold the KV of every request together, token p on rank
/// (p / interleave) % world (KvShard). Slots of new tokens: slot_mapping in folio/page_table.hpp, with the shard.

/// Each length's tokens on one rank: local[i] = count of p < seq_lens[i] on `rank`. Both are [R]; `local` may be
/// `seq_lens`. O(R). Throws kInvalidArgument for negative lengths, other sizes, and a world, rank or interleave that
/// cannot be.
FOLIO_API void get_dcp_local_seq_lens(std::span<const int32_t> seq_lens, int32_t world, int32_t rank,
                                      int32_t interleave, std::span<int32_t> local);

/// On all ranks: local[i * world + r], [R, world]. A row sums to its length.
FOLIO_API void get_dcp_local_seq_lens(std::span<const int32_t> seq_lens, int32_t world, int32_t interleave,
                                      std::span<int32_t> local);

/// ceil(max_len / (world * interleave)) * interleave: no rank holds more tokens of a request of at most `max_len`.
/// Throws kInvalidArgument as above, and where it leaves 32 bits.
FOLIO_API int32_t max_dcp_context_len(int32_t max_len, int32_t world, int32_t interleave);

}  // namespace folio::inline v0::distributed
