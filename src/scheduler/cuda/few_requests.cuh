#pragma once

#include <cstdint>

#include "scheduler/device/single_tiles.hpp"

namespace folio::inline v0::scheduler::cuda {

/// Batches of single_tiles.hpp with at most 32 requests, by a warp: a lane has a request, and what lanes tell each
/// other goes through registers. The same plan as plan_single_tiles and make_single_item make, in a shorter chain of
/// instructions: where the work is short, the sizes of pieces are tried side by side, and a row tile's parts are those
/// that its trial has counted.
class FewRequests {
 public:
  static constexpr int32_t kMost = 32;

  /// `rule`: shared memory of this warp alone.
  __device__ __forceinline__ FewRequests(const device::SingleInput& in, device::SingleRule& rule)
      : in_(in), rule_(rule), lane_(static_cast<int32_t>(threadIdx.x) % 32) {}

  /// Divides the batch; with `writes`, the image gets its lengths and counts. The number of work tiles, or -1 where the
  /// batch is to be left to divide_batch.
  __device__ __forceinline__ int32_t divide(bool writes) {
    const bool well = lane_ >= in_.num_requests || device::read_single_tile(in_, lane_, writes, tile_);
    if (__all_sync(kAll, well ? 1 : 0) == 0) return -1;
    uint32_t cost[1] = {device::cost_of(in_, tile_)};
    uint32_t total[1];
    sum_before(cost, total);
    tile_.cost_before = cost[0];
    cut(total[0]);
    int32_t totals[device::kSingleCounts];
    number(totals);
    const auto heads = static_cast<int32_t>(in_.num_kv_heads);
    const int32_t num_work_tiles = totals[device::kClaimCount] * heads;
    if (writes && lane_ == 31) device::write_counts(in_, totals);
    return num_work_tiles;
  }

  /// Item number `index` of a lane's own; its merge, if it is one of several sources, goes to the image. By all lanes;
  /// what a lane gets whose `index` is no item's means nothing.
  __device__ __forceinline__ WorkTile item(int32_t index, int32_t num_work_tiles) const {
    const auto heads = static_cast<int32_t>(in_.num_kv_heads);
    const auto claim = static_cast<int32_t>(static_cast<uint32_t>(index) / in_.num_kv_heads);
    int32_t r = 0;
#pragma unroll
    for (int32_t step = kMost / 2; step > 0; step /= 2) {
      if (step >= in_.num_requests) continue;
      const int32_t next = r + step;
      const int32_t claims = __shfl_sync(kAll, tile_.claims, next);
      if (next < in_.num_requests && claims <= claim) r = next;
    }
    const device::SingleTile tile = of_lane(tile_, r);
    const Divisor32 parts = of_lane(parts_, r);
    if (index >= num_work_tiles) return {};
    const int32_t part = claim - tile.claims;
    TokenRange piece;
    if (equal_) {
      const auto place = static_cast<uint32_t>(part);
      piece = {tile.kv_tiles * place / parts, tile.kv_tiles * (place + 1) / parts};
    } else if (tile.parts > 1) {
      piece = piece_of(rule_, device::span_of(in_, tile), part);
    }
    return device::make_item_of(in_, tile, r, index - claim * heads, part, piece);
  }

 private:
  static constexpr uint32_t kAll = 0xffffffffu;

  /// What lane `lane` has, by all lanes.
  template <typename T>
  __device__ __forceinline__ static T of_lane(const T& mine, int32_t lane) {
    static_assert(sizeof(T) % sizeof(uint32_t) == 0);
    uint32_t words[sizeof(T) / sizeof(uint32_t)];
    memcpy(words, &mine, sizeof(T));
#pragma unroll
    for (uint32_t& word : words) word = __shfl_sync(kAll, word, lane);
    T other;
    memcpy(&other, words, sizeof(T));
    return other;
  }

  /// Prefix sums over the lanes: what those before have, and all.
  template <typename Int, size_t N>
  __device__ __forceinline__ void sum_before(Int (&values)[N], Int (&total)[N]) const {
    Int up_to[N];
#pragma unroll
    for (size_t i = 0; i < N; ++i) up_to[i] = values[i];
#pragma unroll
    for (int32_t distance = 1; distance < kMost; distance *= 2) {
#pragma unroll
      for (size_t i = 0; i < N; ++i) {
        const Int lower = __shfl_up_sync(kAll, up_to[i], static_cast<uint32_t>(distance));
        if (lane_ >= distance) up_to[i] += lower;
      }
    }
#pragma unroll
    for (size_t i = 0; i < N; ++i) {
      total[i] = __shfl_sync(kAll, up_to[i], kMost - 1);
      values[i] = up_to[i] - values[i];
    }
  }

  /// The row tiles' parts. `total`: the cost of one KV head's work.
  __device__ __forceinline__ void cut(uint32_t total) {
    const device::SingleLine line = device::line_of(in_, total);
    equal_ = in_.num_workers == 1u;  // all stays whole
    if (is_short(line)) {
      const Divisor32 mine(trial_piece(line, min(lane_, kPieceTrials - 1)));
      const uint32_t tile_cost = device::kv_tile_cost(in_, tile_);
      int32_t chosen = 0;
#pragma unroll
      for (int32_t trial = kPieceTrials - 1; trial >= 0; --trial) {
        const auto parts =
            static_cast<int32_t>(trial_parts(of_lane(mine, trial), line.least_tiles, tile_.kv_tiles, tile_cost));
        const int32_t all = __reduce_add_sync(kAll, tile_.rows > 0 ? parts : 0);
        if (static_cast<uint32_t>(all * line.num_kv_heads) <= in_.num_workers) chosen = parts;
      }
      equal_ = chosen > 0;
      if (equal_ && tile_.rows > 0) tile_.parts = chosen;
    }
    if (equal_) {
      parts_ = static_cast<uint32_t>(tile_.parts);
      return;
    }
    if (lane_ == 0) {
      rule_.least_tiles = line.least_tiles;
      rule_.heads_together = line.num_kv_heads;
    }
    if (lane_ < kMostClaimRounds) {
      rule_.rounds[lane_] = claim_round(line, lane_);
      if (is_last_round(line, lane_) && (lane_ == 0 || !is_last_round(line, lane_ - 1))) rule_.num_rounds = lane_ + 1;
    }
    __syncwarp();
    device::cut_single_tile(in_, rule_, tile_);
  }

  /// Numbers claims, sources, merges and partial rows.
  __device__ __forceinline__ void number(int32_t (&totals)[device::kSingleCounts]) {
    int32_t before[device::kSingleCounts] = {};
    device::add_counts(before, tile_);
    sum_before(before, totals);
    if (totals[device::kSourceCount] > in_.claim_budget) {
      // What comes later in the line than the budget lasts stays whole.
      if (tile_.parts > 1 && before[device::kSourceCount] + tile_.parts > in_.claim_budget) tile_.parts = 1;
#pragma unroll
      for (int32_t& count : before) count = 0;
      device::add_counts(before, tile_);
      sum_before(before, totals);
    }
    tile_.claims = before[device::kClaimCount];
    tile_.sources = before[device::kSourceCount];
    tile_.merges = before[device::kMergeCount];
    tile_.partial_rows = before[device::kRowCount];
  }

  const device::SingleInput& in_;
  device::SingleRule& rule_;  ///< where pieces are not equal
  const int32_t lane_;
  device::SingleTile tile_{};
  Divisor32 parts_ = 1;  ///< of this lane's row tile, where pieces are equal
  bool equal_ = false;   ///< a row tile's pieces are equal
};

}  // namespace folio::inline v0::scheduler::cuda
