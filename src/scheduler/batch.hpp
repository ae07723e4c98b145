#pragma once

#include <cstdint>

#include "scheduler/scheduler.hpp"

/// Checks and reads a batch. All functions throw Error(kInvalidArgument).
namespace folio::inline v0::scheduler {

/// Most keys of a segment's row. Kernels step over keys in 32-bit numbers and end up to a few tiles beyond the last.
inline constexpr int32_t kMaxKvLen = INT32_MAX - 4095;

/// Refuses a config that no kernel has.
void check_config(const SchedulerConfig& config);

/// Counts and addresses, also against the op's bounds. Reads no lengths.
void check_counts(const SchedulerConfig& config, const BatchView& batch);

/// Counts, and query lengths in host memory.
void check_queries(const SchedulerConfig& config, const BatchView& batch);

/// A custom mask must be given exactly where the op has one, and whole.
void check_mask_fields(const SchedulerConfig& config, const BatchView& batch);

/// kv_start, causal and spans are given only where the op was prepared for them.
void check_query_masks(const SchedulerConfig& config, const BatchView& batch);

/// Segment `s`: source, mask, shard, groups, and the presence of its lengths.
void check_segment_fields(const SchedulerConfig& config, const BatchView& batch, int64_t s);

/// Rows of a segment: its groups, or the batch's requests.
int64_t segment_rows(const BatchView& batch, const KvSegment& segment);

/// Checks the batch and copies its lengths into the storage. Fills `arrays.mask_bounds` and all of `arrays.view` but
/// work tiles and combine tiles. The error names the request and segment at fault.
void read_batch(const SchedulerConfig& config, const BatchView& batch, PlanStorage::Arrays& arrays);

}  // namespace folio::inline v0::scheduler
