#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "folio/types/export.hpp"

namespace folio::inline v0::distributed {

/// Prefill context parallelism: `world` ranks divide the new tokens of every request. A request's q_len new tokens are
/// cut into 2 * world chunks of q_len / (2 * world) tokens, the first q_len % (2 * world) of them one token longer.
/// Chunks c and 2 * world - 1 - c belong together (zig-zag): a query sees all earlier keys, so that every pair has the
/// same work. Request i's pair s belongs to the rank r with (r + i) % world == s, so that the longer pairs of several
/// requests, decodes' single tokens among them, fall to different ranks.
///
/// A rank holds its tokens request by request, in ascending positions. No rank has more than ceil(q_len / world) tokens
/// of a request, nor two more than another. Functions of a batch take cu_q [R + 1], non-decreasing, cu_q[0] == 0, of
/// the undivided batch. They throw kInvalidArgument for others, for sizes that do not fit, and for a world or rank that
/// cannot be.

/// Neighbouring new tokens of a request, counted from its first one.
struct PcpChunk {
  int32_t begin = 0;
  int32_t end = 0;
  int32_t size() const { return end - begin; }
  friend bool operator==(const PcpChunk&, const PcpChunk&) = default;
};

/// A rank's two chunks of a request, the earlier one first. Either may be empty. O(1).
FOLIO_API std::array<PcpChunk, 2> pcp_chunks(int32_t q_len, int32_t request, int32_t world, int32_t rank);

/// A rank's batch: local_cu_q [R + 1], its tokens of each request. O(R).
FOLIO_API void pcp_local_cu_q(std::span<const int32_t> cu_q, int32_t world, int32_t rank,
                              std::span<int32_t> local_cu_q);

/// The most tokens that any rank has. O(R * world).
FOLIO_API int32_t max_pcp_tokens(std::span<const int32_t> cu_q, int32_t world);

/// Which tokens of the batch a rank has: its token j is the batch's token tokens[j]. `tokens` has as many entries as
/// the rank has tokens. O(entries + R).
FOLIO_API void pcp_tokens(std::span<const int32_t> cu_q, int32_t world, int32_t rank, std::span<int32_t> tokens);

/// The inverse, over all ranks: where rank r's token j is row r * rows_per_rank + j, as after an all-gather of pieces
/// of rows_per_rank >= max_pcp_tokens rows, token t of the batch is row rows[t]. `rows` is [cu_q[R]]. O(T + R * world).
FOLIO_API void pcp_token_rows(std::span<const int32_t> cu_q, int32_t world, int32_t rows_per_rank,
                              std::span<int32_t> rows);

}  // namespace folio::inline v0::distributed
