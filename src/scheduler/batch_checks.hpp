#pragma once

#include <cstdint>

#include "scheduler/scheduler.hpp"

/// Checks of everything but the lengths of keys. All throw Error(kInvalidArgument).
namespace folio::inline v0::scheduler {

/// A config that no kernel has.
void check_config(const SchedulerConfig& config);

/// Counts and addresses, also against the op's bounds; reads no lengths.
void check_counts(const SchedulerConfig& config, const BatchView& batch);

/// Counts, and query lengths in host memory.
void check_queries(const SchedulerConfig& config, const BatchView& batch);

/// That a custom mask is given if and only if the op has one, and whole.
void check_mask_fields(const SchedulerConfig& config, const BatchView& batch);

/// Segment `s`: source, mask, shard, groups, and that its lengths are there.
void check_segment_fields(const SchedulerConfig& config, const BatchView& batch, int64_t s);

/// Rows of a segment: its groups, or the batch's requests.
int64_t segment_rows(const BatchView& batch, const KvSegment& segment);

}  // namespace folio::inline v0::scheduler
