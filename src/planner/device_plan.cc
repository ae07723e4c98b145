#include "planner/device_plan.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "planner/batch_checks.hpp"
#include "planner/claim_work.hpp"
#include "planner/cut_line.hpp"
#include "planner/plan_layout.hpp"

namespace folio::inline v0::planner {
namespace {

/// An upper bound of what a batch says of itself: none is 0.
int32_t bound_of(int32_t batch_bound, int32_t op_bound) {
  return batch_bound == 0 ? op_bound : std::min(batch_bound, op_bound);
}

/// Whether the work line's cost stays exact however long the requests are.
bool line_fits(const PlannerConfig& config) {
  const double kv_tiles =
      static_cast<double>(config.bounds->max_kv_len) / config.tile.kv_tokens + 2 * kMaxImageSegments;
  const double dearest =
      static_cast<double>(config.tile_cost) + static_cast<double>(config.tile.rows) * config.row_cost;
  const double total =
      static_cast<double>(most_row_tiles(config, config.bounds->max_requests, config.bounds->max_tokens)) *
      config.num_kv_heads *
      (kv_tiles * dearest + config.start_cost + static_cast<double>(config.tile.rows) * config.start_row_cost);
  return total * config.num_workers < static_cast<double>(kMaxScaledLine);
}

}  // namespace

std::string device_plan_refusal(const PlannerConfig& config, const BatchView& batch) {
  check_config(config);
  if (!config.bounds) return "lengths on the device need an op that was prepared with GraphBounds";
  if (config.mask == MaskKind::kCustom) {
    return "custom masks are planned from host lengths; with lengths on the device, kNone and kCausal are offered";
  }
  check_counts(config, batch);
  check_mask_fields(config, batch);
  const auto num_segments = static_cast<int64_t>(batch.segments.size());
  for (int64_t s = 0; s < num_segments; ++s) {
    if (batch.segments[static_cast<size_t>(s)].group_indptr != nullptr) {
      return core::message("segment ", s,
                           " is shared by groups of requests; shared segments are planned from host lengths only");
    }
    check_segment_fields(config, batch, s);
  }
  if (num_segments > kMaxImageSegments) {
    return core::message("the batch has ", num_segments, " segments; with lengths on the device, up to ",
                         kMaxImageSegments, " are offered");
  }
  if (!line_fits(config)) return "the op's bounds are so large that a batch's work might not fit in 64-bit sums";
  return {};
}

device::PlanInput device_plan_input(const PlannerConfig& config, const BatchView& batch) {
  device::PlanInput input{};
  input.cu_q = batch.cu_q;
  input.q_first_pos = batch.q_first_pos;
  input.num_requests = batch.num_requests;
  input.num_tokens = batch.num_tokens;
  input.max_q_len = bound_of(batch.max_q_len, config.bounds->max_q_len);
  input.max_kv_len = bound_of(batch.max_kv_len, config.bounds->max_kv_len);
  input.num_segments = static_cast<int32_t>(batch.segments.size());
  for (size_t s = 0; s < batch.segments.size(); ++s) {
    const KvSegment& segment = batch.segments[s];
    input.segments[s] = {.kv_len = segment.kv_len,
                         .first_pos = segment.first_pos,
                         .source = segment.source,
                         .mask = segment.mask,
                         .shard = segment.shard,
                         .sight = key_sight(config.mask, segment.mask, config.window_left, config.window_right)};
  }
  input.num_kv_heads = config.num_kv_heads;
  input.group_size = config.num_q_heads / config.num_kv_heads;
  input.least_rows = config.least_rows;
  input.most_rows = config.most_rows;
  input.tile = config.tile;
  input.num_workers = config.num_workers;
  const bool fixed_splits = config.determinism >= Determinism::kBatchInvariant;
  input.fixed_split_tokens = fixed_splits ? config.fixed_split_tokens : 0;
  input.tile_cost = config.tile_cost;
  input.row_cost = config.row_cost;
  input.start_cost = config.start_cost;
  input.start_row_cost = config.start_row_cost;
  input.start_free_rows = config.start_free_rows;
  input.fixed_split_budget = fixed_split_budget(config);
  const bool claimed = config.tile.schedule == Schedule::kClaimed;
  input.least_claim_tiles = ceil_div(config.least_claim_tokens, config.tile.kv_tokens);
  input.section_tiles = config.section_tokens / config.tile.kv_tokens;
  input.claim_budget = claim_budget(config) / config.num_kv_heads;
  const bool one_tile =
      config.most_rows <= config.tile.rows || int64_t{input.max_q_len} * input.group_size <= int64_t{config.tile.rows};
  input.single_tiles =
      claimed && config.tile.order == ClaimOrder::kAsGiven && !fixed_splits && input.num_segments == 1 && one_tile;
  input.scratch = {.requests = batch.num_requests,
                   .row_tiles = most_row_tiles(config, batch.num_requests, batch.num_tokens),
                   .workers = config.num_workers,
                   .claimed = claimed,
                   .dearest_first = config.tile.order == ClaimOrder::kDearestFirst};
  input.layout = carve_plan_image(counts_within_bounds(config));
  return input;
}

}  // namespace folio::inline v0::planner
