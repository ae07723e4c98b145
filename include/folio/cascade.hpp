#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "folio/attention.hpp"

namespace folio::inline v0 {

/// Most levels of shared prefixes that a cascade may have.
inline constexpr int32_t kMaxCascadeLevels = 8;

/// What the choice of shared prefixes is weighed with: bytes of memory traffic for one KV head, and the tile that
/// decides how often keys are read. They follow from config and kernel alone, so equal batches get equal cascades on
/// every machine. A packed row is a (query token, head of a group) pair.
///
/// A request of q tokens reads its keys ceil(q * group_size / tile_rows) times. A shared prefix that n requests read
/// together is read ceil(their packed rows / tile_rows) times, over whole tiles of tile_tokens. In return every packed
/// row reads its query once more (q_row_bytes), and what it computed there is one more partial result, written once and
/// read once when results are combined (2 * partial_row_bytes); a row that had no shared prefix so far wrote its output
/// directly, so the rest of its keys becomes a second one.
struct CascadeCosts {
  int32_t tile_rows = 0;          ///< most packed rows that read keys together; >= 1
  int32_t tile_tokens = 0;        ///< keys that are visited at a time; >= 1
  int32_t group_size = 0;         ///< q heads of a KV head; >= 1
  int32_t page_size = 0;          ///< >= 1
  int32_t window_left = -1;       ///< keys further left of a query are not read; -1 = all are
  int64_t kv_token_bytes = 0;     ///< K and V of one token; >= 1
  int64_t q_row_bytes = 0;        ///< a packed row's query
  int64_t partial_row_bytes = 0;  ///< a packed row's partial result: float32 values, maximum and sum
  Determinism determinism = Determinism::kRunToRun;
};

/// The costs of an op's kernel.
FOLIO_API CascadeCosts cascade_costs(const AttentionOp& op);

/// One step's batch: every request's own table holds all its pages. Host memory, but for `device_indices`.
struct CascadeBatch {
  int32_t num_requests = 0;
  const int32_t* cu_q = nullptr;    ///< [R + 1]
  const int32_t* kv_len = nullptr;  ///< [R], the new tokens included
  PageTableView table;              ///< [>= R] rows
  /// table.indices once more, in the memory of the GPU that the planner's op runs on. Null for others. A dense table
  /// may lie there alone (table.indices is the same address) for `share`, which then takes the caller's word for its
  /// pages.
  const int32_t* device_indices = nullptr;
};

/// A batch's keys as segments: any number of shared ones, outermost first, then the rest of each request's own. Segment
/// s of the plan reads by tables[s], views into the memory of the batch's own table; nothing is copied. Spans point
/// into the planner and are valid until its next call.
struct Cascade {
  std::span<const KvSegment> segments;    ///< for BatchView::segments; at least one
  std::span<const PageTableView> tables;  ///< for SegmentArgs::table; as many. Where the op's kernels read them
  int64_t bytes_saved = 0;    ///< what `discover` expects by its costs, over one KV head; `share` does not ask: 0
  int32_t levels_shared = 0;  ///< segments that share something, the first; others in front of the last have no keys
  int32_t num_levels() const { return levels_shared; }
};

/// Turns one batch's page tables into a cascade. Keeps its memory from call to call and allocates nothing once it has
/// seen the largest batch. Not safe for simultaneous use by several threads.
///
/// Results differ from those without a cascade only by the order of float32 sums: masks, windows, ALiBi, caps, sinks
/// and scales mean the same, since positions are global. But which prefixes are shared depends on the other requests of
/// the batch, so at Determinism::kBatchInvariant and above nothing is ever shared: `cascade` then has one segment. At
/// kRunToRun equal batches give equal cascades.
///
/// Of an op on a GPU, tables are looked at on the host and read by kernels in the GPU's memory: the batch has both, and
/// where rows begin is enqueued on `stream`; the cascade holds until the next call whose stream is behind. With
/// GraphBounds every cascade then has max_levels() + 1 segments, at kBatchInvariant and above one, and tables at
/// addresses that stay: a graph captured with one is replayed with all.
class FOLIO_API CascadePlanner {
 public:
  /// `max_levels` in [0, kMaxCascadeLevels]; of an op with GraphBounds at most its max_shared_levels are used, on a GPU
  /// at most 7. Throws kInvalidArgument.
  explicit CascadePlanner(const AttentionOp& op, int32_t max_levels = 4);
  /// Throws kInvalidArgument for costs out of range. `discover` throws it where they and the batch overflow 64 bits.
  explicit CascadePlanner(const CascadeCosts& costs, int32_t max_levels = 4);
  CascadePlanner(CascadePlanner&&) noexcept;
  CascadePlanner& operator=(CascadePlanner&&) noexcept;
  ~CascadePlanner();

  /// Finds the prefixes that neighbouring requests share and takes those that save more bytes than they cost: of all
  /// choices with at most max_levels levels the best one. Only full pages whose tokens every sharer had computed before
  /// this step are shared.
  ///
  /// O(R + shared table entries), and for each shared prefix O(levels * prefixes around it), of which at most 16 are
  /// weighed; with a window times the requests that share it. A table whose rows are all one (row_stride 0), or with
  /// more than 2^31 - 1 entries, is left as it is: one segment; where graphs ask for more, it is refused. Throws
  /// kInvalidArgument naming the request for lengths that contradict each other and pages that do not lie in the table.
  const Cascade& discover(const CascadeBatch& batch, Stream stream = {});

  /// One level, shared by all requests: the first `prefix_tokens` tokens, cut to full pages that all had computed
  /// before this step. Whether it pays is not asked, but there must be two to share it. Requests without query tokens
  /// do not count. Throws kInvalidArgument as `discover`, and where a request's pages are not those of the others: O(R
  /// + R * pages). Nothing is shared for a prefix of 0.
  const Cascade& share(const CascadeBatch& batch, int32_t prefix_tokens, Stream stream = {});

  const CascadeCosts& costs() const noexcept;
  int32_t max_levels() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace folio::inline v0
