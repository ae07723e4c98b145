#pragma once

#include <cstdint>

#include "scheduler/tile_space.hpp"

/// Combine tiles of batches with shared segments. Without those, each scheduler emits its combine tiles itself.
namespace folio::inline v0::scheduler {

/// The row tile that covers packed row `row` of `request` at a shared segment. Null: the request has no group there,
/// or no key is visible. With `next_row`, lowers it to the end of that row tile.
const RowTile* shared_tile(const PlanStorage::Arrays& arrays, const SharedSegment& shared, int32_t request, int32_t row,
                           int32_t* next_row);

/// Appends the combine tiles of rows that shared segments contribute to, one per run of a request's rows with the
/// same contributors. Writes `arrays.combine_tiles` and `arrays.combine_sources`; reads `arrays.partials` and
/// `arrays.output_partials`.
void combine_shared(const SchedulerConfig& config, PlanStorage::Arrays& arrays);

}  // namespace folio::inline v0::scheduler
