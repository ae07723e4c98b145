#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "folio/types/attention.hpp"
#include "scheduler/plan_view.hpp"

namespace folio::inline v0::scheduler {

/// What the scheduler knows of an op: the splits of its config that change the work, the kernel's tile, the machine's
/// width.
struct SchedulerConfig {
  int32_t num_q_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t page_size = 0;
  MaskKind mask = MaskKind::kCausal;
  int32_t window_left = -1;
  int32_t window_right = -1;
  Determinism determinism = Determinism::kRunToRun;
  TileShape tile;
  int32_t num_workers = 1;
  /// Keys of one split at kBatchInvariant and above: a multiple of tile.kv_tokens.
  int32_t fixed_split_tokens = 2048;
  /// Cost of visiting one tile of keys with n rows: tile_cost + n * row_cost (any unit; loads are balanced in it).
  int32_t tile_cost = 16;
  int32_t row_cost = 1;
  /// Cost of beginning and ending an output tile, in the same unit: start_cost, and start_row_cost for each of its rows
  /// beyond start_free_rows. Counted once an output tile, even if it is cut.
  int32_t start_cost = 0;
  int32_t start_row_cost = 0;
  int32_t start_free_rows = 0;
  /// Schedule::kDynamic: keys that are worth a work tile of their own.
  int32_t min_split_tokens = 256;
  /// TileOrder::kLpt: keys of one KV head, K and V, that the cache has room for which all workers share; 0 is
  /// any number.
  int64_t l2_swizzle_tokens = 0;
  std::optional<GraphBounds> bounds;
  /// Packed rows of the requests that the plan takes; others get no work tiles, as if they had no queries. A batch with
  /// shared segments is taken as a whole, or not, by its longest request's; at kBatchInvariant and above by the plan
  /// whose rows have no end.
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

/// Most partial rows of any batch without shared segments; with bounds, of any batch within them. The scheduler keeps
/// to it: where finer splitting would need more, it splits less. Up to kRunToRun that is two row tiles a worker; above,
/// where every fixed split after a cut is a result of its own, 16 row tiles or 1024 rows a worker, whichever is more.
/// Dynamic schedules: up to kRunToRun 16 row tiles a worker, longest first 6 (with bounds, of no more rows than a
/// request may have), above as many as with lists.
int64_t max_partial_rows(const SchedulerConfig& config);

/// Divides a batch over workers. Pure: equal inputs give equal plans. Host lengths only. The view is valid until the
/// storage is used again. Throws Error(kInvalidArgument) naming the request and segment at fault; the storage then
/// holds no plan. O(requests x segments + row tiles x segments + work tiles), whatever the number of keys.
///
/// Loads (cost of a worker's work tiles; one that sees nothing counts as a tile) are less than one split granule away
/// from their mean, and so differ by less than two; where all split granules cost the same, they differ by at most one.
/// A split granule is the longest KV tile of the batch, or at kBatchInvariant and above its longest fixed split, with
/// what it costs to begin its output tile. Output tiles that may not be cut are exempt there: those beyond the budget
/// of max_partial_rows, and those whose result is folded after a shared segment's. That is so with static schedule;
/// dynamic schedules leave the balance to the claiming (split_rule.hpp).
PlanView make_plan(const SchedulerConfig& config, const BatchView& batch, PlanStorage& storage);

}  // namespace folio::inline v0::scheduler
