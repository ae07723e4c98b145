#include "scheduler/scheduler.hpp"

#include <algorithm>
#include <limits>

#include "scheduler/batch_checks.hpp"
#include "scheduler/batch_lengths.hpp"
#include "scheduler/claim_work.hpp"
#include "scheduler/cut_line.hpp"
#include "scheduler/emit_work.hpp"
#include "scheduler/plan_storage.hpp"
#include "scheduler/work_line.hpp"

namespace folio::inline v0::scheduler {

PlanStorage::PlanStorage() : arrays_(std::make_unique<Arrays>()) {}
PlanStorage::~PlanStorage() = default;
PlanStorage::PlanStorage(PlanStorage&&) noexcept = default;
PlanStorage& PlanStorage::operator=(PlanStorage&&) noexcept = default;

namespace {

/// Rows of any row tile. Row tiles of requests are no longer than a request's rows; those of groups may be.
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
    cut_rows = split_budget(config) * (config.determinism >= Determinism::kBatchInvariant ? 1 : max_rows(config));
  } else if (config.determinism >= Determinism::kBatchInvariant) {
    cut_rows = fixed_split_budget(config);
  } else {
    // A cut leaves two partial results, each of at most a row tile.
    cut_rows = int64_t{2} * config.num_workers * config.tile.rows;
  }
  if (config.num_workers == 1) cut_rows = 0;
  if (!config.bounds || config.bounds->max_shared_levels == 0) return cut_rows;
  // One result a row at each shared level and one of the request's own segments, besides what cuts add.
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
      cut_tile_space(config, totals.space, arrays);
      emit_tiles(config, totals, arrays);
    }
  } catch (...) {
    arrays.view = PlanView{};
    throw;
  }
  return arrays.view;
}

}  // namespace folio::inline v0::scheduler
