#pragma once

#include "kernels/cuda/sm90/mla/epilogue.cuh"
#include "kernels/cuda/sm90/mla/softmax.cuh"

/// A consumer warpgroup. It has all rows of a work tile and one half of V's components. GEMM0 and the softmax of a KV
/// tile are one consumer's: even tiles the first's, odd tiles the second's. That consumer shares P through shared
/// memory. Both then run GEMM1 with their half of V, in the order of the KV tiles.
namespace folio::inline v0::kernels::cuda::sm90::mla {

/// `General`: there is a soft cap, ALiBi or a custom mask.
template <typename T, bool General>
class ConsumerWarpgroup {
  static constexpr int32_t kScores = kBlockN / 2;  ///< of a lane

 public:
  __device__ __forceinline__ ConsumerWarpgroup(const MlaParams& params, unsigned char* smem, SharedStorage& storage)
      : params_(params.attention),
        storage_(storage),
        consumer_(static_cast<int32_t>(threadIdx.x) / kWarpgroupThreads - 1),
        smem_(ptx::shared_address(smem)),
        kv_full_(ptx::shared_address(storage.kv_full)),
        kv_empty_(ptx::shared_address(storage.kv_empty)),
        stats_full_(ptx::shared_address(storage.stats_full)),
        p_full_(ptx::shared_address(storage.p_full)),
        warp_(static_cast<int32_t>(threadIdx.x) % kWarpgroupThreads / 32),
        lane_(static_cast<int32_t>(threadIdx.x) % 32),
        first_row_(warp_ * 16 + lane_ / 4) {}

  __device__ __forceinline__ void run() {
    OutputTileState output_tile;
    for (int32_t number = 0;; ++number) {
      const int32_t slot = number % kWorkTileSlots;
      ptx::mbarrier_wait(ptx::shared_address(storage_.work_tile_full) + 8 * slot, number / kWorkTileSlots & 1);
      const WorkTileContext& context = storage_.contexts[slot];
      if (context.done) return;
      const RowInfo& rows = storage_.rows[slot];
      init(context, rows);
      mainloop(context, rows);
      float row_max[2];
      float row_sum[2];
      reduce_row_sum(context, number, row_max, row_sum);
      const LaneElements lane{first_row_, consumer_ * kHalfColumnBlocks * 64 + 2 * (lane_ % 4),
                              consumer_ == 0 && lane_ % 4 == 0};
      epilogue(params_, context, rows, row_max, row_sum, o_, lane, output_tile);
      num_kv_tiles_ += static_cast<uint32_t>(context.num_kv_tiles);
      ptx::mbarrier_arrive(ptx::shared_address(storage_.work_tile_empty) + 8 * slot);
    }
  }

 private:
  __device__ __forceinline__ void init(const WorkTileContext& context, const RowInfo& rows) {
    ptx::fence_view_async_shared();  // threads have copied Q
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      row_max_[h] = -INFINITY;
      row_sum_[h] = 0.0f;
      scale_[h] = 1.0f;
      const int32_t row = first_row_ + 8 * h;
      if (General || row >= context.num_rows) continue;
      const float scale = rows.scale[row];
      scale_[h] = fabsf(scale) > 0.0f ? fabsf(scale) : 1.0f;
    }
#pragma unroll
    for (int32_t b = 0; b < kOBlocks; ++b) {
#pragma unroll
      for (int32_t i = 0; i < kOBlockValues; ++i) o_[b][i] = 0.0f;
    }
  }

  /// A KV tile: its number among the CTA's KV tiles, and the pipeline stages of its keys and values.
  struct KvTile {
    uint32_t number;
    int32_t first;  ///< local token
    PipelineState k;
    PipelineState v;
    bool is_first;  ///< of the work tile
  };
  __device__ __forceinline__ KvTile kv_tile(const WorkTileContext& context, int32_t i) const {
    const uint32_t number = num_kv_tiles_ + static_cast<uint32_t>(i);
    const int32_t first = (context.last_kv_tile - i) * kBlockN;
    if (context.v_in_k) {
      const PipelineState state = pipeline_state(num_stages_used_ + static_cast<uint32_t>(i));
      return {number, first, state, state, i == 0};
    }
    const uint32_t k = num_stages_used_ + 2 * static_cast<uint32_t>(i);
    return {number, first, pipeline_state(k), pipeline_state(k + 1), i == 0};
  }
  /// Whether this consumer computes P of the KV tile.
  __device__ __forceinline__ bool is_mine(uint32_t number) const {
    return static_cast<int32_t>(number % 2) == consumer_;
  }

  /// The second consumer computes P of the next tile while its GEMM1 of an even tile runs. If values have tiles of
  /// their own it does not: the two stages have no room for the next tile's keys then.
  __device__ __forceinline__ void mainloop(const WorkTileContext& context, const RowInfo& rows) {
    const int32_t count = context.num_kv_tiles;
    int32_t last_mine = count - 1;
    if (last_mine >= 0 && !is_mine(num_kv_tiles_ + static_cast<uint32_t>(last_mine))) --last_mine;
    if (last_mine < 0) release_q();
    bool p_is_ready = false;
#pragma unroll 1
    for (int32_t i = 0; i < count; ++i) {
      const KvTile tile = kv_tile(context, i);
      if (is_mine(tile.number)) {
        if (!p_is_ready) {
          compute_p(context, rows, tile);
          if (i == last_mine) release_q();
        }
        p_is_ready = false;
        gemm1(context, rows, tile);
        continue;
      }
      p_is_ready = consumer_ == 1 && context.v_in_k && i + 1 < count;
      if (!p_is_ready) {
        gemm1(context, rows, tile);
        continue;
      }
      const KvTile next = kv_tile(context, i + 1);
      if (has_plain_softmax(context, next)) {
        gemm1_overlapping_softmax(context, rows, tile, next);
      } else {
        compute_p(context, rows, next);
        gemm1(context, rows, tile);
      }
      if (i + 1 == last_mine) release_q();
    }
    num_stages_used_ += static_cast<uint32_t>(context.v_in_k ? count : 2 * count);
  }

  /// Whether a tile's scores become P without a branch: ptxas waits for wgmma in flight before one.
  static __device__ __forceinline__ bool has_plain_softmax(const WorkTileContext& context, const KvTile& tile) {
    return !General && !context.negate_scores && !needs_mask(context.visible, tile.first, kBlockN);
  }

  __device__ __forceinline__ void release_q() const {
    if (lane_ == 0) ptx::mbarrier_arrive(ptx::shared_address(&storage_.q_empty), 32);
  }
  __device__ __forceinline__ void consumer_wait(const PipelineState& at, int32_t part) const {
    ptx::mbarrier_wait(kv_full_ + kv_barrier_offset(at, part), at.parity);
  }
  /// Releases a part by this lane.
  __device__ __forceinline__ void consumer_release(const PipelineState& at, int32_t part) const {
    ptx::mbarrier_arrive(kv_empty_ + kv_barrier_offset(at, part));
  }
  /// Releases a part by this warp, which has read it in MMAs only.
  __device__ __forceinline__ void consumer_release_warp(const PipelineState& at, int32_t part) const {
    if (lane_ == 0) ptx::mbarrier_arrive(kv_empty_ + kv_barrier_offset(at, part), 32);
  }
  __device__ __forceinline__ uint32_t tile_address(const PipelineState& at) const {
    return smem_ + at.stage * static_cast<uint32_t>(kTileBytes);
  }
  /// Byte offset, in stats_full and p_full, of the barrier that this warp and the other consumer's warp of the same
  /// rows use for a KV tile.
  __device__ __forceinline__ uint32_t pair_barrier_offset(uint32_t tile) const {
    return 8 * (tile % 2 * kWarpgroupWarps + static_cast<uint32_t>(warp_));
  }
  /// Waits for row_max of the other consumer's tile. P arrives after it, but synccheck reports a phase that nobody has
  /// waited for.
  __device__ __forceinline__ void wait_row_max(uint32_t tile) const {
    ptx::mbarrier_wait(stats_full_ + pair_barrier_offset(tile), tile / 2 & 1);
  }
  /// Where this thread's P of a tile is, in four chunks of 16 bytes. The thread of the same number of the other
  /// consumer needs the same registers, so no swizzle is needed.
  __device__ __forceinline__ uint32_t p_address(const KvTile& tile, int32_t chunk) const {
    return tile_address(tile.k) + static_cast<uint32_t>(kPOffset) +
           16 * (static_cast<uint32_t>(chunk) * kWarpgroupThreads + threadIdx.x % kWarpgroupThreads);
  }

  /// GEMM0, mask and softmax of one of this consumer's tiles.
  __device__ __forceinline__ void compute_p(const WorkTileContext& context, const RowInfo& rows, const KvTile& tile) {
    float s[kScores];
    gemm0(context, tile, s);
    const int32_t column = tile.first + 2 * (lane_ % 4);
    if constexpr (General) {
      to_general_logits(params_, context, rows, first_row_, column, s);
    } else if (context.negate_scores) {
      negate_scores(rows, first_row_, s);
    }
    if (needs_mask(context.visible, tile.first, kBlockN)) mask_scores(rows, first_row_, column, s);
    if (!tile.is_first) wait_row_max(tile.number - 1);
    softmax(tile, s);
    store_p(tile, s);
  }

  /// The softmax of `next` while GEMM1 of `tile`, the other consumer's, runs.
  __device__ __forceinline__ void gemm1_overlapping_softmax(const WorkTileContext& context, const RowInfo& rows,
                                                            const KvTile& tile, const KvTile& next) {
    float s[kScores];
    gemm0(context, next, s);
    uint32_t p[kScores / 2];
    const uint32_t half = prepare_gemm1(context, rows, tile, p);
    issue_gemm1(half, p);
    static_cast<void>(ptx::mbarrier_test_wait(stats_full_ + pair_barrier_offset(tile.number),
                                              tile.number / 2 & 1));  // see wait_row_max
    softmax(next, s);
    store_p(next, s);
    finish_gemm1(tile);
  }

  /// S = Q K^T.
  __device__ __forceinline__ void gemm0(const WorkTileContext& context, const KvTile& tile, float (&s)[kScores]) {
    const uint64_t q = ptx::make_smem_desc<128>(smem_ + kQOffset, 0, 1024);
    const uint64_t k = ptx::make_smem_desc<128>(tile_address(tile.k), 0, 1024);
    if (context.by_threads) {
      for (int32_t part = 0; part < kKvParts; ++part) consumer_wait(tile.k, part);
      ptx::fence_view_async_shared();
    }
#pragma unroll
    for (int32_t part = 0; part < kKvParts; ++part) {
      consumer_wait(tile.k, part);
      ptx::wgmma_fence();
#pragma unroll
      for (int32_t i = 4 * part_begin(part); i < 4 * (part_begin(part) + part_size(part)); ++i) {
        const auto at = static_cast<uint32_t>(i / 4 * kColumnBlockBytes + i % 4 * 32);
        if (i == 0) {
          ptx::wgmma_ss<T, ptx::ScaleOut::kZero>(s, q, k);
        } else {
          ptx::wgmma_ss<T, ptx::ScaleOut::kOne>(s, ptx::advance_desc(q, at), ptx::advance_desc(k, at));
        }
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>(s);
    if (context.v_in_k) return;
    consumer_release_warp(tile.k, kVLeft);
    consumer_release_warp(tile.k, kVRight);
  }

  /// Scores become p, with the row_max of the tiles before, which the other consumer may have found. The new row_max is
  /// shared before the exponentials.
  __device__ __forceinline__ void softmax(const KvTile& tile, float (&s)[kScores]) {
    float max[2];
    reduce_max(s, max);
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const int32_t row = first_row_ + 8 * h;
      const float before = tile.is_first ? -INFINITY : storage_.tile_stats[(tile.number - 1) % 2].row_max[row];
      const float row_max = fmaxf(before, __fmaf_rn(max[h], scale_[h], -kPExponentBias<T>));
      const float base = finite_row_max(row_max);
      if (lane_ % 4 == 0) {
        storage_.tile_stats[tile.number % 2].row_max[row] = row_max;
        storage_.tile_stats[tile.number % 2].scores_scale[row] = ptx::ex2_approx(__fadd_rn(before, -base));
      }
      row_sum_[h] = __fmul_rn(row_sum_[h], ptx::ex2_approx(__fadd_rn(row_max_[h], -base)));
      row_max_[h] = row_max;
    }
    ptx::mbarrier_arrive(stats_full_ + pair_barrier_offset(tile.number));
    exponentiate(scale_, row_max_, s, row_sum_);
  }

  /// P to shared memory, over the tile's RoPE part.
  __device__ __forceinline__ void store_p(const KvTile& tile, const float (&s)[kScores]) const {
    ptx::named_barrier_sync(kConsumerBarrier + consumer_, kWarpgroupThreads);  // every warp has finished its GEMM0
#pragma unroll
    for (int32_t i = 0; i < kScores; i += 8) {
      ptx::st_shared_16(p_address(tile, i / 8),
                        uint4{ptx::pack_two<T>(s[i], s[i + 1]), ptx::pack_two<T>(s[i + 2], s[i + 3]),
                              ptx::pack_two<T>(s[i + 4], s[i + 5]), ptx::pack_two<T>(s[i + 6], s[i + 7])});
    }
    ptx::mbarrier_arrive(p_full_ + pair_barrier_offset(tile.number));
    ptx::fence_view_async_shared();  // a TMA load overwrites P once this warp, too, has released the RoPE part
  }

  /// O += P V, with this consumer's half of V.
  __device__ __forceinline__ void gemm1(const WorkTileContext& context, const RowInfo& rows, const KvTile& tile) {
    uint32_t p[kScores / 2];
    const uint32_t half = prepare_gemm1(context, rows, tile, p);
    issue_gemm1(half, p);
    finish_gemm1(tile);
  }

  /// Waits for P and V, loads P and rescales O. Returns the address of this consumer's half of V.
  __device__ __forceinline__ uint32_t prepare_gemm1(const WorkTileContext& context, const RowInfo& rows,
                                                    const KvTile& tile, uint32_t (&p)[kScores / 2]) {
    ptx::mbarrier_wait(p_full_ + pair_barrier_offset(tile.number), tile.number / 2 & 1);
#pragma unroll
    for (int32_t i = 0; i < kScores / 2; i += 4) {
      const uint4 chunk = ptx::ld_shared_16(p_address(tile, i / 4));
      p[i] = chunk.x;
      p[i + 1] = chunk.y;
      p[i + 2] = chunk.z;
      p[i + 3] = chunk.w;
    }
    const float* const scores_scale = storage_.tile_stats[tile.number % 2].scores_scale;
    rescale_o({scores_scale[first_row_], scores_scale[first_row_ + 8]});
    consumer_wait(tile.v, consumer_);
    if (!context.v_in_k) consumer_wait(tile.v, kRope);  // it is empty: waited for so that no phase is missed
    if (context.by_threads) ptx::fence_view_async_shared();
    consumer_release(tile.k, kRope);  // P has been read
    if (!context.v_in_k) consumer_release_warp(tile.v, kRope);
    const uint32_t half =
        tile_address(tile.v) + static_cast<uint32_t>(consumer_ * kHalfColumnBlocks * kColumnBlockBytes);
    if (context.custom_mask || is_mixed(context.visible, tile.first, kBlockN)) take_out_nonfinite(rows, tile, half);
    if (lane_ > 0) consumer_release(tile.v, consumer_);  // lane 0 releases it once GEMM1 is complete
    return half;
  }

  __device__ __forceinline__ void issue_gemm1(uint32_t half, const uint32_t (&p)[kScores / 2]) {
    const uint64_t v = ptx::make_smem_desc<128>(half, kColumnBlockBytes, 1024);
    ptx::wgmma_fence();
#pragma unroll
    for (uint32_t step = 0; step < kBlockN / 16; ++step) {
      const uint32_t a[4] = {p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3]};
#pragma unroll
      for (int32_t b = 0; b < kOBlocks; ++b) {
        ptx::wgmma_rs<T>(o_[b], a,
                         ptx::advance_desc(v, static_cast<uint32_t>(b * 2 * kColumnBlockBytes) + step * 2048));
      }
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void finish_gemm1(const KvTile& tile) {
    static_assert(kOBlocks == 2);
    ptx::wgmma_wait<0>(o_[0]);
    ptx::warpgroup_fence_operand(o_[1]);
    if (lane_ == 0) consumer_release(tile.v, consumer_);
  }

  struct ScoresScale {
    float of[2];
  };
  __device__ __forceinline__ void rescale_o(const ScoresScale& scale) {
    if (__all_sync(kAllLanes, scale.of[0] == 1.0f && scale.of[1] == 1.0f)) return;
#pragma unroll
    for (int32_t b = 0; b < kOBlocks; ++b) {
#pragma unroll
      for (int32_t i = 0; i < kOBlockValues; ++i) o_[b][i] = __fmul_rn(o_[b][i], scale.of[i / 2 % 2]);
    }
  }

  /// Moves the NaN and Inf of this consumer's half of V to the accumulators of the rows that see them. All warps have P
  /// of the tile here, so nobody reads the tile as keys any more.
  __device__ __forceinline__ void take_out_nonfinite(const RowInfo& rows, const KvTile& tile, uint32_t half) {
    if (*reinterpret_cast<const uint32_t*>(storage_.nonfinite[tile.v.stage]) == 0) return;
    add_nonfinite<T>(params_, rows, half, tile.first, first_row_, o_);
    ptx::named_barrier_sync(kConsumerBarrier + consumer_, kWarpgroupThreads);
    constexpr int32_t kWords = kHalfColumnBlocks * kColumnBlockBytes / 4;
    zero_nonfinite<T, kWords, kWarpgroupThreads>(half, static_cast<int32_t>(threadIdx.x) % kWarpgroupThreads);
    ptx::fence_view_async_shared();
    ptx::named_barrier_sync(kConsumerBarrier + consumer_, kWarpgroupThreads);
    ptx::fence_view_async_shared();
  }

  /// Cross-warp reduction of work tile `number`: adds both consumers' row_sum, rescaled to the last row_max.
  __device__ __forceinline__ void reduce_row_sum(const WorkTileContext& context, int32_t number, float (&row_max)[2],
                                                 float (&row_sum)[2]) {
    const int32_t slot = number % kWorkTileSlots;
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const int32_t row = first_row_ + 8 * h;
      row_max[h] = -INFINITY;
      if (context.num_kv_tiles > 0) {
        const uint32_t last = num_kv_tiles_ + static_cast<uint32_t>(context.num_kv_tiles) - 1;
        if (h == 0 && !is_mine(last)) wait_row_max(last);
        row_max[h] = storage_.tile_stats[last % 2].row_max[row];
      }
      const float base = finite_row_max(row_max[h]);
      row_sum_[h] = __fadd_rn(row_sum_[h], __shfl_xor_sync(kAllLanes, row_sum_[h], 1));
      row_sum_[h] = __fadd_rn(row_sum_[h], __shfl_xor_sync(kAllLanes, row_sum_[h], 2));
      row_sum_[h] = __fmul_rn(row_sum_[h], ptx::ex2_approx(__fadd_rn(row_max_[h], -base)));
      if (lane_ % 4 == 0) storage_.row_sum[slot][consumer_][row] = row_sum_[h];
    }
    const uint32_t full = ptx::shared_address(&storage_.row_sum_full[warp_]);
    ptx::mbarrier_arrive(full);
    ptx::mbarrier_wait(full, number & 1);
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const int32_t row = first_row_ + 8 * h;
      row_sum[h] = __fadd_rn(storage_.row_sum[slot][0][row], storage_.row_sum[slot][1][row]);
    }
  }

  const AttentionParams& params_;
  SharedStorage& storage_;
  const int32_t consumer_;
  const uint32_t smem_;
  const uint32_t kv_full_;
  const uint32_t kv_empty_;
  const uint32_t stats_full_;
  const uint32_t p_full_;
  const int32_t warp_;
  const int32_t lane_;
  const int32_t first_row_;       ///< of the lane; its other row is 8 further on
  uint32_t num_kv_tiles_ = 0;     ///< of earlier work tiles
  uint32_t num_stages_used_ = 0;  ///< tiles that they have had in the KV pipeline
  float row_max_[2];              ///< of this consumer's last tile
  float row_sum_[2];              ///< of this consumer's tiles, this lane's share, relative to row_max_
  float scale_[2];                ///< of scores, to base-2 logits; positive
  float o_[kOBlocks][kOBlockValues];
};

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
