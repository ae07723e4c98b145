#pragma once

#include <cstdint>

#include "folio/types/attention.hpp"
#include "folio/types/kv_cache.hpp"

namespace folio::inline v0::scheduler {

/// How a kernel's workers get their work tiles: CUTLASS's static and dynamic persistent tile schedulers.
enum class Schedule : int32_t {
  kStatic = 0,   ///< one list per worker, all of about the same cost
  kDynamic = 1,  ///< one list for all: a free worker claims the next work tile (PlanView::num_dynamic_tiles)
};

/// The order in which a dynamic schedule's row tiles are claimed.
enum class TileOrder : int32_t {
  kRequestOrder = 0,  ///< in request order: for kernels whose output tiles split cheaply
  kLpt = 1,           ///< longest-processing-time first (dynamic_scheduler.hpp): for row tiles that are costly to split
};

/// The tile a kernel works in: published by the kernel, read by the scheduler.
struct TileShape {
  int32_t rows = 0;       ///< most packed rows (query tokens x heads of a group) of a work tile
  int32_t kv_tokens = 0;  ///< tokens of a KV tile; splits begin at multiples, from local token 0
  Schedule schedule = Schedule::kStatic;
  TileOrder order = TileOrder::kRequestOrder;  ///< Schedule::kDynamic only
};

/// One segment's lengths as a plan keeps them. Rows are requests, or groups of requests for a shared segment.
struct SegmentLengths {
  KvSource source;
  SegmentMask mask;
  KvShard shard;
  bool shared;  ///< rows are groups
  int32_t num_rows;
  const int32_t* kv_len;          ///< [num_rows], local tokens
  const int32_t* first_pos;       ///< [num_rows], never null
  const int32_t* row_of_request;  ///< [R], the request's row or -1; null when rows are requests
  const int32_t* key_offset;      ///< [R] keys in earlier segments: column base in a custom mask; or null
};

/// What a worker does at a work tile, besides accumulating its keys. In a dynamic schedule every KV split has both
/// kStart and kFinish. Only an output tile that is not split takes several work tiles there: one per segment, or one
/// per fixed split.
enum WorkTileFlags : uint32_t {
  kStart = 1u << 0,   ///< a new accumulation begins: the running state is empty
  kFinish = 1u << 1,  ///< the accumulation ends: write the output (partial < 0) or the state (partial >= 0)
  kFold = 1u << 2,    ///< fixed splits: accumulate this work tile on its own, then fold it into the running state
};

/// One unit of work: some packed rows against a range of one segment's keys, for one KV head. Packed row r = token *
/// group_size + g is query token r / group_size (counted over the whole batch) and q head kv_head * group_size + g. A
/// static worker runs its list in order. A dynamic worker runs the work tile it claimed and its continuations, along
/// `partial`. From kStart to kFinish, rows and kv_head are equal.
struct WorkTile {
  int32_t segment;
  int32_t kv_row;  ///< row of the segment: index of kv_len, of the page table, of the ragged indptr
  int32_t kv_head;
  int32_t request;    ///< the request of the first row; later rows of a shared work tile may belong to later requests
  int32_t row_begin;  ///< packed rows [row_begin, row_end), at most TileShape::rows
  int32_t row_end;
  /// Local tokens [kv_begin, kv_end). Boundaries between work tiles are multiples of TileShape::kv_tokens. The range
  /// goes from the first to the last position that any row sees; tokens in it may be visible to no row. At
  /// kBatchInvariant and above kv_begin is rounded down to such a multiple: the memory of up to kv_tokens - 1 tokens
  /// before may hold anything. An empty range means that no key is visible; then segment is 0 and kv_row is not used.
  int32_t kv_begin;
  int32_t kv_end;
  /// With kFinish: the first of row_end - row_begin partial rows, or -1 to write the output. Without kFinish: in a
  /// dynamic schedule the index of the continuation, the work tile that follows; else -1, and the next of the
  /// worker's list follows.
  int32_t partial;
  uint32_t flags;  ///< WorkTileFlags
  /// Static schedule without shared segments, kFinish and partial >= 0: the combine tile that takes all rows of this
  /// result. No other combine tile takes any, so the worker that finishes the last source can combine. Below
  /// num_workers. Otherwise -1.
  int32_t combine_tile;
};

/// A tile of the split-KV combine: rows of one request whose output is combined from partial states, in source order.
/// Shared segments come first, in their order; then the request's other segments, in the order of their keys. There
/// is at least one source.
struct CombineTile {
  int32_t kv_head;
  int32_t request;    ///< of the first row
  int32_t row_begin;  ///< packed rows [row_begin, row_end)
  int32_t row_end;
  int32_t source_begin;  ///< sources [source_begin, source_end) of PlanView::combine_sources
  int32_t source_end;
};

/// Everything a kernel reads of a plan. Borrowed from the plan buffer.
struct PlanView {
  int32_t num_requests = 0;
  int32_t num_tokens = 0;  ///< tokens that have a request: cu_q[num_requests]
  int32_t num_segments = 0;
  int32_t num_workers = 0;
  int32_t num_work_tiles = 0;
  /// Schedule::kDynamic: workers claim work tiles [0, num_dynamic_tiles). Continuations lie behind them. Worker w
  /// begins with work tile w; then each takes the lowest unclaimed one, from num_workers on. (Beside another pass,
  /// fewer workers begin so: decision 0076.) Neighbours are the KV heads of a swizzle group for the same rows and keys,
  /// so that shared reads hit the L2. The group is all KV heads, or at TileOrder::kLpt those whose keys fit the L2.
  /// Results do not depend on who claims what. 0 in a static schedule.
  int32_t num_dynamic_tiles = 0;
  /// Schedule::kDynamic: splits are made for claims of so many KV heads (SchedulerConfig::heads_together).
  int32_t claimed_heads = 1;
  int32_t num_combine_tiles = 0;
  int32_t num_partial_rows = 0;
  int64_t work_cost = 0;          ///< Schedule::kDynamic: of all work tiles, in the units of SchedulerConfig::tile_cost
  const int32_t* cu_q = nullptr;  ///< [R + 1]
  const int32_t* q_first_pos = nullptr;  ///< [R], never null
  const SegmentLengths* segments = nullptr;
  const int32_t* worker_indptr = nullptr;  ///< [num_workers + 1], work tiles; null in a dynamic schedule
  const WorkTile* work_tiles = nullptr;
  const CombineTile* combine_tiles = nullptr;
  const int32_t* combine_sources = nullptr;  ///< first partial row of each source; its next rows follow
  CustomMaskScope custom_mask_scope = CustomMaskScope::kAll;
  const int32_t* mask_columns = nullptr;       ///< [R] columns of each request's custom mask; null without one
  const int32_t* mask_first_column = nullptr;  ///< [R] key that column 0 stands for (kTail: total - tail_len)
  const int64_t* mask_byte_indptr = nullptr;   ///< [R + 1]
  /// [num_tokens, 2], the first and last key position that each query may see, apart from a custom mask's bits; null
  /// where the mask has no more rules than causal and window. SegmentMask::kAllVisible is free of it.
  const int32_t* visible_positions = nullptr;
};

}  // namespace folio::inline v0::scheduler
