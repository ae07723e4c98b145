#pragma once

#include <cstdint>

#include "scheduler/plan_image.hpp"

/// Where things lie in a plan's image.
namespace folio::inline v0::scheduler {

/// What an image has room for.
struct PlanImageCounts {
  int64_t segments = 0;
  int64_t lengths = 0;      ///< entries of all int32 arrays of lengths together
  int64_t mask_blocks = 0;  ///< entries of mask_byte_indptr
  int64_t workers = 0;
  int64_t work_tiles = 0;
  int64_t combine_tiles = 0;
  int64_t combine_sources = 0;
  int64_t scratch_bytes = 0;
};

/// Byte offsets from the image's begin.
struct PlanImageLayout {
  int64_t segments = 0;
  int64_t lengths = 0;
  int64_t mask_byte_indptr = 0;
  int64_t worker_indptr = 0;
  int64_t combine_tiles = 0;
  int64_t combine_sources = 0;
  int64_t work_tiles = 0;
  int64_t scratch = 0;
  int64_t total = 0;
};

/// The one place that divides an image: for sizes, for packing and for the device scheduler. What is there once comes
/// first and what grows with the work last; every array begins at a multiple of kPlanImageAlignment. Counts are below
/// 2^32 each, so nothing here can overflow.
constexpr PlanImageLayout carve_plan_image(const PlanImageCounts& counts) {
  PlanImageLayout layout;
  const auto take = [&layout](int64_t bytes) {
    constexpr int64_t kAlignment = kPlanImageAlignment;
    const int64_t begin = layout.total;
    layout.total += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return begin;
  };
  take(sizeof(PlanImageHeader));
  layout.segments = take(counts.segments * int64_t{sizeof(SegmentLengths)});
  layout.lengths = take(counts.lengths * int64_t{sizeof(int32_t)});
  layout.mask_byte_indptr = take(counts.mask_blocks * int64_t{sizeof(int64_t)});
  layout.worker_indptr = take((counts.workers + 1) * int64_t{sizeof(int32_t)});
  layout.combine_tiles = take(counts.combine_tiles * int64_t{sizeof(CombineTile)});
  layout.combine_sources = take(counts.combine_sources * int64_t{sizeof(int32_t)});
  layout.work_tiles = take(counts.work_tiles * int64_t{sizeof(WorkTile)});
  layout.scratch = take(counts.scratch_bytes);
  return layout;
}

/// Row tiles that this many requests with this many tokens make at most, per KV head.
int64_t max_row_tiles(const SchedulerConfig& config, int64_t requests, int64_t tokens);

/// What suffices for every plan within config.bounds. Throws as plan_image_bytes(config) does.
PlanImageCounts counts_within_bounds(const SchedulerConfig& config);

/// What this plan uses.
PlanImageCounts counts_of(const PlanView& plan);

}  // namespace folio::inline v0::scheduler
