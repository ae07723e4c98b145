#pragma once

#include <cstdint>

#include "folio/types/attention.hpp"
#include "folio/types/kv_cache.hpp"

namespace folio::inline v0::scheduler {

/// How the workers of a kernel come by their work tiles.
enum class Schedule : int32_t {
  kStatic = 0,   ///< every worker has a list of its own, of about the same cost
  kDynamic = 1,  ///< one list for all: a worker that is free claims the next entry (PlanView::num_dynamic_tiles)
};

/// In which order row tiles are claimed.
enum class TileOrder : int32_t {
  kRequestOrder = 0,  ///< in the order of their requests, for work whose splits may be cut anywhere
  kLpt = 1,           ///< see claim_order.hpp: for row tiles that had better stay whole
};

/// The tile a kernel works in: published by the kernel, read by the scheduler.
struct TileShape {
  int32_t rows = 0;  ///< most packed rows (query tokens x heads of a group) a work tile has
  int32_t kv_tokens =
      0;  ///< tokens of K and V the kernel takes at a time; work is cut at multiples, from local token 0
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
  const int32_t*
      key_offset;  ///< [R], the request's keys in earlier segments: its column base in a custom mask, or null
};

/// What a worker does at a work tile, besides accumulating its keys. In a dynamic schedule every work tile of a unit
/// that is split has kStart and kFinish, and so has the one work tile of a unit that is whole; only whole units of
/// several segments, or at fixed splits, are accumulated over several work tiles.
enum WorkTileFlags : uint32_t {
  kStart = 1u << 0,   ///< a new accumulation begins: the running state is empty
  kFinish = 1u << 1,  ///< the accumulation ends: write the output (partial < 0) or the state (partial >= 0)
  kFold = 1u << 2,    ///< fixed splits: accumulate this work tile on its own, then fold it into the running state
};

/// One split of work: some packed rows against a range of one segment's keys, for one KV head. Packed row
/// r = token * group_size + g stands for query token r / group_size (counted over the whole batch) and q head
/// kv_head * group_size + g. Work tiles of a worker's list run in order, those of a claim from one to its `partial`;
/// from kStart to kFinish they have equal rows and kv_head.
struct WorkTile {
  int32_t segment;
  int32_t kv_row;  ///< row of the segment: index of kv_len, of the page table, of the ragged indptr
  int32_t kv_head;
  int32_t request;    ///< the request of the first row; later rows of a shared work tile may belong to later requests
  int32_t row_begin;  ///< packed rows [row_begin, row_end), at most TileShape::rows
  int32_t row_end;
  /// Local tokens [kv_begin, kv_end). Cuts between work tiles are at multiples of TileShape::kv_tokens; the first and
  /// last token are the first and last that any of the rows sees, but at kBatchInvariant and above kv_begin is rounded
  /// down to such a multiple: up to kv_tokens - 1 tokens that no row sees, whose memory may hold anything. An empty
  /// range means that the rows see nothing at all; its segment is 0 and its kv_row is not to be used.
  int32_t kv_begin;
  int32_t kv_end;
  /// With kFinish: the first of row_end - row_begin partial rows, or -1 to write the output. Without it: in a claimed
  /// plan the index of the work tile that comes next, else -1 (the next in the worker's list).
  int32_t partial;
  uint32_t flags;  ///< WorkTileFlags
  /// static schedule without shared segments: with kFinish and partial >= 0, the combine tile that takes all rows of
  /// the result, which no other does, so that who finishes its last source can fold it. Numbers are below num_workers.
  /// Else -1.
  int32_t combine_tile;
};

/// Rows of one request whose result is folded from partial states, in order: those of shared segments in the order of
/// the segments, then those of the request's other segments in the order of their keys. At least one.
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
  /// Schedule::kDynamic: work tiles [0, num_dynamic_tiles) are what workers claim, each together with the work tiles
  /// that its `partial` leads to, which lie behind num_dynamic_tiles. Worker w begins with claim w; who has finished
  /// takes the lowest that nobody has, from num_workers on. Neighbours are KV heads of the same rows and keys, so that
  /// these are read at about the same time: all of them or, at TileOrder::kLpt, those whose keys the workers' common
  /// cache holds. Results do not depend on who claims what. 0 with static schedule.
  int32_t num_dynamic_tiles = 0;
  int32_t num_combine_tiles = 0;
  int32_t num_partial_rows = 0;
  const int32_t* cu_q = nullptr;         ///< [R + 1]
  const int32_t* q_first_pos = nullptr;  ///< [R], never null
  const SegmentLengths* segments = nullptr;
  const int32_t* worker_indptr = nullptr;  ///< [num_workers + 1], work tiles; null in a dynamic schedule
  const WorkTile* work_tiles = nullptr;
  const CombineTile* combine_tiles = nullptr;
  const int32_t* combine_sources =
      nullptr;  ///< partial row that holds the combine tile's first row; its next rows follow
  CustomMaskScope custom_mask_scope = CustomMaskScope::kAll;
  const int32_t* mask_columns = nullptr;       ///< [R] columns of each request's custom mask; null without one
  const int32_t* mask_first_column = nullptr;  ///< [R] key that column 0 stands for (kTail: total - tail_len)
  const int64_t* mask_byte_indptr = nullptr;   ///< [R + 1]
};

}  // namespace folio::inline v0::scheduler
