#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "folio/types/attention.hpp"
#include "folio/types/export.hpp"
#include "scheduler/plan_view.hpp"
#include "scheduler/scheduler.hpp"

/// The image of a plan: one contiguous block of memory with everything of a PlanView that kernels on a device read.
/// It begins with a PlanImageHeader, whose `view` holds device addresses of the rest. So kernels take one address,
/// which a captured graph keeps, and the host uploads a plan with one copy.
namespace folio::inline v0::scheduler {

/// Why a request could not be planned on a device. The host scheduler throws instead.
enum class PlanProblem : int32_t {
  kNone = 0,
  kIndptr = 1,     ///< cu_q does not ascend from 0 to at most num_tokens
  kQueries = 2,    ///< more queries than the bound
  kKeys = 3,       ///< a negative kv_len, or more keys than the bound
  kPositions = 4,  ///< keys or queries beyond the positions of 32 bits
};

/// The lowest request that was not planned, and why.
struct PlanStatus {
  PlanProblem problem = PlanProblem::kNone;
  int32_t request = 0;
  int32_t segment = -1;  ///< of a negative length, or of keys beyond the positions; otherwise -1
  int32_t value = 0;     ///< what was given: cu_q[request + 1], q_len, kv_len or all keys, a first position
};

/// A sentence for an error message; empty for kNone.
std::string describe(const PlanStatus& status);

/// The begin of an image.
struct PlanImageHeader {
  /// Counts, and addresses valid on the device (those inside view.segments too).
  PlanView view;
  PlanStatus status;            ///< kNone in images that the host packed
  int32_t num_combine_sources;  ///< entries of view.combine_sources
};

/// Images begin at multiples of this, and so does every array inside.
inline constexpr size_t kPlanImageAlignment = 256;

/// Per-request segments that the image of an op with bounds has room for, besides GraphBounds::max_shared_levels.
inline constexpr int32_t kMaxImageSegments = 4;

/// Bytes of an image that any plan within config.bounds fits in (with at most kMaxImageSegments per-request segments),
/// including the device scheduler's scratch. Throws Error(kInvalidArgument) without bounds, or where they are so large
/// that a plan could not be numbered in 32 bits.
size_t plan_image_bytes(const SchedulerConfig& config);

/// Bytes of this plan's image, scratch excluded.
size_t plan_image_bytes(const PlanView& plan);

/// Writes a host plan's image to `stage` (host memory of `stage_bytes`, of any alignment up to that of int64_t), with
/// the addresses it has once copied to `image`. Returns how many bytes are to be copied: plan_image_bytes(plan).
/// Allocates nothing. Throws Error(kInvalidArgument) where it does not fit.
size_t pack_plan(const PlanView& plan, void* stage, size_t stage_bytes, const void* image);

/// Capacity of an image.
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

/// Divides an image: for sizes, for packing and for the device scheduler. Arrays of fixed size come first, those that
/// grow with the work last. Every array begins at a multiple of kPlanImageAlignment. Counts are below 2^32 each, so
/// nothing overflows.
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

/// Upper bound of the row tiles, per KV head, of this many requests and tokens.
int64_t max_row_tiles(const SchedulerConfig& config, int64_t requests, int64_t tokens);

/// Capacity for every plan within config.bounds. Throws as plan_image_bytes(config) does.
PlanImageCounts counts_within_bounds(const SchedulerConfig& config);

/// Capacity that this plan needs.
PlanImageCounts counts_of(const PlanView& plan);

/// Term of word `index` in a schedule's checksum. The checksum is a sum, so threads add terms in any order. For every
/// index the term is a bijection of the word: a change of any single word changes the checksum.
FOLIO_HOST_DEVICE constexpr uint64_t checksum_term(uint64_t word, uint64_t index) {
  uint64_t mixed = (word ^ (index * 0x9e3779b97f4a7c15)) * 0xbf58476d1ce4e5b9;
  mixed = (mixed ^ (mixed >> 31)) * 0x94d049bb133111eb;
  return mixed ^ (mixed >> 29);
}

/// The expected checksum of a schedule in a caller's memory, kept apart from it, and how to disable the schedule.
struct ChecksumRecord {
  static constexpr int32_t kMaxImages = 2;

  uint64_t num_words = 0;
  uint64_t checksum = 0;
  int32_t num_images = 0;
  PlanImageHeader* images[kMaxImages] = {};  ///< where the schedule's images begin
  PlanImageHeader emptied[kMaxImages] = {};  ///< the same plans without work: replace a changed schedule's headers
};

}  // namespace folio::inline v0::scheduler
