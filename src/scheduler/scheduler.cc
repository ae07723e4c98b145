#include "scheduler/scheduler.hpp"

#include <algorithm>
#include <limits>

#include "scheduler/batch.hpp"
#include "scheduler/dynamic_scheduler.hpp"
#include "scheduler/plan_storage.hpp"
#include "scheduler/static_scheduler.hpp"
#include "scheduler/tile_space.hpp"

namespace folio::inline v0::scheduler {

PlanStorage::PlanStorage() : arrays_(std::make_unique<Arrays>()) {}
PlanStorage::~PlanStorage() = default;
PlanStorage::PlanStorage(PlanStorage&&) noexcept = default;
PlanStorage& PlanStorage::operator=(PlanStorage&&) noexcept = default;

namespace {

/// Upper bound of the rows of a row tile. Row tiles of requests are no longer than a request; row tiles of groups may
/// be.
int64_t max_rows(const SchedulerConfig& config) {
  const int64_t rows = config.tile.rows;
  if (!config.bounds) return rows;
  const int64_t tokens = config.bounds->max_shared_levels > 0 ? config.bounds->max_tokens : config.bounds->max_q_len;
  return std::min(rows, tokens * (config.num_q_heads / config.num_kv_heads));
}

}  // namespace

int64_t max_partial_rows(const SchedulerConfig& config) {
  check_config(config);
  const bool dynamic = config.tile.schedule == Schedule::kDynamic;
  int64_t cut_rows = 0;
  if (dynamic) {
    // The heads of a claim have no more rows together than a work tile.
    const int64_t claimed = std::min<int64_t>(config.tile.rows, max_rows(config) * max_claimed_heads(config));
    cut_rows = split_budget(config) * (config.determinism >= Determinism::kBatchInvariant ? 1 : claimed);
  } else if (config.determinism >= Determinism::kBatchInvariant) {
    cut_rows = fixed_split_budget(config);
  } else {
    // A cut makes two partial results, each of at most a row tile.
    cut_rows = int64_t{2} * config.num_workers * config.tile.rows;
  }
  if (config.num_workers == 1) cut_rows = 0;
  if (!config.bounds || config.bounds->max_shared_levels == 0) return cut_rows;
  // Each row has one result per shared level and one of its own segments, besides what cuts add.
  const int64_t levels = int64_t{config.bounds->max_shared_levels} + 1;
  const int64_t rows = int64_t{config.bounds->max_tokens} * config.num_q_heads;
  const int64_t max = std::numeric_limits<int32_t>::max();
  return std::min(max, rows > max / levels ? max : rows * levels + cut_rows);
}

PlanView make_plan(const SchedulerConfig& config, const BatchView& batch, PlanStorage& storage) {
  PlanStorage::Arrays& arrays = storage.arrays();
  arrays.view = PlanView{};
  try {
    check_config(config);
    read_batch(config, batch, arrays);
    const TileSpaceTotals totals = build_tile_space(config, arrays);
    if (config.tile.schedule == Schedule::kDynamic) {
      schedule_dynamic(config, totals, arrays);
    } else {
      schedule_static(config, totals, arrays);
    }
  } catch (...) {
    arrays.view = PlanView{};
    throw;
  }
  return arrays.view;
}

}  // namespace folio::inline v0::scheduler
