#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "folio/types/attention.hpp"
#include "scheduler/plan_view.hpp"

namespace folio::inline v0::scheduler {

/// What the scheduler knows of an op: the fields of its config that change the work, the kernel's tile, the machine's
/// width.
struct SchedulerConfig {
  int32_t num_q_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t page_size = 0;
  MaskKind mask = MaskKind::kCausal;
  int32_t window_left = -1;
  int32_t window_right = -1;
  int32_t attention_chunk = 0;
  int32_t span_window_left = 0;
  Features features;  ///< kSpans, kRequestCausal, kKvStart: what a batch may have
  Determinism determinism = Determinism::kRunToRun;
  TileShape tile;
  int32_t num_workers = 1;
  /// Keys of one split at kBatchInvariant and above: a multiple of tile.kv_tokens.
  int32_t fixed_split_tokens = 2048;
  /// Cost of visiting one tile of keys with n rows: tile_cost + n * row_cost (any unit; loads are balanced in it).
  int32_t tile_cost = 16;
  int32_t row_cost = 1;
  /// Cost of prologue and epilogue of an output tile, in the same unit: start_cost, and start_row_cost for each row
  /// beyond start_free_rows. Counted once per output tile, even if it is split.
  int32_t start_cost = 0;
  int32_t start_row_cost = 0;
  int32_t start_free_rows = 0;
  /// Schedule::kDynamic: KV heads that a worker computes together, where their rows fit a work tile (1: no more than
  /// one). Batches of few row tiles are split for that.
  int32_t heads_together = 1;
  /// kDynamic in LPT order: workers of unlike speed, as cores are that others use too. Splits then leave something for
  /// the fast ones to claim, where every worker would get one of equal size.
  bool uneven_workers = false;
  /// Schedule::kDynamic: fewest keys of a KV split.
  int32_t min_split_tokens = 256;
  /// TileOrder::kLpt: keys of one KV head, K and V, that the L2 has room for; 0: any number. Decides the L2 head
  /// swizzle.
  int64_t l2_swizzle_tokens = 0;
  /// Most KV splits of an output tile: of a query's keys, in all of a plan. 0: no bound. Below kBatchInvariant only,
  /// whose splits are fixed.
  int32_t max_splits = 0;
  std::optional<GraphBounds> bounds;
  /// Requests of [min_rows, max_rows] packed rows belong to this plan; others get no work tiles, as if they had no
  /// queries. A batch with shared segments is not divided: its longest request decides. At kBatchInvariant and above
  /// such a batch belongs to the plan with unlimited max_rows.
  int32_t min_rows = 0;
  int32_t max_rows = INT32_MAX;
};

/// A plan's memory. Reused from plan to plan: it grows to the largest batch seen, and allocates nothing when warm.
class PlanStorage {
 public:
  PlanStorage();
  ~PlanStorage();
  PlanStorage(PlanStorage&&) noexcept;
  PlanStorage& operator=(PlanStorage&&) noexcept;
  struct Arrays;
  Arrays& arrays() noexcept { return *arrays_; }

 private:
  std::unique_ptr<Arrays> arrays_;
};

/// Upper bound of the partial rows of any batch without shared segments; with config.bounds, of any batch within
/// them. The scheduler keeps to it by splitting less.
///
/// Static schedule: up to kRunToRun two row tiles a worker. Above, every fixed split after a cut is a partial result:
/// 16 row tiles or 1024 rows a worker, whichever is more. Dynamic schedule: up to kRunToRun 16 row tiles a worker, 6
/// in LPT order (with bounds, of no more rows than a request may have); above, the same as static.
int64_t max_partial_rows(const SchedulerConfig& config);

/// Divides a batch over workers. Pure: equal inputs give equal plans. Takes host lengths only. The view is valid
/// until the storage is used again. Throws Error(kInvalidArgument) naming the request and segment at fault; the
/// storage then holds no plan. O(requests x segments + row tiles x segments + work tiles), whatever the number of
/// keys.
///
/// Static schedule: a load is the cost of a worker's work tiles; a work tile without visible keys counts as one KV
/// tile. Loads are less than one split granule away from their mean, so they differ by less than two. Where all
/// granules cost the same, loads differ by at most one. A granule is the batch's costliest KV tile with its start
/// cost; at kBatchInvariant and above it is the costliest fixed split. Output tiles that may not be cut are exempt:
/// those beyond the budget of max_partial_rows, and those whose result is folded after a shared segment's. Where
/// max_splits would be exceeded, fewer workers get work, all about as much as one another.
///
/// Dynamic schedule: workers balance themselves by claiming (split_rule.hpp).
PlanView make_plan(const SchedulerConfig& config, const BatchView& batch, PlanStorage& storage);

}  // namespace folio::inline v0::scheduler
