#include "scheduler/device_scheduler.hpp"

#include <algorithm>
#include <limits>

#include "core/error.hpp"
#include "scheduler/batch.hpp"
#include "scheduler/dynamic_scheduler.hpp"
#include "scheduler/plan_image.hpp"
#include "scheduler/static_scheduler.hpp"

namespace folio::inline v0::scheduler {
namespace {

/// The lower of two bounds; a batch's 0 is no bound.
int32_t bound_of(int32_t batch_bound, int32_t op_bound) {
  return batch_bound == 0 ? op_bound : std::min(batch_bound, op_bound);
}

/// Whether the tile space's cost stays exact, however long the requests are.
bool tile_space_fits(const SchedulerConfig& config) {
  const double kv_tiles =
      static_cast<double>(config.bounds->max_kv_len) / config.tile.kv_tokens + 2 * kMaxImageSegments;
  const double longest =
      static_cast<double>(config.tile_cost) + static_cast<double>(config.tile.rows) * config.row_cost;
  const double total =
      static_cast<double>(max_row_tiles(config, config.bounds->max_requests, config.bounds->max_tokens)) *
      config.num_kv_heads *
      (kv_tiles * longest + config.start_cost + static_cast<double>(config.tile.rows) * config.start_row_cost);
  return total * config.num_workers < static_cast<double>(kMaxScaledCost);
}

}  // namespace

std::string device_plan_refusal(const SchedulerConfig& config, const BatchView& batch) {
  check_config(config);
  if (!config.bounds) return "lengths on the device need an op that was prepared with GraphBounds";
  if (config.mask == MaskKind::kCustom) {
    return "custom masks are planned from host lengths; with lengths on the device, kNone and kCausal are offered";
  }
  check_counts(config, batch);
  check_mask_fields(config, batch);
  check_query_masks(config, batch);
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
  if (!tile_space_fits(config)) return "the op's bounds are so large that a batch's work might not fit in 64-bit sums";
  return {};
}

device::PlanInput device_plan_input(const SchedulerConfig& config, const BatchView& batch) {
  device::PlanInput input{};
  input.cu_q = batch.cu_q;
  input.q_first_pos = batch.q_first_pos;
  input.num_requests = batch.num_requests;
  input.num_tokens = batch.num_tokens;
  input.max_q_len = bound_of(batch.max_q_len, config.bounds->max_q_len);
  input.max_kv_len = std::min(bound_of(batch.max_kv_len, config.bounds->max_kv_len), kMaxKvLen);
  input.num_segments = static_cast<int32_t>(batch.segments.size());
  for (size_t s = 0; s < batch.segments.size(); ++s) {
    const KvSegment& segment = batch.segments[s];
    input.segments[s] = {.kv_len = segment.kv_len,
                         .first_pos = segment.first_pos,
                         .source = segment.source,
                         .mask = segment.mask,
                         .shard = segment.shard,
                         .bounds = mask_bounds(mask_rules(config), segment.mask)};
  }
  input.rules = mask_rules(config);
  input.masks = {batch.kv_start, batch.causal, batch.spans};
  input.num_kv_heads = config.num_kv_heads;
  input.group_size = config.num_q_heads / config.num_kv_heads;
  input.min_rows = config.min_rows;
  input.max_rows = config.max_rows;
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
  const bool dynamic = config.tile.schedule == Schedule::kDynamic;
  input.min_split_tiles = ceil_div(config.min_split_tokens, config.tile.kv_tokens);
  input.swizzle_tiles = config.l2_swizzle_tokens / config.tile.kv_tokens;
  input.split_budget = split_budget(config) / config.num_kv_heads;
  input.max_splits = config.max_splits;
  input.scratch = {.requests = batch.num_requests,
                   .row_tiles = max_row_tiles(config, batch.num_requests, batch.num_tokens),
                   .workers = config.num_workers,
                   .dynamic = dynamic,
                   .lpt = config.tile.order == TileOrder::kLpt};
  input.layout = carve_plan_image(counts_within_bounds(config));
  return input;
}

std::optional<device::SingleInput> single_tiles_input(const device::PlanInput& input, std::byte* image) {
  const bool one_tile =
      input.max_rows <= input.tile.rows || int64_t{input.max_q_len} * input.group_size <= int64_t{input.tile.rows};
  if (input.tile.schedule != Schedule::kDynamic || input.tile.order != TileOrder::kRequestOrder || !one_tile ||
      input.rules.has_more() || input.fixed_split_tokens > 0 || input.max_splits > 0 || input.num_segments != 1 ||
      input.segments[0].shard.world > 1) {
    return std::nullopt;
  }
  // Limits, so that sums of costs times heads stay below 2^31, and KV tiles times splits below 2^32.
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  const int64_t tile_cost = input.tile_cost + int64_t{input.tile.rows} * input.row_cost;
  const int64_t start_cost = input.start_cost + int64_t{input.tile.rows} * input.start_row_cost;
  const int64_t of_request = kMax / (std::max(input.num_requests, 1) * int64_t{input.num_kv_heads});
  const int64_t max_kv_tiles = std::min((of_request - start_cost) / tile_cost, kMax / (input.split_budget + 1));
  const int64_t min_split_cost = input.min_split_tiles * (int64_t{input.tile_cost} + input.row_cost);
  if (of_request <= start_cost || max_kv_tiles < 1 || min_split_cost > kMax / 32) return std::nullopt;
  // Most requests have max_q_len tokens.
  const int64_t common_rows = std::min(int64_t{input.max_q_len} * input.group_size, int64_t{input.tile.rows});
  return device::SingleInput{.cu_q = input.cu_q,
                             .q_first_pos = input.q_first_pos,
                             .kv_len = input.segments[0].kv_len,
                             .first_pos = input.segments[0].first_pos,
                             .lengths = reinterpret_cast<int32_t*>(image + input.layout.lengths),
                             .header = reinterpret_cast<PlanImageHeader*>(image),
                             .work_tiles = reinterpret_cast<WorkTile*>(image + input.layout.work_tiles),
                             .combine_tiles = reinterpret_cast<CombineTile*>(image + input.layout.combine_tiles),
                             .combine_sources = reinterpret_cast<int32_t*>(image + input.layout.combine_sources),
                             .bounds = input.segments[0].bounds,
                             .num_requests = input.num_requests,
                             .num_tokens = input.num_tokens,
                             .max_q_len = input.max_q_len,
                             .max_kv_len = input.max_kv_len,
                             .group_size = input.group_size,
                             .min_rows = input.min_rows,
                             .max_rows = input.max_rows,
                             .tile_rows = input.tile.rows,
                             .kv_tokens = static_cast<uint32_t>(input.tile.kv_tokens),
                             .tile_cost = static_cast<uint32_t>(input.tile_cost),
                             .row_cost = static_cast<uint32_t>(input.row_cost),
                             .start_cost = static_cast<uint32_t>(input.start_cost),
                             .start_row_cost = static_cast<uint32_t>(input.start_row_cost),
                             .start_free_rows = input.start_free_rows,
                             .max_kv_tiles = static_cast<uint32_t>(max_kv_tiles),
                             .num_kv_heads = static_cast<uint32_t>(input.num_kv_heads),
                             .num_workers = static_cast<uint32_t>(input.num_workers),
                             .min_split_tiles = static_cast<uint32_t>(input.min_split_tiles),
                             .split_budget = static_cast<int32_t>(input.split_budget),
                             .common_rows = static_cast<int32_t>(common_rows),
                             .common_tile_cost = static_cast<uint32_t>(input.tile_cost + common_rows * input.row_cost)};
}

}  // namespace folio::inline v0::scheduler
