#include "scheduler/plan_layout.hpp"

#include <algorithm>
#include <limits>

#include "scheduler/batch_checks.hpp"
#include "scheduler/claim_work.hpp"
#include "scheduler/device/scratch.hpp"
#include "scheduler/refusal.hpp"

namespace folio::inline v0::scheduler {

int64_t max_row_tiles(const SchedulerConfig& config, int64_t requests, int64_t tokens) {
  const bool shares = config.bounds && config.bounds->max_shared_levels > 0;
  if (config.max_rows <= config.tile.rows && !shares) return std::min(requests, tokens);  // one each
  const int64_t rows = tokens * (config.num_q_heads / config.num_kv_heads);
  // A request's last row tile may be short; there are no more requests with tokens than tokens.
  return rows / config.tile.rows + std::min(requests, tokens);
}

PlanImageCounts counts_within_bounds(const SchedulerConfig& config) {
  check_config(config);
  if (!config.bounds) refuse("the op was prepared without GraphBounds; a plan image of fixed size needs them");
  const GraphBounds& bounds = *config.bounds;
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  const int64_t rows = int64_t{bounds.max_tokens} * (config.num_q_heads / config.num_kv_heads);
  const int64_t requests = bounds.max_requests;
  const int64_t levels = bounds.max_shared_levels;
  const int64_t tiles = max_row_tiles(config, requests, bounds.max_tokens);
  const bool fixed_splits = config.determinism >= Determinism::kBatchInvariant;
  // Work tiles of an output tile before it is cut: one a segment, or one a split. All segments' keys together are
  // bounded, and each segment may begin and end within a split.
  const int64_t splits = fixed_splits ? bounds.max_kv_len / config.fixed_split_tokens + 1 : 0;
  const int64_t work_tiles_a_tile = splits + (fixed_splits ? 2 : 1) * kMaxImageSegments;
  const int64_t work_tiles_a_shared_tile = splits + 1;
  // A cut makes one work tile more; where splits are fixed and claimed, those are counted already.
  const bool dynamic = config.tile.schedule == Schedule::kDynamic;
  const int64_t cuts = !dynamic ? config.num_workers : fixed_splits ? 0 : split_budget(config);
  // Of every group, and of its own requests: see max_partial_rows.
  const double max_work_tiles = static_cast<double>(tiles) * config.num_kv_heads *
                                    static_cast<double>(work_tiles_a_tile + levels * work_tiles_a_shared_tile) +
                                static_cast<double>(cuts);
  const double most_lengths = static_cast<double>(requests) * static_cast<double>(kMaxImageSegments + levels) * 4;
  if (rows > kMax || max_work_tiles > static_cast<double>(kMax) || most_lengths > static_cast<double>(kMax)) {
    refuse("the op's bounds allow for ", rows, " packed rows and about ", max_work_tiles,
           " work_tiles in a plan; at max 2^31 - 1 are offered: lower max_tokens, max_requests or max_kv_len");
  }
  const int64_t stretches = config.num_kv_heads * (levels + 1) * tiles;  // rows with the same contributors
  const int64_t partial_rows = max_partial_rows(config);
  PlanImageCounts counts;
  counts.segments = kMaxImageSegments + levels;
  counts.lengths = 2 * requests + 1 + counts.segments * 4 * requests + 2 * requests;
  counts.mask_blocks = config.mask == MaskKind::kCustom ? requests + 1 : 0;
  counts.workers = dynamic ? 0 : config.num_workers;
  counts.work_tiles = config.num_kv_heads * tiles * (work_tiles_a_tile + levels * work_tiles_a_shared_tile) + cuts;
  // An output tile that is cut has two splits at least.
  const int64_t split_output_tiles = dynamic ? split_budget(config) / 2 : config.num_workers;
  counts.combine_tiles = split_output_tiles + (levels > 0 ? std::min(partial_rows, stretches) : 0);
  // A source is the first of at least one partial row, which is no other source's.
  const int64_t kv_splits = dynamic ? split_budget(config) : int64_t{2} * config.num_workers;
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
  counts.mask_blocks = plan.mask_byte_indptr != nullptr ? requests + 1 : 0;
  counts.workers = plan.worker_indptr == nullptr ? 0 : plan.num_workers;
  counts.work_tiles = plan.num_work_tiles;
  counts.combine_tiles = plan.num_combine_tiles;
  counts.combine_sources = plan.num_combine_tiles == 0 ? 0 : plan.combine_tiles[plan.num_combine_tiles - 1].source_end;
  return counts;
}

}  // namespace folio::inline v0::scheduler
