#pragma once

#include <cstdint>

#include "scheduler/device/single_tiles.hpp"

namespace folio::inline v0::scheduler::cuda {

/// The fast path (single_tiles.hpp) for at most 32 requests, by one warp with one request per lane. Lanes exchange
/// data through registers. It makes the same plan as schedule_single_tiles and make_single_work_tile, with a shorter
/// dependency chain: for short work all trial sizes are tried side by side, and a row tile's splits are those its
/// trial counted.
class FewRequests {
 public:
  static constexpr int32_t kMax = 32;

  /// `rule`: shared memory of this warp only.
  __device__ __forceinline__ FewRequests(const device::SingleInput& in, device::SingleRule& rule)
      : in_(in), rule_(rule), lane_(static_cast<int32_t>(threadIdx.x) % 32) {}

  /// Divides the batch. With `writes`, writes the image's lengths and counts. Returns the number of work tiles, or -1
  /// where the batch is left to schedule_batch.
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
    const int32_t num_work_tiles = totals[device::kDynamicTileCount] * heads;
    if (writes && lane_ == 31) device::write_counts(in_, totals, total[0]);
    return num_work_tiles;
  }

  /// Work tile `index`, chosen per lane; its source and combine tile go to the image. All lanes call it. The result
  /// is meaningless for an `index` beyond the last work tile.
  __device__ __forceinline__ WorkTile work_tile(int32_t index, int32_t num_work_tiles) const {
    const auto heads = static_cast<int32_t>(in_.num_kv_heads);
    const auto dynamic_tile = static_cast<int32_t>(static_cast<uint32_t>(index) / in_.num_kv_heads);
    int32_t r = 0;
#pragma unroll
    for (int32_t step = kMax / 2; step > 0; step /= 2) {
      if (step >= in_.num_requests) continue;
      const int32_t next = r + step;
      const int32_t dynamic_tiles = __shfl_sync(kAll, tile_.dynamic_tiles, next);
      if (next < in_.num_requests && dynamic_tiles <= dynamic_tile) r = next;
    }
    const device::SingleTile tile = of_lane(tile_, r);
    const FastDivisor splits = of_lane(splits_, r);
    if (index >= num_work_tiles) return {};
    const int32_t split = dynamic_tile - tile.dynamic_tiles;
    TokenRange split_tiles;
    if (equal_) {
      const auto place = static_cast<uint32_t>(split);
      split_tiles = {tile.kv_tiles * place / splits, tile.kv_tiles * (place + 1) / splits};
    } else if (tile.splits > 1) {
      split_tiles = split_of(rule_, device::span_of(in_, tile), split);
    }
    return device::make_work_tile(in_, tile, r, index - dynamic_tile * heads, split, split_tiles);
  }

 private:
  static constexpr uint32_t kAll = 0xffffffffu;

  /// Lane `lane`'s value. All lanes call it.
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

  /// Exclusive prefix sums over the lanes, and the totals.
  template <typename Int, size_t N>
  __device__ __forceinline__ void sum_before(Int (&values)[N], Int (&total)[N]) const {
    Int up_to[N];
#pragma unroll
    for (size_t i = 0; i < N; ++i) up_to[i] = values[i];
#pragma unroll
    for (int32_t distance = 1; distance < kMax; distance *= 2) {
#pragma unroll
      for (size_t i = 0; i < N; ++i) {
        const Int lower = __shfl_up_sync(kAll, up_to[i], static_cast<uint32_t>(distance));
        if (lane_ >= distance) up_to[i] += lower;
      }
    }
#pragma unroll
    for (size_t i = 0; i < N; ++i) {
      total[i] = __shfl_sync(kAll, up_to[i], kMax - 1);
      values[i] = up_to[i] - values[i];
    }
  }

  /// Counts the row tiles' KV splits. `total`: cost of one KV head's work.
  __device__ __forceinline__ void cut(uint32_t total) {
    const device::SingleTileSpace space = device::tile_space_of(in_, total);
    equal_ = in_.num_workers == 1u;  // nothing is split
    if (is_short(space)) {
      const FastDivisor mine(trial_split_cost(space, min(lane_, kSplitTrials - 1)));
      const uint32_t tile_cost = device::kv_tile_cost(in_, tile_);
      int32_t chosen = 0;
#pragma unroll
      for (int32_t trial = kSplitTrials - 1; trial >= 0; --trial) {
        const auto splits =
            static_cast<int32_t>(trial_splits(of_lane(mine, trial), space.min_split_tiles, tile_.kv_tiles, tile_cost));
        const int32_t all = __reduce_add_sync(kAll, tile_.rows > 0 ? splits : 0);
        if (static_cast<uint32_t>(all * space.num_kv_heads) <= in_.num_workers) chosen = splits;
      }
      equal_ = chosen > 0;
      if (equal_ && tile_.rows > 0) tile_.splits = chosen;
    }
    if (equal_) {
      splits_ = static_cast<uint32_t>(tile_.splits);
      return;
    }
    if (lane_ == 0) {
      rule_.min_split_tiles = space.min_split_tiles;
      rule_.swizzle_heads = space.num_kv_heads;
    }
    if (lane_ < kMaxSplitWaves) {
      rule_.split_waves[lane_] = split_wave(space, lane_);
      if (is_last_split_wave(space, lane_) && (lane_ == 0 || !is_last_split_wave(space, lane_ - 1)))
        rule_.num_split_waves = lane_ + 1;
    }
    __syncwarp();
    device::split_single_tile(in_, rule_, tile_);
  }

  /// Numbers dynamic tiles, sources, combine tiles and partial rows.
  __device__ __forceinline__ void number(int32_t (&totals)[device::kSingleCounts]) {
    int32_t before[device::kSingleCounts] = {};
    device::add_counts(before, tile_);
    sum_before(before, totals);
    if (totals[device::kSourceCount] > in_.split_budget) {
      // Row tiles beyond the budget, in claim order, stay whole.
      if (tile_.splits > 1 && before[device::kSourceCount] + tile_.splits > in_.split_budget) tile_.splits = 1;
#pragma unroll
      for (int32_t& count : before) count = 0;
      device::add_counts(before, tile_);
      sum_before(before, totals);
    }
    tile_.dynamic_tiles = before[device::kDynamicTileCount];
    tile_.sources = before[device::kSourceCount];
    tile_.combine_tiles = before[device::kCombineTileCount];
    tile_.partial_rows = before[device::kRowCount];
  }

  const device::SingleInput& in_;
  device::SingleRule& rule_;  ///< where splits have different sizes
  const int32_t lane_;
  device::SingleTile tile_{};
  FastDivisor splits_ = 1;  ///< of this lane's row tile, where equal_
  bool equal_ = false;      ///< all splits of a row tile have the same size
};

}  // namespace folio::inline v0::scheduler::cuda
