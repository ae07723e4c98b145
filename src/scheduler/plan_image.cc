#include "scheduler/plan_image.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>

#include "core/error.hpp"
#include "scheduler/batch.hpp"
#include "scheduler/device/inputs.hpp"
#include "scheduler/dynamic_scheduler.hpp"
#include "scheduler/mask_bounds.hpp"

namespace folio::inline v0::scheduler {

namespace {

/// Copies arrays into an image's staging memory and computes their device addresses.
class Packer {
 public:
  Packer(void* stage, const void* image)
      : stage_(static_cast<std::byte*>(stage)), image_(static_cast<const std::byte*>(image)) {}

  /// The device address of `offset`.
  template <typename T>
  const T* address(int64_t offset) const {
    return reinterpret_cast<const T*>(image_ + offset);
  }

  template <typename T>
  const T* copy(int64_t offset, const T* from, int64_t count) {
    if (count > 0) std::memcpy(stage_ + offset, from, static_cast<size_t>(count) * sizeof(T));
    return address<T>(offset);
  }

  /// Copies one of the arrays of lengths, which lie side by side from `next` on. Null stays null.
  const int32_t* copy_lengths(int64_t& next, const int32_t* from, int64_t count) {
    if (from == nullptr) return nullptr;
    const int32_t* there = copy(next, from, count);
    next += count * int64_t{sizeof(int32_t)};
    return there;
  }

 private:
  std::byte* stage_;
  const std::byte* image_;
};

}  // namespace

int64_t max_row_tiles(const SchedulerConfig& config, int64_t requests, int64_t tokens) {
  const bool shares = config.bounds && config.bounds->max_shared_levels > 0;
  if (config.max_rows <= config.tile.rows && !shares) return std::min(requests, tokens);  // one each
  const int64_t rows = tokens * (config.num_q_heads / config.num_kv_heads);
  // A request's last row tile may be short; there are no more requests with tokens than tokens.
  return rows / config.tile.rows + std::min(requests, tokens);
}

PlanImageCounts counts_within_bounds(const SchedulerConfig& config) {
  check_config(config);
  if (!config.bounds)
    core::fail(ErrorCode::kInvalidArgument,
               "the op was prepared without GraphBounds; a plan image of fixed size needs them");
  const GraphBounds& bounds = *config.bounds;
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  const int64_t rows = int64_t{bounds.max_tokens} * (config.num_q_heads / config.num_kv_heads);
  const int64_t requests = bounds.max_requests;
  const int64_t levels = bounds.max_shared_levels;
  const int64_t tiles = max_row_tiles(config, requests, bounds.max_tokens);
  const bool fixed_splits = config.determinism >= Determinism::kBatchInvariant;
  // Work tiles of an uncut output tile: one per segment, or one per fixed split. All segments' keys together are
  // bounded, and each segment may begin and end within a fixed split.
  const int64_t splits = fixed_splits ? bounds.max_kv_len / config.fixed_split_tokens + 1 : 0;
  const int64_t work_tiles_a_tile = splits + (fixed_splits ? 2 : 1) * kMaxImageSegments;
  const int64_t work_tiles_a_shared_tile = splits + 1;
  // A cut adds one work tile. A dynamic schedule's fixed splits are counted already.
  const bool dynamic = config.tile.schedule == Schedule::kDynamic;
  const int64_t split_tiles = split_budget(config) * (fixed_splits ? 1 : max_claimed_heads(config));
  const int64_t cuts = !dynamic ? config.num_workers : fixed_splits ? 0 : split_tiles;
  // Row tiles of groups come on top of those of requests, as in max_partial_rows.
  const double max_work_tiles = static_cast<double>(tiles) * config.num_kv_heads *
                                    static_cast<double>(work_tiles_a_tile + levels * work_tiles_a_shared_tile) +
                                static_cast<double>(cuts);
  const double most_lengths = static_cast<double>(requests) * static_cast<double>(kMaxImageSegments + levels) * 4;
  if (rows > kMax || max_work_tiles > static_cast<double>(kMax) || most_lengths > static_cast<double>(kMax)) {
    core::fail(ErrorCode::kInvalidArgument, "the op's bounds allow for ", rows, " packed rows and about ",
               max_work_tiles,
               " work tiles in a plan; at most 2^31 - 1 are offered: lower max_tokens, max_requests or max_kv_len");
  }
  const int64_t stretches = config.num_kv_heads * (levels + 1) * tiles;  // rows with the same contributors
  const int64_t partial_rows = max_partial_rows(config);
  PlanImageCounts counts;
  counts.segments = kMaxImageSegments + levels;
  counts.lengths = 2 * requests + 1 + counts.segments * 4 * requests + 2 * requests;
  if (mask_rules(config).has_more()) counts.lengths += 2 * int64_t{bounds.max_tokens};
  counts.mask_blocks = config.mask == MaskKind::kCustom ? requests + 1 : 0;
  counts.workers = dynamic ? 0 : config.num_workers;
  counts.work_tiles = config.num_kv_heads * tiles * (work_tiles_a_tile + levels * work_tiles_a_shared_tile) + cuts;
  // A split output tile has at least two splits.
  const int64_t split_output_tiles = dynamic ? split_tiles / 2 : config.num_workers;
  counts.combine_tiles = split_output_tiles + (levels > 0 ? std::min(partial_rows, stretches) : 0);
  // Every source has at least one partial row of its own.
  const int64_t kv_splits = dynamic ? split_tiles : int64_t{2} * config.num_workers;
  counts.combine_sources = levels == 0 && !fixed_splits ? kv_splits : partial_rows;
  const bool lpt = config.tile.order == TileOrder::kLpt;
  counts.scratch_bytes = DeviceScratchSizes{requests, tiles, config.num_workers, dynamic, lpt}.bytes();
  return counts;
}

PlanImageCounts counts_of(const PlanView& plan) {
  const int64_t requests = plan.num_requests;
  PlanImageCounts counts;
  counts.segments = plan.num_segments;
  counts.lengths = 2 * requests + 1 + (plan.mask_columns != nullptr ? 2 * requests : 0);
  for (int32_t s = 0; s < plan.num_segments; ++s) {
    const SegmentLengths& segment = plan.segments[s];
    counts.lengths += int64_t{2} * segment.num_rows + (segment.row_of_request != nullptr ? requests : 0) +
                      (segment.key_offset != nullptr ? requests : 0);
  }
  if (plan.visible_positions != nullptr) counts.lengths += 2 * int64_t{plan.num_tokens};
  counts.mask_blocks = plan.mask_byte_indptr != nullptr ? requests + 1 : 0;
  counts.workers = plan.worker_indptr == nullptr ? 0 : plan.num_workers;
  counts.work_tiles = plan.num_work_tiles;
  counts.combine_tiles = plan.num_combine_tiles;
  counts.combine_sources = plan.num_combine_tiles == 0 ? 0 : plan.combine_tiles[plan.num_combine_tiles - 1].source_end;
  return counts;
}

std::string describe(const PlanStatus& status) {
  switch (status.problem) {
    case PlanProblem::kNone: return {};
    case PlanProblem::kIndptr:
      return core::message("request ", status.request,
                           ": cu_q does not ascend from 0 to at most num_tokens; it ends at ", status.value);
    case PlanProblem::kQueries:
      return core::message("request ", status.request, ": q_len is ", status.value,
                           ", more than the op was prepared for");
    case PlanProblem::kKeys:
      if (status.segment >= 0) {
        return core::message("request ", status.request, ", segment ", status.segment, ": kv_len is ", status.value,
                             "; it is 0 or more");
      }
      return core::message("request ", status.request, ": it has ", status.value,
                           " keys, more than the op was prepared for");
    case PlanProblem::kPositions:
      return core::message("request ", status.request, ": from position ", status.value, " on, its ",
                           status.segment >= 0 ? "keys" : "queries", " do not fit in 32-bit positions");
  }
  return "unknown problem";
}

size_t plan_image_bytes(const SchedulerConfig& config) {
  return static_cast<size_t>(carve_plan_image(counts_within_bounds(config)).total);
}

size_t plan_image_bytes(const PlanView& plan) {
  return static_cast<size_t>(carve_plan_image(counts_of(plan)).total);
}

size_t pack_plan(const PlanView& plan, void* stage, size_t stage_bytes, const void* image) {
  const PlanImageCounts counts = counts_of(plan);
  const PlanImageLayout layout = carve_plan_image(counts);
  const auto bytes = static_cast<size_t>(layout.total);
  if (bytes > stage_bytes) {
    core::fail(ErrorCode::kInvalidArgument, "the batch's plan takes ", bytes, " bytes, but its image has ", stage_bytes,
               ": the image of an op with bounds has room for ", kMaxImageSegments,
               " segments of requests, and for no more groups than requests");
  }
  Packer packer(stage, image);
  auto* header = new (stage) PlanImageHeader{plan, PlanStatus{}, static_cast<int32_t>(counts.combine_sources)};
  PlanView& view = header->view;
  int64_t next = layout.lengths;
  view.cu_q = packer.copy_lengths(next, plan.cu_q, int64_t{plan.num_requests} + 1);
  view.q_first_pos = packer.copy_lengths(next, plan.q_first_pos, plan.num_requests);
  auto* segments = reinterpret_cast<SegmentLengths*>(static_cast<std::byte*>(stage) + layout.segments);
  for (int32_t s = 0; s < plan.num_segments; ++s) {
    SegmentLengths* segment = new (segments + s) SegmentLengths(plan.segments[s]);
    segment->kv_len = packer.copy_lengths(next, segment->kv_len, segment->num_rows);
    segment->first_pos = packer.copy_lengths(next, segment->first_pos, segment->num_rows);
    segment->row_of_request = packer.copy_lengths(next, segment->row_of_request, plan.num_requests);
    segment->key_offset = packer.copy_lengths(next, segment->key_offset, plan.num_requests);
  }
  view.segments = packer.address<SegmentLengths>(layout.segments);
  view.mask_columns = packer.copy_lengths(next, plan.mask_columns, plan.num_requests);
  view.mask_first_column = packer.copy_lengths(next, plan.mask_first_column, plan.num_requests);
  view.visible_positions = packer.copy_lengths(next, plan.visible_positions, 2 * int64_t{plan.num_tokens});
  if (plan.mask_byte_indptr != nullptr) {
    view.mask_byte_indptr = packer.copy(layout.mask_byte_indptr, plan.mask_byte_indptr, counts.mask_blocks);
  }
  if (plan.worker_indptr != nullptr) {
    view.worker_indptr = packer.copy(layout.worker_indptr, plan.worker_indptr, counts.workers + 1);
  }
  view.combine_tiles = packer.copy(layout.combine_tiles, plan.combine_tiles, counts.combine_tiles);
  view.combine_sources = packer.copy(layout.combine_sources, plan.combine_sources, counts.combine_sources);
  view.work_tiles = packer.copy(layout.work_tiles, plan.work_tiles, counts.work_tiles);
  return bytes;
}

}  // namespace folio::inline v0::scheduler
