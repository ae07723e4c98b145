#pragma once

#include <cstdint>
#include <span>

#include "folio/types/device.hpp"
#include "folio/types/export.hpp"
#include "folio/types/kv_cache.hpp"

namespace folio::inline v0::backends {

/// An engine's dense table: row i holds request i's page ids in order; entries beyond its pages are never read.
struct BlockTableView {
  const int32_t* data = nullptr;
  int32_t num_rows = 0;
  int32_t num_columns = 0;  ///< entries of a row that are the row's own
  int64_t row_stride = 0;   ///< entries from a row to the next, >= num_columns
};

/// The first `num_rows` rows as the core takes them. Nothing is copied.
FOLIO_API PageTableView to_page_table(const BlockTableView& table, int32_t num_rows);

/// Tokens [begin, end) of a request that see each other whatever their order: those of an image in a prompt.
struct BidirectionalRange {
  int32_t request = 0;
  int32_t begin = 0;
  int32_t end = 0;
};

/// Entries [begin, end] of query_start_loc less the first of them: the starts of a slice of requests in its own tokens.
/// `start_loc` has end - begin + 1 entries. Throws kInvalidArgument for ranges and sizes that do not fit.
FOLIO_API void slice_query_start_locs(std::span<const int32_t> query_start_loc, int32_t begin, int32_t end,
                                      std::span<int32_t> start_loc);

/// One step's batch as the engine's runner describes it; every backend's builder makes its own metadata of it. Request
/// i has the query tokens [query_start_loc[i], query_start_loc[i + 1]) and, these included, seq_lens[i] tokens of KV.
/// Everything is borrowed and only read: the arrays must outlive the metadata built from them. R = num_reqs, T =
/// num_actual_tokens.
///
/// For builders on a GPU the arrays lie there (kDevice), and query_start_loc_host and seq_lens_host (for cross
/// attention encoder_seq_lens_host) hold the same values, which the steps are planned from; so does block_table_host
/// where pages are looked at.
struct CommonAttentionMetadata {
  Where where = Where::kHost;                ///< of the arrays
  std::span<const int32_t> query_start_loc;  ///< [R + 1], from 0, non-decreasing
  std::span<const int32_t> seq_lens;         ///< [R]
  int32_t num_reqs = 0;
  int32_t num_actual_tokens = 0;  ///< rows of the queries to compute; beyond query_start_loc[R] they are padding
  int32_t max_query_len = 0;      ///< the longest query
  int32_t max_seq_len = 0;        ///< an upper bound of seq_lens
  BlockTableView block_table;     ///< [>= R, columns]
  std::span<const int64_t> slot_mapping;  ///< [<= T]: the slot each new token's K and V go to; negative = nowhere
  bool causal = true;
  /// [R], 1 for requests that are causal; empty: `causal` for all. For batches that mix both.
  std::span<const uint8_t> causal_per_request;

  std::span<const int32_t> query_start_loc_host;  ///< [R + 1], copies for planning where the arrays lie on a device
  std::span<const int32_t> seq_lens_host;         ///< [R], likewise
  BlockTableView block_table_host;  ///< likewise, where what requests share is to be found in it (CascadeMode::kAuto)
  /// [R], on the host: no less than seq_lens, and equal to it for requests whose prompt is being computed. For planning
  /// ahead of drafts that may yet be rejected: what is known where seq_lens_host is empty, of builders that plan from
  /// device lengths. Checked against seq_lens where those are known.
  std::span<const int32_t> seq_lens_host_upper_bound;
  /// [R], on the host: this rank's share of seq_lens under decode context parallelism.
  std::span<const int32_t> dcp_local_seq_lens;
  std::span<const int32_t> encoder_seq_lens;       ///< [R], cross attention only
  std::span<const int32_t> encoder_seq_lens_host;  ///< [R], a copy as those above
  std::span<const int32_t> logits_indices_padded;  ///< tokens whose logits are wanted, for layers that skip the others
  int32_t num_logits_indices = 0;                  ///< of those, how many are not padding
  /// [T], global positions of the new tokens. Attention's follow from the lengths: of decoders' batches on the host
  /// each request's first and last must be those; on a device they are not read.
  std::span<const int64_t> positions;
  /// [R], on the host: 1 while a request's prompt is being computed, else 0. Steps planned from device lengths do not
  /// look at it.
  std::span<const uint8_t> is_prefilling;
  std::span<const BidirectionalRange> mm_req_doc_ranges;  ///< ascending by request

  /// Requests of the batch, padding included.
  int32_t batch_size() const noexcept { return num_reqs; }
  /// Tokens of new keys that request i brings.
  int32_t query_len(int32_t i) const { return query_start_loc[i + 1] - query_start_loc[i]; }
  /// Tokens of request i whose KV is in the cache already.
  int32_t num_computed_tokens(int32_t i) const { return seq_lens[i] - query_len(i); }
  /// The first requests and tokens only, without what pads a batch for graphs. The maxima stay as they are.
  /// Throws kInvalidArgument for more than there are.
  FOLIO_API CommonAttentionMetadata unpadded(int32_t num_tokens, int32_t num_requests) const;
  /// Requests [begin, end) and their tokens, as a batch of its own: its query_start_loc, which begins with 0, is
  /// written to `start_loc` (end - begin + 1 entries, which must outlive the result). max_query_len and max_seq_len are
  /// those of the slice. Padded tokens belong to the last request. Throws kInvalidArgument for a range that is not in
  /// the batch or another size of start_loc; kUnsupported for arrays on a device and for logits_indices_padded, whose
  /// entries would be others.
  FOLIO_API CommonAttentionMetadata slice(int32_t begin, int32_t end, std::span<int32_t> start_loc) const;
};

}  // namespace folio::inline v0::backends
