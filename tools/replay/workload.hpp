#pragma once

#include <cstdint>
#include <vector>

#include "replay/trace.hpp"

namespace folio::replay {

/// A request as it is replayed: lengths scaled, arrivals from 0.
struct Request {
  double arrival_ms = 0.0;
  int32_t input_length = 0;   ///< prompt tokens, at least 1
  int32_t output_length = 0;  ///< generated tokens, at least 1
  int64_t line = 0;           ///< in the trace file
  std::vector<uint64_t> hash_ids;

  /// Tokens whose KV is ever computed: the last generated token is never fed back.
  int32_t computed_length() const { return input_length + output_length - 1; }
};

/// The requests of a replay, in order of arrival. A request's index is its identity: queries and generated tokens
/// depend on it.
struct Workload {
  std::vector<Request> requests;
  int32_t tokens_per_hash = 0;  ///< scaled tokens that one hash id stands for; 0 if the trace has none

  int64_t input_tokens() const;
  int64_t output_tokens() const;
  int64_t computed_tokens() const;  ///< all computed_length()
  int32_t longest() const;          ///< the largest computed_length()
  /// Pages that hold every request's tokens at once, without sharing: a pool of this size never evicts.
  int64_t pages_for_all(int32_t page_size) const;
};

/// Divides all lengths by `scale` (rounded up, at least 1), sorts by arrival (the file's order among equals), and keeps
/// the first `max_requests` (0 = all). With hash ids `scale` must divide 512, so that equal hashes stay equal runs of
/// whole tokens. Throws folio::Error(kInvalidArgument).
Workload make_workload(const Trace& trace, int32_t scale, int64_t max_requests);

/// Brings arrivals nearer together or further apart, so that so many requests a second arrive on average from the first
/// to the last; infinity: all at 0. Throws folio::Error(kInvalidArgument) for a rate that is not above 0, and for a
/// finite one where all requests arrive at once.
void set_request_rate(Workload& workload, double per_second);

/// One 64-bit value a position for all computed_length() tokens of request `index`, such that chain[p] of two requests
/// are equal exactly when their tokens 0..p are (up to 64-bit collisions). A prompt token under a hash id is that id
/// and its offset; other prompt tokens and all generated tokens are the request's own.
std::vector<uint64_t> token_chain(const Workload& workload, int32_t index);

/// Prefix hits by hash id alone, requests served one after the other with unlimited memory.
struct BlockHits {
  int64_t input_tokens = 0;
  int64_t full_blocks = 0;   ///< hit tokens, whole hash blocks only
  int64_t with_partial = 0;  ///< hit tokens, counting a partly filled last block whose hash was seen too
};
BlockHits count_block_hits(const Trace& trace, int64_t max_requests);

}  // namespace folio::replay
