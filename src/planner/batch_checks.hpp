#pragma once

#include <cstdint>

#include "planner/planner.hpp"

/// Checks of everything but the lengths of keys. All throw Error(kInvalidArgument).
namespace folio::inline v0::planner {

/// A config that no kernel has.
void check_config(const PlannerConfig& config);

/// Counts, query lengths and the op's bounds.
void check_queries(const PlannerConfig& config, const BatchView& batch);

/// Segment `s`: source, mask, shard, groups, and that its lengths are there.
void check_segment_fields(const PlannerConfig& config, const BatchView& batch, int64_t s);

/// Rows of a segment: its groups, or the batch's requests.
int64_t segment_rows(const BatchView& batch, const KvSegment& segment);

}  // namespace folio::inline v0::planner
