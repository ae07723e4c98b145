#pragma once

#include "kernels/cuda/sm90/common/softmax.cuh"
#include "kernels/cuda/sm90/mla/edge_values.cuh"
#include "kernels/cuda/sm90/mla/logits.cuh"
#include "kernels/cuda/sm90/mla/row_end.cuh"
#include "ptx/tma.cuh"

/// A math warpgroup: all of an item's rows, half of the values' components. Of every two tiles it makes one's weights,
/// the other warpgroup the other's; both multiply all of them with their halves, in the order of the tiles.
namespace folio::inline v0::kernels::cuda::sm90::mla {

/// `General`: there is a soft cap, ALiBi or a custom mask.
template <typename T, bool General>
class MathGroup {
  static constexpr int32_t kScores = kTokens / 2;  ///< of a lane

 public:
  __device__ __forceinline__ MathGroup(const MlaParams& params, unsigned char* memory, SharedState& state)
      : params_(params.attention),
        state_(state),
        group_(static_cast<int32_t>(threadIdx.x) / kGroupThreads - 1),
        ring_(ptx::shared_address(memory)),
        full_(ptx::shared_address(state.full)),
        empty_(ptx::shared_address(state.empty)),
        told_(ptx::shared_address(state.told)),
        weighed_(ptx::shared_address(state.weighed)),
        warp_(static_cast<int32_t>(threadIdx.x) % kGroupThreads / 32),
        lane_(static_cast<int32_t>(threadIdx.x) % 32),
        first_row_(warp_ * 16 + lane_ / 4) {}

  __device__ __forceinline__ void run() {
    ChainState chain;
    for (int32_t number = 0;; ++number) {
      const int32_t slot = number % kItems;
      ptx::mbarrier_wait(ptx::shared_address(state_.item_full) + 8 * slot, number / kItems & 1);
      const ItemContext& context = state_.contexts[slot];
      if (context.all_done) return;
      const RowInfo& rows = state_.rows[slot];
      begin_item(context, rows);
      accumulate(context, rows);
      float max[2];
      float sum[2];
      join(context, number, max, sum);
      const LanePlace place{first_row_, group_ * kHalfColumns * 64 + 2 * (lane_ % 4), group_ == 0 && lane_ % 4 == 0};
      end_item(params_, context, rows, max, sum, o_, place, chain);
      num_tiles_ += static_cast<uint32_t>(context.num_tiles);
      ptx::mbarrier_arrive(ptx::shared_address(state_.item_empty) + 8 * slot);
    }
  }

 private:
  __device__ __forceinline__ void begin_item(const ItemContext& context, const RowInfo& rows) {
    ptx::fence_view_async_shared();  // the queries were copied by threads
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      top_[h] = -INFINITY;
      sum_[h] = 0.0f;
      scale_[h] = 1.0f;
      const int32_t row = first_row_ + 8 * h;
      if (General || row >= context.num_rows) continue;
      const float scale = rows.scale[row];
      scale_[h] = fabsf(scale) > 0.0f ? fabsf(scale) : 1.0f;
    }
#pragma unroll
    for (int32_t b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int32_t i = 0; i < kBlockValues; ++i) o_[b][i] = 0.0f;
    }
  }

  /// A tile of an item: its number among the CTA's tiles, and where its keys and values are in the ring.
  struct Tile {
    uint32_t number;
    int32_t first;  ///< local token
    Place keys;
    Place values;
    bool is_first;  ///< of the item
  };
  __device__ __forceinline__ Tile tile_at(const ItemContext& context, int32_t i) const {
    const uint32_t number = num_tiles_ + static_cast<uint32_t>(i);
    const int32_t first = (context.last_tile - i) * kTokens;
    if (context.inside) {
      const Place place = place_of(ring_number_ + static_cast<uint32_t>(i));
      return {number, first, place, place, i == 0};
    }
    const uint32_t keys = ring_number_ + 2 * static_cast<uint32_t>(i);
    return {number, first, place_of(keys), place_of(keys + 1), i == 0};
  }
  __device__ __forceinline__ bool is_mine(uint32_t number) const {
    return static_cast<int32_t>(number % 2) == group_;
  }

  /// Even tiles' weights are the first group's. The second makes those of the next tile while it multiplies an even
  /// one, unless values have tiles of their own: there is no room for the next tile's keys then.
  __device__ __forceinline__ void accumulate(const ItemContext& context, const RowInfo& rows) {
    const int32_t count = context.num_tiles;
    int32_t last_mine = count - 1;
    if (last_mine >= 0 && !is_mine(num_tiles_ + static_cast<uint32_t>(last_mine))) --last_mine;
    if (last_mine < 0) return_queries();
    bool ahead = false;
#pragma unroll 1
    for (int32_t i = 0; i < count; ++i) {
      const Tile tile = tile_at(context, i);
      if (is_mine(tile.number)) {
        if (!ahead) {
          weigh(context, rows, tile);
          if (i == last_mine) return_queries();
        }
        ahead = false;
        multiply(context, rows, tile);
        continue;
      }
      ahead = group_ == 1 && context.inside && i + 1 < count;
      if (!ahead) {
        multiply(context, rows, tile);
        continue;
      }
      const Tile next = tile_at(context, i + 1);
      if (is_plain(context, next)) {
        multiply_and_weigh(context, rows, tile, next);
      } else {
        weigh(context, rows, next);
        multiply(context, rows, tile);
      }
      if (i + 1 == last_mine) return_queries();
    }
    ring_number_ += static_cast<uint32_t>(context.inside ? count : 2 * count);
  }

  /// Whether a tile's scores become weights without a branch: the compiler waits for products before one.
  static __device__ __forceinline__ bool is_plain(const ItemContext& context, const Tile& tile) {
    return !General && !context.turned && !needs_mask(context.sight, tile.first);
  }

  __device__ __forceinline__ void return_queries() const {
    if (lane_ == 0) ptx::mbarrier_arrive(ptx::shared_address(&state_.queries_empty), 32);
  }

  static __device__ __forceinline__ uint32_t number_of(const Place& place, int32_t part) {
    return 8 * (place.stage * kParts + static_cast<uint32_t>(part));
  }
  __device__ __forceinline__ void await(const Place& place, int32_t part) const {
    ptx::mbarrier_wait(full_ + number_of(place, part), place.parity);
  }
  /// This lane has done with the part.
  __device__ __forceinline__ void release(const Place& place, int32_t part) const {
    ptx::mbarrier_arrive(empty_ + number_of(place, part));
  }
  /// So has this warp, which has read it in products alone.
  __device__ __forceinline__ void release_product(const Place& place, int32_t part) const {
    if (lane_ == 0) ptx::mbarrier_arrive(empty_ + number_of(place, part), 32);
  }
  __device__ __forceinline__ uint32_t tile_address(const Place& place) const {
    return ring_ + place.stage * static_cast<uint32_t>(kTileBytes);
  }
  /// Of the barriers by which the groups' equal warps tell each other of the tile of this number.
  __device__ __forceinline__ uint32_t pair_number(uint32_t tile) const {
    return 8 * (tile % 2 * kGroupWarps + static_cast<uint32_t>(warp_));
  }
  /// Of a tile of the other group's. Where its weights have come, so have its maxima, but synccheck reports a phase
  /// that nobody has asked for.
  __device__ __forceinline__ void await_maxima(uint32_t tile) const {
    ptx::mbarrier_wait(told_ + pair_number(tile), tile / 2 & 1);
  }
  /// This thread's weights of a tile, in four pieces.
  __device__ __forceinline__ uint32_t weights_address(const Tile& tile, int32_t piece) const {
    return tile_address(tile.keys) + static_cast<uint32_t>(kWeights) +
           16 * (static_cast<uint32_t>(piece) * kGroupThreads + threadIdx.x % kGroupThreads);
  }

  /// The weights of one of this group's tiles, to the place of its tail.
  __device__ __forceinline__ void weigh(const ItemContext& context, const RowInfo& rows, const Tile& tile) {
    float s[kScores];
    multiply_keys(context, tile, s);
    const int32_t column = tile.first + 2 * (lane_ % 4);
    if constexpr (General) {
      to_general_logits(params_, context, rows, first_row_, column, s);
    } else if (context.turned) {
      turn(rows, s);
    }
    if (needs_mask(context.sight, tile.first)) mask_scores(rows, first_row_, column, s);
    if (!tile.is_first) await_maxima(tile.number - 1);
    to_weights(tile, s);
    hand_over_weights(tile, s);
  }

  /// While `tile`, the other group's, is multiplied, the scores of `next` become weights.
  __device__ __forceinline__ void multiply_and_weigh(const ItemContext& context, const RowInfo& rows, const Tile& tile,
                                                     const Tile& next) {
    float s[kScores];
    multiply_keys(context, next, s);
    uint32_t p[kScores / 2];
    const uint32_t half = begin_multiply(context, rows, tile, p);
    multiply_values(half, p);
    static_cast<void>(
        ptx::mbarrier_test_wait(told_ + pair_number(tile.number), tile.number / 2 & 1));  // see await_maxima
    to_weights(next, s);
    hand_over_weights(next, s);
    end_multiply(tile);
  }

  __device__ __forceinline__ void hand_over_weights(const Tile& tile, const float (&s)[kScores]) const {
    ptx::named_barrier_sync(kGroupMeeting + group_, kGroupThreads);  // every warp has done with the tail
#pragma unroll
    for (int32_t i = 0; i < kScores; i += 8) {
      ptx::st_shared_16(weights_address(tile, i / 8),
                        uint4{ptx::pack_two<T>(s[i], s[i + 1]), ptx::pack_two<T>(s[i + 2], s[i + 3]),
                              ptx::pack_two<T>(s[i + 4], s[i + 5]), ptx::pack_two<T>(s[i + 6], s[i + 7])});
    }
    ptx::mbarrier_arrive(weighed_ + pair_number(tile.number));
    ptx::fence_view_async_shared();  // one takes the weights' place once this warp, too, has released the tail
  }

  __device__ __forceinline__ void multiply_keys(const ItemContext& context, const Tile& tile, float (&s)[kScores]) {
    const uint64_t q = ptx::make_smem_desc<128>(ring_ + kQueries, 0, 1024);
    const uint64_t k = ptx::make_smem_desc<128>(tile_address(tile.keys), 0, 1024);
    if (context.by_threads) {
      for (int32_t part = 0; part < kParts; ++part) await(tile.keys, part);
      ptx::fence_view_async_shared();
    }
#pragma unroll
    for (int32_t part = 0; part < kParts; ++part) {
      await(tile.keys, part);
      ptx::wgmma_fence();
#pragma unroll
      for (int32_t i = 4 * part_begin(part); i < 4 * (part_begin(part) + part_columns(part)); ++i) {
        const auto at = static_cast<uint32_t>(i / 4 * kColumnBytes + i % 4 * 32);
        if (i == 0) {
          ptx::wgmma_ss<T, ptx::ScaleOut::kZero>(s, q, k);
        } else {
          ptx::wgmma_ss<T, ptx::ScaleOut::kOne>(s, ptx::advance_desc(q, at), ptx::advance_desc(k, at));
        }
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>(s);
    if (context.inside) return;
    release_product(tile.keys, kLeft);
    release_product(tile.keys, kRight);
  }

  /// Rows whose scale is negative: scores change their sign; is 0 or NaN: they are scaled here.
  __device__ __forceinline__ void turn(const RowInfo& rows, float (&s)[kScores]) const {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const float scale = rows.scale[first_row_ + 8 * h];
      const float by = scale > 0.0f ? 1.0f : (scale < 0.0f ? -1.0f : scale);
#pragma unroll
      for (int32_t i = 2 * h; i < kScores; i += 4) {
        s[i] = __fmul_rn(s[i], by);
        s[i + 1] = __fmul_rn(s[i + 1], by);
      }
    }
  }

  /// Scores become weights, with the maxima of the tiles before, which the other group may have found.
  __device__ __forceinline__ void to_weights(const Tile& tile, float (&s)[kScores]) {
    float max[2];
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      max[h] = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
      for (int32_t i = 4; i < kScores; i += 4) max[h] = fmaxf(max[h], fmaxf(s[i + 2 * h], s[i + 2 * h + 1]));
      max[h] = fmaxf(max[h], __shfl_xor_sync(kAllLanes, max[h], 1));
      max[h] = fmaxf(max[h], __shfl_xor_sync(kAllLanes, max[h], 2));
    }
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const int32_t row = first_row_ + 8 * h;
      const float before = tile.is_first ? -INFINITY : state_.tiles[(tile.number - 1) % 2].top[row];
      const float top = fmaxf(before, __fmaf_rn(max[h], scale_[h], -kPExponentBias<T>));
      const float base = top == -INFINITY ? 0.0f : top;
      if (lane_ % 4 == 0) {
        state_.tiles[tile.number % 2].top[row] = top;
        state_.tiles[tile.number % 2].factor[row] = ptx::ex2_approx(__fadd_rn(before, -base));
      }
      sum_[h] = __fmul_rn(sum_[h], ptx::ex2_approx(__fadd_rn(top_[h], -base)));
      top_[h] = top;
    }
    ptx::mbarrier_arrive(told_ + pair_number(tile.number));
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const float base = top_[h] == -INFINITY ? 0.0f : top_[h];
      float sums[2] = {0.0f, 0.0f};
#pragma unroll
      for (int32_t i = 2 * h; i < kScores; i += 4) {
#pragma unroll
        for (int32_t j = 0; j < 2; ++j) {
          s[i + j] = ptx::ex2_approx(__fmaf_rn(s[i + j], scale_[h], -base));
          sums[j] = __fadd_rn(sums[j], s[i + j]);
        }
      }
      sum_[h] = __fadd_rn(sum_[h], __fadd_rn(sums[0], sums[1]));
    }
  }

  /// A tile's weights times this group's half of its values.
  __device__ __forceinline__ void multiply(const ItemContext& context, const RowInfo& rows, const Tile& tile) {
    uint32_t p[kScores / 2];
    const uint32_t half = begin_multiply(context, rows, tile, p);
    multiply_values(half, p);
    end_multiply(tile);
  }

  /// Weights, once they are there, and where this group's values stand.
  __device__ __forceinline__ uint32_t begin_multiply(const ItemContext& context, const RowInfo& rows, const Tile& tile,
                                                     uint32_t (&p)[kScores / 2]) {
    ptx::mbarrier_wait(weighed_ + pair_number(tile.number), tile.number / 2 & 1);
#pragma unroll
    for (int32_t i = 0; i < kScores / 2; i += 4) {
      const uint4 piece = ptx::ld_shared_16(weights_address(tile, i / 4));
      p[i] = piece.x;
      p[i + 1] = piece.y;
      p[i + 2] = piece.z;
      p[i + 3] = piece.w;
    }
    const float* const factor = state_.tiles[tile.number % 2].factor;
    rescale({factor[first_row_], factor[first_row_ + 8]});
    await(tile.values, group_);
    if (!context.inside) await(tile.values, kTail);  // of which there is nothing: so that no phase is missed
    if (context.by_threads) ptx::fence_view_async_shared();
    release(tile.keys, kTail);  // where weights have been read
    if (!context.inside) release_product(tile.values, kTail);
    const uint32_t half = tile_address(tile.values) + static_cast<uint32_t>(group_ * kHalfColumns * kColumnBytes);
    if (context.custom || is_mixed(context.sight, tile.first)) set_special_apart(rows, tile, half);
    if (lane_ > 0) release(tile.values, group_);  // its first lane, when the product has ended
    return half;
  }

  /// Begins the product.
  __device__ __forceinline__ void multiply_values(uint32_t half, const uint32_t (&p)[kScores / 2]) {
    const uint64_t v = ptx::make_smem_desc<128>(half, kColumnBytes, 1024);
    ptx::wgmma_fence();
#pragma unroll
    for (uint32_t step = 0; step < kTokens / 16; ++step) {
      const uint32_t a[4] = {p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3]};
#pragma unroll
      for (int32_t b = 0; b < kBlocks; ++b) {
        ptx::wgmma_rs<T>(o_[b], a, ptx::advance_desc(v, static_cast<uint32_t>(b * 2 * kColumnBytes) + step * 2048));
      }
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void end_multiply(const Tile& tile) {
    static_assert(kBlocks == 2);
    ptx::wgmma_wait<0>(o_[0]);
    ptx::warpgroup_fence_operand(o_[1]);
    if (lane_ == 0) release(tile.values, group_);
  }

  struct Factors {
    float of[2];
  };
  __device__ __forceinline__ void rescale(const Factors& factor) {
    if (__all_sync(kAllLanes, factor.of[0] == 1.0f && factor.of[1] == 1.0f)) return;
#pragma unroll
    for (int32_t b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int32_t i = 0; i < kBlockValues; ++i) o_[b][i] = __fmul_rn(o_[b][i], factor.of[i / 2 % 2]);
    }
  }

  /// All of this group's warps have seen the tile's weights here, so that nobody reads it as keys any more.
  __device__ __forceinline__ void set_special_apart(const RowInfo& rows, const Tile& tile, uint32_t half) {
    if (*reinterpret_cast<const uint32_t*>(state_.special[tile.values.stage]) == 0) return;
    add_special<T>(params_, rows, half, tile.first, first_row_, o_);
    ptx::named_barrier_sync(kGroupMeeting + group_, kGroupThreads);
    clear_special<T>(half, static_cast<int32_t>(threadIdx.x) % kGroupThreads);
    ptx::fence_view_async_shared();
    ptx::named_barrier_sync(kGroupMeeting + group_, kGroupThreads);
    ptx::fence_view_async_shared();
  }

  /// Both groups' sums of item `number`, brought to the last maximum.
  __device__ __forceinline__ void join(const ItemContext& context, int32_t number, float (&max)[2], float (&sum)[2]) {
    const int32_t slot = number % kItems;
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const int32_t row = first_row_ + 8 * h;
      max[h] = -INFINITY;
      if (context.num_tiles > 0) {
        const uint32_t last = num_tiles_ + static_cast<uint32_t>(context.num_tiles) - 1;
        if (h == 0 && !is_mine(last)) await_maxima(last);
        max[h] = state_.tiles[last % 2].top[row];
      }
      const float base = max[h] == -INFINITY ? 0.0f : max[h];
      sum_[h] = __fadd_rn(sum_[h], __shfl_xor_sync(kAllLanes, sum_[h], 1));
      sum_[h] = __fadd_rn(sum_[h], __shfl_xor_sync(kAllLanes, sum_[h], 2));
      sum_[h] = __fmul_rn(sum_[h], ptx::ex2_approx(__fadd_rn(top_[h], -base)));
      if (lane_ % 4 == 0) state_.sums[slot][group_][row] = sum_[h];
    }
    const uint32_t summed = ptx::shared_address(&state_.summed[warp_]);
    ptx::mbarrier_arrive(summed);
    ptx::mbarrier_wait(summed, number & 1);
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const int32_t row = first_row_ + 8 * h;
      sum[h] = __fadd_rn(state_.sums[slot][0][row], state_.sums[slot][1][row]);
    }
  }

  const AttentionParams& params_;
  SharedState& state_;
  const int32_t group_;
  const uint32_t ring_;
  const uint32_t full_;
  const uint32_t empty_;
  const uint32_t told_;
  const uint32_t weighed_;
  const int32_t warp_;
  const int32_t lane_;
  const int32_t first_row_;   ///< of the lane; the other is 8 further
  uint32_t num_tiles_ = 0;    ///< of earlier items
  uint32_t ring_number_ = 0;  ///< of the ring's tiles that they have had
  float top_[2];              ///< of this group's last tile
  float sum_[2];              ///< of this group's tiles, this lane's share, at top_
  float scale_[2];            ///< of scores, to logits in base-2 units; positive
  float o_[kBlocks][kBlockValues];
};

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
