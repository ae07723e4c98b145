#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "folio/types/attention.hpp"
#include "scheduler/plan_view.hpp"
#include "scheduler/scheduler.hpp"

/// The image of a plan: one contiguous split of memory with everything of a PlanView that a device's kernels read. It
/// begins with a PlanImageHeader, whose `view` says where the rest lies, as addresses of the device; so kernels take
/// one address, which a captured graph keeps, and the host uploads a plan with one copy of what it uses.
namespace folio::inline v0::scheduler {

/// What kept a request from being planned on a device. The host scheduler throws instead.
enum class PlanProblem : int32_t {
  kNone = 0,
  kIndptr = 1,     ///< cu_q does not ascend from 0 to at most num_tokens
  kQueries = 2,    ///< more queries than the bound
  kKeys = 3,       ///< a negative kv_len, or more keys than the bound
  kPositions = 4,  ///< keys or queries beyond the positions of 32 bits
};

/// The first request that was not planned (of several, the lowest), and why.
struct PlanStatus {
  PlanProblem problem = PlanProblem::kNone;
  int32_t request = 0;
  int32_t segment = -1;  ///< of a negative length, or of keys beyond the positions; otherwise -1
  int32_t value = 0;     ///< what was given: cu_q[request + 1], q_len, kv_len or all keys, a first position
};

/// A sentence for an error message; empty for kNone.
std::string describe(const PlanStatus& status);

/// What an image begins with.
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

}  // namespace folio::inline v0::scheduler
