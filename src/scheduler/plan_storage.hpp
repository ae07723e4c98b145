#pragma once

#include <cstdint>

#include "scheduler/grow_buffer.hpp"
#include "scheduler/partition_rule.hpp"
#include "scheduler/plan_view.hpp"
#include "scheduler/scheduler.hpp"

namespace folio::inline v0::scheduler {

/// value / divisor of positive numbers: of 32 bits, as nearly all are, in half the time.
inline int64_t quotient(int64_t value, int64_t divisor) noexcept {
  return ((value | divisor) >> 32) == 0 ? narrow_div(value, divisor) : value / divisor;
}

/// Keys that a row tile visits in one segment.
struct KeyRange {
  int32_t segment;
  int32_t kv_row;
  int32_t begin;  ///< local tokens [begin, end); begin == end only in the one range of a tile that sees nothing
  int32_t end;
};

/// Some packed rows and all keys that one accumulation visits for them: an output tile, once per KV head.
struct RowTile {
  int32_t request;  ///< of the first row
  int32_t row_begin;
  int32_t row_end;
  int32_t range_begin;  ///< ranges [range_begin, range_end)
  int32_t range_end;
  bool to_partial;       ///< its result is combined with a shared segment's (or is one): it always goes to partial rows
  bool divisible;        ///< may be cut between workers
  int64_t num_kv_tiles;  ///< over all ranges; 1 where nothing is visible; 0: there is no such output tile
  int64_t kv_tile_cost;
  int64_t start_cost;    ///< before the first KV tile
  int64_t block_offset;  ///< cost of the block's earlier row tiles
  int64_t cost() const noexcept { return offset_of(num_kv_tiles); }
  /// Cost of what lies before KV tile `kv_tile` of the output tile. The start belongs to the first.
  int64_t offset_of(int64_t kv_tile) const noexcept { return kv_tile == 0 ? 0 : start_cost + kv_tile * kv_tile_cost; }
  /// The KV tile at an offset inside the output tile.
  int64_t kv_tile_at(int64_t offset) const noexcept {
    return offset <= start_cost ? 0 : quotient(offset - start_cost, kv_tile_cost);
  }
};

/// Row tiles of one request, or of one group at a shared segment, repeated for every KV head.
struct Block {
  int32_t tile_begin;
  int32_t tile_end;
  bool direct;                ///< no tile has to_partial: uncut output tiles write the output
  int64_t first_output_tile;  ///< number of the output tile (head 0, first tile)
  int64_t space_begin;
  int64_t head_cost;
  int64_t output_tile(int32_t head, int32_t tile) const noexcept {
    return first_output_tile + int64_t{head} * (tile_end - tile_begin) + (tile - tile_begin);
  }
};

/// A place in the tile space: an output tile and how many of its KV tiles lie before the place. The tile space's end is
/// the output tile after the last.
struct TileCoord {
  int64_t output_tile;
  int64_t kv_tile;
  int32_t block;
  int32_t head;
  int32_t tile;  ///< index of the row tile
};

/// A shared segment's groups: which block works on each.
struct SharedSegment {
  int32_t segment;
  int64_t first_group_block;  ///< of group_blocks
};

/// Partial results of one output tile: [begin, end) of Arrays::splits.
struct PartialRange {
  int64_t begin;
  int64_t end;
};

/// All memory of a plan and of its making.
struct PlanStorage::Arrays {
  PlanView view;  ///< the plan; empty while there is none

  GrowBuffer<int32_t> lengths;  ///< every int32 array of lengths in the view, one after the other
  GrowBuffer<int64_t> mask_byte_indptr;
  GrowBuffer<SegmentLengths> segments;
  GrowBuffer<int32_t> worker_indptr;
  GrowBuffer<WorkTile> work_tiles;
  GrowBuffer<CombineTile> combine_tiles;
  GrowBuffer<int32_t> combine_sources;

  GrowBuffer<MaskBounds> mask_bounds;  ///< of each segment
  GrowBuffer<SharedSegment> shared;
  GrowBuffer<int32_t> group_blocks;  ///< of each group of each shared segment its block, or -1 without rows
  GrowBuffer<KeyRange> ranges;
  GrowBuffer<RowTile> tiles;
  GrowBuffer<Block> blocks;
  GrowBuffer<TileCoord> cuts;       ///< [num_workers + 1]; static schedule only
  GrowBuffer<int32_t> block_order;  ///< blocks in the order of their claims; TileOrder::kLpt only
  GrowBuffer<int32_t> tile_splits;  ///< of each row tile: claims per KV head; dynamic schedules only
  GrowBuffer<int32_t> splits;       ///< partial rows of the output tiles with to_partial, output tile by output tile
  GrowBuffer<PartialRange> output_partials;  ///< of each output tile with to_partial; only with shared segments
};

}  // namespace folio::inline v0::scheduler
