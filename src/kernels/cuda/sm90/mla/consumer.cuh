#pragma once

#include "kernels/cuda/sm90/mla/epilogue.cuh"
#include "kernels/cuda/sm90/mla/softmax.cuh"

/// A consumer warpgroup. It has all rows of a work tile and one half of V's components. GEMM0 and the softmax of a KV
/// tile are one consumer's: even tiles the first's, odd tiles the second's. That consumer shares P through shared
/// memory. Both then run GEMM1 with their half of V, in the order of the KV tiles.
namespace folio::inline v0::kernels::cuda::sm90::mla {

/// `General`: there is a soft cap, ALiBi or a custom mask.
template <typename Traits, bool General>
class ConsumerWarpgroup {
  using T = typename Traits::T;
  using L = RowsLayout;
  static constexpr bool kHasFp8 = Traits::kDequantizes;
  static constexpr bool kDsMla = Traits::kDsMla;
  static constexpr int32_t kScores = kBlockN / 2;  ///< of a lane

 public:
  __device__ __forceinline__ ConsumerWarpgroup(const MlaParams& params, unsigned char* smem, RowsStorage& storage)
      : params_(params.attention),
        storage_(storage),
        consumer_(static_cast<int32_t>(threadIdx.x) / kWarpgroupThreads - 1),
        smem_(ptx::shared_address(smem)),
        kv_full_(ptx::shared_address(storage.kv_full)),
        kv_empty_(ptx::shared_address(storage.kv_empty)),
        p_full_(ptx::shared_address(storage.p_full)),
        warp_(static_cast<int32_t>(threadIdx.x) % kWarpgroupThreads / 32),
        lane_(static_cast<int32_t>(threadIdx.x) % 32),
        first_row_(warp_ * 16 + lane_ / 4) {}

  __device__ __forceinline__ void run() {
    OutputTileState output_tile;
    for (int32_t number = 0;; ++number) {
      const int32_t slot = number % kWorkTileSlots;
      clear_o();  // before the wait, which is long for the first work tile
      ptx::mbarrier_wait(ptx::shared_address(storage_.work_tile_full) + 8 * slot, number / kWorkTileSlots & 1);
      const WorkTileContext& context = storage_.contexts[slot];
      if (context.done) return;
      const RowInfo& rows = storage_.rows[slot];
      init(context, rows);
      mainloop(context, rows);
      float row_sum[2];
      if constexpr (kDsMla) leave_unit();
      reduce_row_sum(number, row_sum);
      const LaneElements lane{first_row_, consumer_ * L::kHalfColumnBlocks * 64 + 2 * (lane_ % 4),
                              consumer_ == 0 && lane_ % 4 == 0};
      epilogue(params_, context, rows, row_max_, row_sum, o_, lane, output_tile);
      num_kv_tiles_ += static_cast<uint32_t>(context.num_kv_tiles);
      ptx::mbarrier_arrive(ptx::shared_address(storage_.work_tile_empty) + 8 * slot);
    }
  }

 private:
  __device__ __forceinline__ void clear_o() {
#pragma unroll
    for (int32_t b = 0; b < kOBlocks; ++b) {
#pragma unroll
      for (int32_t i = 0; i < kOBlockValues; ++i) o_[b][i] = 0.0f;
    }
  }
  __device__ __forceinline__ void init(const WorkTileContext& context, const RowInfo& rows) {
    ptx::fence_view_async_shared();  // threads have copied Q
    unit_ = 0.0f;
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      row_max_[h] = -INFINITY;
      row_sum_[h] = 0.0f;
      scale_[h] = 1.0f;
      max_tile_sum_[h] = UINT32_MAX;
      const int32_t row = first_row_ + 8 * h;
      if (row >= context.num_rows) continue;
      max_tile_sum_[h] = __float_as_uint(kMaxTileSum<T>);
      if (General) continue;
      const float scale = rows.scale[row];
      scale_[h] = fabsf(scale) > 0.0f ? fabsf(scale) : 1.0f;
    }
  }

  /// A KV tile: its number among the CTA's KV tiles, and the pipeline stages of its keys and values.
  struct KvTile {
    uint32_t number;
    int32_t first;  ///< local token
    PipelineState k;
    PipelineState v;
  };
  __device__ __forceinline__ KvTile kv_tile(const WorkTileContext& context, int32_t i) const {
    const uint32_t number = num_kv_tiles_ + static_cast<uint32_t>(i);
    const int32_t first = (context.last_kv_tile - i) * kBlockN;
    if (context.v_in_k) {
      const PipelineState state = pipeline_state<L>(num_stages_used_ + static_cast<uint32_t>(i));
      return {number, first, state, state};
    }
    const uint32_t k = num_stages_used_ + 2 * static_cast<uint32_t>(i);
    return {number, first, pipeline_state<L>(k), pipeline_state<L>(k + 1)};
  }
  /// Whether this consumer computes P of the KV tile.
  __device__ __forceinline__ bool is_mine(uint32_t number) const {
    return static_cast<int32_t>(number % 2) == consumer_;
  }

  /// Factors that a row's accumulators and row_sum take before a KV tile is added to them.
  struct ScoresScale {
    float of[2];
    bool rescales = false;  ///< whether some row of the KV tile has one that is not 1: the same for a warpgroup's warps
  };

  /// The KV tiles [begin, end) of a work tile whose scores become P without masks and other features, and whose values
  /// are inside their keys.
  struct PlainTiles {
    int32_t begin;
    int32_t end;
  };
  static __device__ __forceinline__ PlainTiles plain_tiles(const WorkTileContext& context) {
    if (context.negate_scores || !context.v_in_k) return {0, 0};
    return {context.last_kv_tile + 1 - context.visible.all_end / kBlockN,
            context.last_kv_tile + 1 - (context.visible.all_begin + kBlockN - 1) / kBlockN};
  }

  /// Pairs of an even and an odd plain KV tile have a loop of their own. The others go one by one; `General`: the
  /// second consumer takes an even one with the odd one behind it.
  __device__ __forceinline__ void mainloop(const WorkTileContext& context, const RowInfo& rows) {
    const int32_t count = context.num_kv_tiles;
    int32_t last_mine = count - 1;
    if (last_mine >= 0 && !is_mine(num_kv_tiles_ + static_cast<uint32_t>(last_mine))) --last_mine;
    if (last_mine < 0) release_q();
    if constexpr (General) {
#pragma unroll 1
      for (int32_t i = 0; i < count;) {
        const bool even = (num_kv_tiles_ + static_cast<uint32_t>(i)) % 2 == 0;
        if (consumer_ == 1 && even && context.v_in_k && i + 1 < count) {
          odd_step(context, rows, i, i + 1 == last_mine);
          i += 2;
        } else {
          step(context, rows, i, i == last_mine);
          ++i;
        }
      }
    } else {
      const PlainTiles plain = plain_tiles(context);
      const int32_t plain_end = min(plain.end, count);
#pragma unroll 1
      for (int32_t i = 0; i < count;) {
        const bool even = (num_kv_tiles_ + static_cast<uint32_t>(i)) % 2 == 0;
        const int32_t pairs = even && i >= plain.begin && i < plain_end ? (plain_end - i) / 2 : 0;
        if (pairs == 0) {
          step(context, rows, i, i == last_mine);
          ++i;
          continue;
        }
        if (consumer_ == 0) {
          even_loop(context, i, pairs, last_mine);
        } else {
          odd_loop(context, i, pairs, last_mine);
        }
        i += 2 * pairs;
      }
    }
    num_stages_used_ += static_cast<uint32_t>(context.v_in_k ? count : 2 * count);
  }

  /// One KV tile of any kind.
  __device__ __forceinline__ void step(const WorkTileContext& context, const RowInfo& rows, int32_t i, bool last_mine) {
    const KvTile tile = kv_tile(context, i);
    uint32_t p[kScores / 2];
    ScoresScale scale;
    if (is_mine(tile.number)) {
      float s[kScores];
      compute_logits(context, rows, tile, last_mine, s);
      scale = softmax(tile, s, p);
      store_p(tile, scale, p);
    } else {
      scale = load_p(tile, p);
    }
    multiply_v(context, rows, tile, scale, p);
  }

  /// `General`: the second consumer's part of an even KV tile and the odd one behind it, both with values inside keys.
  /// Its GEMM0 and softmax come first, so that they run beside the first consumer's.
  __device__ __forceinline__ void odd_step(const WorkTileContext& context, const RowInfo& rows, int32_t i,
                                           bool last_mine) {
    const KvTile even = kv_tile(context, i);
    const KvTile odd = kv_tile(context, i + 1);
    float s[kScores];
    compute_logits(context, rows, odd, last_mine, s);
    const ScoresScale scale = load_stats(even);
    uint32_t p[kScores / 2];
    ScoresScale odd_scale = softmax(odd, s, p);
    store_p(odd, odd_scale, p);
    read_p(even, p);
    multiply_v(context, rows, even, scale, p);
    read_p(odd, p);
    multiply_v(context, rows, odd, odd_scale, p);
  }

  /// GEMM0 of one of this consumer's KV tiles, features and masks.
  __device__ __forceinline__ void compute_logits(const WorkTileContext& context, const RowInfo& rows,
                                                 const KvTile& tile, bool last_mine, float (&s)[kScores]) const {
    gemm0(context.by_threads, tile.k, s);
    if (last_mine) release_q();
    if (!context.v_in_k) {
      consumer_release_warp(tile.k, kVLeft);
      consumer_release_warp(tile.k, kVRight);
    }
    to_logits(context, rows, tile, s);
  }

  /// O += P V of a KV tile of any kind, with this consumer's half of V.
  __device__ __forceinline__ void multiply_v(const WorkTileContext& context, const RowInfo& rows, const KvTile& tile,
                                             const ScoresScale& scale, const uint32_t (&p)[kScores / 2]) {
    rescale_o(scale);
    consumer_wait(tile.v, consumer_);
    if (!context.v_in_k) consumer_wait(tile.v, kRope);  // it is empty: waited for so that no phase is missed
    if (context.by_threads) ptx::fence_view_async_shared();
    consumer_release(tile.k, kRope);  // P has been read
    if (!context.v_in_k) consumer_release_warp(tile.v, kRope);
    const uint32_t half = half_address(tile.v);
    if (context.custom_mask || is_mixed(context.visible, tile.first, kBlockN)) take_out_nonfinite(rows, tile, half);
    if (lane_ > 0) consumer_release(tile.v, consumer_);  // lane 0 releases it once GEMM1 is complete
    issue_gemm1(half, p);
    wait_gemm1();
    if (lane_ == 0) consumer_release(tile.v, consumer_);
  }

  /// The first consumer's part of `pairs` pairs of plain tiles, from tile `i` on. Its softmax runs beside the second
  /// consumer's GEMM0.
  __device__ __forceinline__ void even_loop(const WorkTileContext& context, int32_t i, int32_t pairs,
                                            int32_t last_mine) {
    const bool by_threads = context.by_threads;
    KvTile even = uniform_kv_tile(context, i);
    KvTile odd = uniform_kv_tile(context, i + 1);
#pragma unroll 1
    for (int32_t pair = 0; pair < pairs; ++pair) {
      float s[kScores];
      uint32_t p[kScores / 2];
      issue_gemm0(by_threads, even.k, s);
      ptx::named_barrier_arrive(kGemm0Barrier, kConsumerThreads);
      ptx::wgmma_wait<0>(s);
      if (i + 2 * pair == last_mine) release_q();
      ScoresScale scale = lazy_softmax(even, s, p);
      store_p(even, scale, p);
      rescale_o(scale);
      issue_gemm1(half_address(even.v), p);
      consumer_release(even.k, kRope);
      wait_gemm1();
      consumer_release_warp(even.v, 0);
      consumer_wait(odd.v, 0);
      scale = load_p(odd, p);
      if (by_threads) ptx::fence_view_async_shared();
      rescale_o(scale);
      issue_gemm1(half_address(odd.v), p);
      consumer_release(odd.k, kRope);
      wait_gemm1();
      consumer_release_warp(odd.v, 0);
      next_pair(even);
      next_pair(odd);
    }
  }

  /// The second consumer's part. Its softmax runs beside its GEMM1 of the even tile.
  __device__ __forceinline__ void odd_loop(const WorkTileContext& context, int32_t i, int32_t pairs,
                                           int32_t last_mine) {
    const bool by_threads = context.by_threads;
    KvTile even = uniform_kv_tile(context, i);
    KvTile odd = uniform_kv_tile(context, i + 1);
#pragma unroll 1
    for (int32_t pair = 0; pair < pairs; ++pair) {
      float s[kScores];
      if (by_threads) consumer_wait(even.v, 1);  // issue_gemm0's fence is for it, too
      ptx::named_barrier_sync(kGemm0Barrier, kConsumerThreads);
      issue_gemm0(by_threads, odd.k, s);
      consumer_wait(even.v, 1);
      uint32_t p[kScores / 2];
      const ScoresScale even_scale = load_p(even, p);
      if (even_scale.rescales) {
        ptx::wgmma_wait<0>(s);  // as ptxas would do before the branch
        multiply_o(even_scale);
      }
      issue_gemm1(half_address(even.v), p);
      consumer_release(even.k, kRope);
      if constexpr (kHasFp8) {
        ptx::wgmma_wait<0>(s);  // GEMM1, too: the producer takes longer to fill V again than it gains to overlap here
        release_even_v(even);
      } else {
        ptx::wgmma_wait<1>(s);
      }
      if (i + 2 * pair + 1 == last_mine) release_q();
      uint32_t odd_p[kScores / 2];
      ScoresScale odd_scale = softmax(odd, s, odd_p);
      store_p(odd, odd_scale, odd_p);
      if constexpr (!kHasFp8) release_even_v(even);
      rescale_o(odd_scale);
      issue_gemm1(half_address(odd.v), odd_p);
      consumer_release(odd.k, kRope);
      wait_gemm1();
      consumer_release_warp(odd.v, 1);
      next_pair(even);
      next_pair(odd);
    }
  }

  /// The second consumer's half, once GEMM1 is complete.
  __device__ __forceinline__ void release_even_v(const KvTile& even) {
    wait_gemm1();
    consumer_release_warp(even.v, 1);
  }

  /// A KV tile whose values are inside its keys. Tells the compiler that all lanes have the same stage and parity.
  __device__ __forceinline__ KvTile uniform_kv_tile(const WorkTileContext& context, int32_t i) const {
    KvTile tile = kv_tile(context, i);
    tile.number = __shfl_sync(kAllLanes, tile.number, 0);
    tile.k.stage = __shfl_sync(kAllLanes, tile.k.stage, 0);
    tile.k.parity = __shfl_sync(kAllLanes, tile.k.parity, 0);
    tile.v = tile.k;
    return tile;
  }
  /// From a tile whose values are inside its keys to the one two further on: the same stage's next phase.
  static __device__ __forceinline__ void next_pair(KvTile& tile) {
    static_assert(L::kStages == 2);
    tile.number += 2;
    tile.k.parity ^= 1;
    tile.v.parity ^= 1;
  }

  __device__ __forceinline__ void release_q() const {
    if (lane_ == 0) ptx::mbarrier_arrive(ptx::shared_address(&storage_.q_empty), 32);
  }
  __device__ __forceinline__ void consumer_wait(const PipelineState& at, int32_t part) const {
    ptx::mbarrier_wait_warp(kv_full_ + kv_barrier_offset(at, part), at.parity);
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
    return smem_ + at.stage * static_cast<uint32_t>(L::kTileBytes);
  }
  __device__ __forceinline__ uint32_t half_address(const PipelineState& at) const {
    return tile_address(at) + static_cast<uint32_t>(consumer_ * L::kHalfColumnBlocks * kColumnBlockBytes);
  }
  /// The barrier, in p_full, that this warp and the other consumer's warp of the same rows use for a KV tile.
  __device__ __forceinline__ uint32_t p_barrier(const KvTile& tile) const {
    return p_full_ + 8 * (tile.number % 2 * kWarpgroupWarps + static_cast<uint32_t>(warp_));
  }
  /// Where this thread's P of a tile is, in four chunks of 16 bytes. The thread of the same number of the other
  /// consumer needs the same registers, so no swizzle is needed.
  __device__ __forceinline__ uint32_t p_address(const KvTile& tile, int32_t chunk) const {
    return tile_address(tile.k) + static_cast<uint32_t>(L::kPOffset) +
           16 * (static_cast<uint32_t>(chunk) * kWarpgroupThreads + threadIdx.x % kWarpgroupThreads);
  }

  /// Scores to base-2 logits, but for the scale, and masks.
  __device__ __forceinline__ void to_logits(const WorkTileContext& context, const RowInfo& rows, const KvTile& tile,
                                            float (&s)[kScores]) const {
    const int32_t column = tile.first + 2 * (lane_ % 4);
    if constexpr (General) {
      if constexpr (kDsMla) multiply_by_unit(tile, s);
      to_general_logits(params_, context, rows, first_row_, column, s);
    } else if (context.negate_scores) {
      negate_scores(rows, first_row_, s);
    }
    if (needs_mask(context.visible, tile.first, kBlockN)) mask_scores(rows, first_row_, column, s);
  }

  /// S = Q K^T.
  __device__ __forceinline__ void gemm0(bool by_threads, const PipelineState& at, float (&s)[kScores]) const {
    issue_gemm0(by_threads, at, s);
    ptx::wgmma_wait<0>(s);
  }
  __device__ __forceinline__ void issue_gemm0(bool by_threads, const PipelineState& at, float (&s)[kScores]) const {
    const uint64_t q = ptx::make_smem_desc<128>(smem_ + L::kQOffset, 0, 1024);
    const uint64_t k = ptx::make_smem_desc<128>(tile_address(at), 0, 1024);
    if (by_threads) {
      for (int32_t part = 0; part < kKvParts; ++part) consumer_wait(at, part);
      ptx::fence_view_async_shared();
    }
#pragma unroll
    for (int32_t part = 0; part < kKvParts; ++part) {
      consumer_wait(at, part);
      ptx::wgmma_fence();
#pragma unroll
      for (int32_t i = 4 * L::part_begin(part);
           i < min(4 * (L::part_begin(part) + L::part_size(part)), Traits::kDimQk / 16); ++i) {
        const auto offset = static_cast<uint32_t>(i / 4 * kColumnBlockBytes + i % 4 * 32);
        if (i == 0) {
          ptx::wgmma_ss<T, ptx::ScaleOut::kZero>(s, q, k);
        } else if (kDsMla && part == kRope) {
          ptx::wgmma_ss<__nv_bfloat16, ptx::ScaleOut::kOne>(s, ptx::advance_desc(q, offset),
                                                            ptx::advance_desc(k, offset));
        } else {
          ptx::wgmma_ss<T, ptx::ScaleOut::kOne>(s, ptx::advance_desc(q, offset), ptx::advance_desc(k, offset));
        }
      }
    }
    ptx::wgmma_commit();
  }

  /// Logits become p. Rescaling is lazy (decision 0040): row_max stays as long as logits exceed it by no more than
  /// kRescaleThreshold.
  __device__ __forceinline__ ScoresScale softmax(const KvTile& tile, float (&s)[kScores], uint32_t (&p)[kScores / 2]) {
    float max[2];
    reduce_max(s, max);
    ScoresScale scale;
    const float of_unit = kDsMla ? enter_unit(tile) : 1.0f;
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const float most = __fmaf_rn(max[h], scale_[h], -kPExponentBias<T>);
      const float before = row_max_[h];
      row_max_[h] = most > __fadd_rn(before, kRescaleThreshold<T>) ? most : before;
      scale.of[h] = row_max_[h] == before ? 1.0f : ptx::ex2_approx(__fadd_rn(before, -row_max_[h]));
      if constexpr (kDsMla) scale.of[h] = __fmul_rn(scale.of[h], of_unit);
      row_sum_[h] = __fmul_rn(row_sum_[h], scale.of[h]);
    }
    if constexpr (kDsMla) {
      float sums[2] = {0.0f, 0.0f};
      exponentiate(scale_, row_max_, s, sums);
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) row_sum_[h] = __fmaf_rn(sums[h], 1.0f / unit_, row_sum_[h]);
    } else {
      exponentiate(scale_, row_max_, s, row_sum_);
    }
#pragma unroll
    for (int32_t i = 0; i < kScores / 2; ++i) p[i] = ptx::pack_two<T>(s[2 * i], s[2 * i + 1]);
    return scale;
  }

  /// The same with row_max as it is, which nearly always stays: no maximum is computed. Where a sum of p says that
  /// row_max may have to grow, or there is none yet, the warp begins again from the scores. Both ways come to the same
  /// bits.
  __device__ __forceinline__ ScoresScale lazy_softmax(const KvTile& tile, float (&s)[kScores],
                                                      uint32_t (&p)[kScores / 2]) {
    float sum[2];
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      float sums[2] = {0.0f, 0.0f};
#pragma unroll
      for (int32_t i = 2 * h; i < kScores; i += 4) {
        const float low = ptx::ex2_approx(__fmaf_rn(s[i], scale_[h], -row_max_[h]));
        const float high = ptx::ex2_approx(__fmaf_rn(s[i + 1], scale_[h], -row_max_[h]));
        sums[0] = __fadd_rn(sums[0], low);
        sums[1] = __fadd_rn(sums[1], high);
        p[i / 2] = ptx::pack_two<T>(low, high);
      }
      sum[h] = __fadd_rn(sums[0], sums[1]);
    }
    bool grows =  // as bits: NaN counts as more
        __float_as_uint(sum[0]) > max_tile_sum_[0] || __float_as_uint(sum[1]) > max_tile_sum_[1];
    if constexpr (kDsMla) grows = grows || storage_.units[tile.k.stage] != unit_;
    if (__any_sync(kAllLanes, grows)) [[unlikely]]
      return softmax(tile, s, p);
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      row_sum_[h] = kDsMla ? __fmaf_rn(sum[h], 1.0f / unit_, row_sum_[h]) : __fadd_rn(row_sum_[h], sum[h]);
    }
    return {{1.0f, 1.0f}};
  }

  // fp8_ds_mla. Keys and values of a KV tile are in its unit (RowsStorage::units), O and row_sum in that of the last
  // one, which seldom differs. O over row_sum needs no unit.

  /// From the unit so far to the KV tile's. Returns what O and row_sum are multiplied by.
  __device__ __forceinline__ float enter_unit(const KvTile& tile) {
    const float unit = storage_.units[tile.k.stage];
    const float before = unit_;
    if (!General) {
#pragma unroll
      for (float& scale : scale_) scale *= before == 0.0f ? unit : unit / before;
    }
    unit_ = unit;
    return before / unit;
  }
  /// Takes over the unit that the other consumer has gone to.
  __device__ __forceinline__ void follow_unit(float unit) {
    if (unit == unit_) return;
    if (!General) {
#pragma unroll
      for (float& scale : scale_) scale *= unit_ == 0.0f ? unit : unit / unit_;
    }
    unit_ = unit;
  }
  __device__ __forceinline__ void multiply_by_unit(const KvTile& tile, float (&s)[kScores]) const {
    const float unit = storage_.units[tile.k.stage];
    if (unit == 1.0f) return;
#pragma unroll
    for (float& score : s) score *= unit;
  }
  /// Values and row_sum as they are.
  __device__ __forceinline__ void leave_unit() {
    if (unit_ == 0.0f || unit_ == 1.0f) return;
#pragma unroll
    for (float& sum : row_sum_) sum *= unit_;
    multiply_o({{unit_, unit_}});
  }

  /// P of this consumer's tile to shared memory, over the tile's RoPE part. Sets scale.rescales.
  __device__ __forceinline__ void store_p(const KvTile& tile, ScoresScale& scale,
                                          const uint32_t (&p)[kScores / 2]) const {
    TileStats& stats = storage_.tile_stats[tile.number % 2];
    if (lane_ % 4 == 0) {
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) stats.rows[first_row_ + 8 * h] = float2{row_max_[h], scale.of[h]};
    }
    // Every warp has finished its GEMM0.
    scale.rescales = ptx::named_barrier_any(kConsumerBarrier + consumer_, kWarpgroupThreads,
                                            scale.of[0] != 1.0f || scale.of[1] != 1.0f);
    if (lane_ == 0) stats.rescales[warp_] = (scale.rescales ? 1 : 0) | (kDsMla ? __float_as_uint(unit_) : 0);
#pragma unroll
    for (int32_t i = 0; i < kScores / 2; i += 4) {
      ptx::st_shared_16(p_address(tile, i / 4), uint4{p[i], p[i + 1], p[i + 2], p[i + 3]});
    }
    ptx::mbarrier_arrive(p_barrier(tile));
    ptx::fence_view_async_shared();  // a TMA load overwrites P once this warp, too, has released the RoPE part
  }

  /// P of the other consumer's tile, and the row_max that it has chosen.
  __device__ __forceinline__ ScoresScale load_p(const KvTile& tile, uint32_t (&p)[kScores / 2]) {
    const ScoresScale scale = load_stats(tile);
    read_p(tile, p);
    return scale;
  }
  __device__ __forceinline__ ScoresScale load_stats(const KvTile& tile) {
    ptx::mbarrier_wait_warp(p_barrier(tile), tile.number / 2 & 1);
    const TileStats& stats = storage_.tile_stats[tile.number % 2];
    ScoresScale scale;
    const uint32_t rescales = stats.rescales[warp_];
    scale.rescales = __any_sync(kAllLanes, (kDsMla ? rescales & 1 : rescales) != 0);
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const float2 row = stats.rows[first_row_ + 8 * h];
      row_max_[h] = row.x;
      scale.of[h] = row.y;
      row_sum_[h] = __fmul_rn(row_sum_[h], row.y);
    }
    if constexpr (kDsMla) follow_unit(__uint_as_float(rescales & ~1u));
    return scale;
  }
  __device__ __forceinline__ void read_p(const KvTile& tile, uint32_t (&p)[kScores / 2]) const {
#pragma unroll
    for (int32_t i = 0; i < kScores / 2; i += 4) {
      const uint4 chunk = ptx::ld_shared_16(p_address(tile, i / 4));
      p[i] = chunk.x;
      p[i + 1] = chunk.y;
      p[i + 2] = chunk.z;
      p[i + 3] = chunk.w;
    }
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

  __device__ __forceinline__ void wait_gemm1() {
    static_assert(kOBlocks == 2);
    ptx::wgmma_wait<0>(o_[0]);
    ptx::warpgroup_fence_operand(o_[1]);
  }

  __device__ __forceinline__ void rescale_o(const ScoresScale& scale) {
    if (scale.rescales) multiply_o(scale);
  }
  __device__ __forceinline__ void multiply_o(const ScoresScale& scale) {
#pragma unroll
    for (int32_t b = 0; b < kOBlocks; ++b) {
#pragma unroll
      for (int32_t i = 0; i < kOBlockValues; ++i) o_[b][i] = __fmul_rn(o_[b][i], scale.of[i / 2 % 2]);
      ptx::warpgroup_fence_operand(o_[b]);  // complete before the wgmma_fence that follows
    }
  }

  /// Moves the NaN and Inf of this consumer's half of V to the accumulators of the rows that see them. All warps have P
  /// of the tile here, so nobody reads the tile as keys any more.
  __device__ __forceinline__ void take_out_nonfinite(const RowInfo& rows, const KvTile& tile, uint32_t half) {
    if (*reinterpret_cast<const uint32_t*>(storage_.nonfinite[tile.v.stage][consumer_]) == 0) return;
    add_nonfinite<T>(params_, rows, half, tile.first, first_row_, o_);
    ptx::named_barrier_sync(kConsumerBarrier + consumer_, kWarpgroupThreads);
    constexpr int32_t kWords = L::kHalfColumnBlocks * kColumnBlockBytes / 4;
    zero_nonfinite<T, kWords, kWarpgroupThreads>(half, static_cast<int32_t>(threadIdx.x) % kWarpgroupThreads);
    ptx::fence_view_async_shared();
    ptx::named_barrier_sync(kConsumerBarrier + consumer_, kWarpgroupThreads);
    ptx::fence_view_async_shared();
  }

  /// Cross-warp reduction of work tile `number`: adds both consumers' row_sum.
  __device__ __forceinline__ void reduce_row_sum(int32_t number, float (&row_sum)[2]) {
    const int32_t slot = number % kWorkTileSlots;
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const int32_t row = first_row_ + 8 * h;
      row_sum_[h] = __fadd_rn(row_sum_[h], __shfl_xor_sync(kAllLanes, row_sum_[h], 1));
      row_sum_[h] = __fadd_rn(row_sum_[h], __shfl_xor_sync(kAllLanes, row_sum_[h], 2));
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
  RowsStorage& storage_;
  const int32_t consumer_;
  const uint32_t smem_;
  const uint32_t kv_full_;
  const uint32_t kv_empty_;
  const uint32_t p_full_;
  const int32_t warp_;
  const int32_t lane_;
  const int32_t first_row_;       ///< of the lane; its other row is 8 further on
  uint32_t num_kv_tiles_ = 0;     ///< of earlier work tiles
  uint32_t num_stages_used_ = 0;  ///< tiles that they have had in the KV pipeline
  float row_max_[2];              ///< what the exponents of the lane's rows subtract
  float row_sum_[2];              ///< of this consumer's tiles, this lane's share, relative to row_max_
  uint32_t max_tile_sum_[2];      ///< bits of kMaxTileSum; rows beyond the work tile's request nothing
  float scale_[2];                ///< of scores, to base-2 logits; positive
  float unit_ = 0.0f;             ///< fp8_ds_mla: of O and row_sum; 0: nothing is in them
  float o_[kOBlocks][kOBlockValues];
};

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
