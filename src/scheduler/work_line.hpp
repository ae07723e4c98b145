#pragma once

#include "scheduler/plan_storage.hpp"

namespace folio::inline v0::scheduler {

/// The tile space and how many work tiles it makes at most, however it is cut.
struct TileSpaceTotals {
  TileSpace space;
  int64_t max_work_tiles = 0;
  int64_t num_output_tiles = 0;
};

/// Builds the tile space of the batch in the storage: blocks, row tiles, key ranges. Request by request; groups of
/// shared segments before their first request. Throws Error(kInvalidArgument) where sums overflow.
TileSpaceTotals build_tile_space(const SchedulerConfig& config, PlanStorage::Arrays& arrays);

/// The row tile that works on packed row `row` of `request` at a shared segment, or null: no group, or nothing visible.
/// With `next_row`, lowers it to the end of that row tile.
const RowTile* shared_tile(const PlanStorage::Arrays& arrays, const SharedSegment& shared, int32_t request, int32_t row,
                           int32_t* next_row);

}  // namespace folio::inline v0::scheduler
