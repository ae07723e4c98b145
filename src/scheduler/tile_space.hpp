#pragma once

#include <cstdint>

#include "scheduler/mask_bounds.hpp"
#include "scheduler/scheduler.hpp"

namespace folio::inline v0::scheduler {

/// The linearized tile space: all output tiles of a batch one after the other, measured in cost. An output tile is
/// what one accumulation covers: one row tile, one KV head, all its KV tiles. It may be cut between split granules:
/// KV tiles, or fixed splits at kBatchInvariant and above.
struct TileSpace {
  int64_t total = 0;
  int64_t granularity = 0;  ///< split granularity: cost of the costliest split granule
  int32_t num_workers = 1;
};

/// total * num_workers stays below this, so that cut arithmetic is exact.
inline constexpr int64_t kMaxScaledCost = int64_t{1} << 61;

/// value / divisor of positive numbers. Nearly all fit in 32 bits, where the division takes half the time.
inline int64_t quotient(int64_t value, int64_t divisor) noexcept {
  return ((value | divisor) >> 32) == 0 ? narrow_div(value, divisor) : value / divisor;
}

/// The keys of one segment that a row tile visits.
struct KeyRange {
  int32_t segment;
  int32_t kv_row;
  int32_t begin;  ///< local tokens [begin, end); begin == end only in the single range of a tile without visible keys
  int32_t end;
};

/// Some packed rows and all keys that one accumulation visits for them. With a KV head it is an output tile.
struct RowTile {
  int32_t request;  ///< of the first row
  int32_t row_begin;
  int32_t row_end;
  int32_t range_begin;  ///< ranges [range_begin, range_end)
  int32_t range_end;
  bool to_partial;       ///< its result is combined with a shared segment's, or is one: it always goes to partial rows
  bool divisible;        ///< may be cut between workers
  int64_t num_kv_tiles;  ///< over all ranges; 1 where nothing is visible; 0: no output tile
  int64_t kv_tile_cost;
  int64_t start_cost;    ///< before the first KV tile
  int64_t block_offset;  ///< cost of the block's earlier row tiles
  int64_t cost() const noexcept { return offset_of(num_kv_tiles); }
  /// Cost of the output tile before KV tile `kv_tile`. The start cost belongs to the first KV tile.
  int64_t offset_of(int64_t kv_tile) const noexcept { return kv_tile == 0 ? 0 : start_cost + kv_tile * kv_tile_cost; }
  /// The KV tile at an offset inside the output tile.
  int64_t kv_tile_at(int64_t offset) const noexcept {
    return offset <= start_cost ? 0 : quotient(offset - start_cost, kv_tile_cost);
  }
};

/// The row tiles of one request, or of one group at a shared segment. They repeat for every KV head.
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

/// A position in the tile space: an output tile and the number of its KV tiles before the position. The end of the
/// tile space is the output tile after the last.
struct TileCoord {
  int64_t output_tile;
  int64_t kv_tile;
  int32_t block;
  int32_t head;
  int32_t tile;  ///< index of the row tile
};

/// A shared segment and where its groups' blocks are listed.
struct SharedSegment {
  int32_t segment;
  int64_t first_group_block;  ///< of group_blocks
};

/// Entry of Arrays::group_blocks for a group without rows.
inline constexpr int32_t kNoBlock = -1;

/// The tile space and an upper bound of its work tiles, however it is cut.
struct TileSpaceTotals {
  TileSpace space;
  int64_t max_work_tiles = 0;
  int64_t num_output_tiles = 0;
};

/// Builds the tile space of the batch in the storage: blocks, row tiles, key ranges. Requests come in order; a shared
/// segment's group comes before its first request. Throws Error(kInvalidArgument) where sums overflow.
TileSpaceTotals build_tile_space(const SchedulerConfig& config, PlanStorage::Arrays& arrays);

}  // namespace folio::inline v0::scheduler
