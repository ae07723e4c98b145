#pragma once

#include "kernels/cuda/common/numeric_conversion.cuh"
#include "kernels/cuda/sm90/prefill/consumer.cuh"
#include "ptx/wgmma.cuh"

/// The consumer warpgroups of FP8 MMA: Q, K and V are operands as they are, and p becomes e4m3 in the order in which a
/// lane has it (see vt_column).
namespace folio::inline v0::kernels::cuda::sm90::prefill {

/// Adds the NaN of a tile of V transposed to the output of the rows that see them. `first_row`: the lane's first; `o`:
/// see ConsumerWarpgroup.
__device__ __forceinline__ void add_nonfinite_fp8(const AttentionParams& params, const RowInfo& rows, uint32_t tile,
                                                  int32_t first_token, int32_t first_row,
                                                  float (&o)[kFp8MmaDims.v / 2]) {
  struct {
    float x[kFp8MmaDims.v / 2];
  } local;
#pragma unroll
  for (int32_t i = 0; i < kFp8MmaDims.v / 2; ++i) local.x[i] = o[i];
  auto* out = &local;
  asm volatile("" : "+l"(out)::"memory");  // in local memory
  const auto pair = static_cast<int32_t>(2 * (threadIdx.x % 4));
#pragma unroll 1
  for (int32_t i = 0; i < kFp8MmaDims.v / 4; ++i) {
    const int32_t component = i / 2 * 8 + pair + i % 2;
#pragma unroll 1
    for (int32_t at = 0; at < kFp8MmaBlockN; at += 4) {
      const uint32_t word =
          ptx::ld_shared_4(tile + static_cast<uint32_t>(fp8_tile_offset(component, at / 16) + at % 16));
      const uint32_t nonfinite = nonfinite_mask<__half, Fp8::kE4M3>(word);
      if (nonfinite == 0) continue;
#pragma unroll 1
      for (int32_t n = 0; n < 4; ++n) {
        if ((nonfinite >> 8 * n & 1) == 0) continue;
        const int32_t token = first_token + at / 16 * 16 + at % 16 / 2 + n % 2 + n / 2 * 8;
#pragma unroll 1
        for (int32_t h = 0; h < 2; ++h) {
          if (is_visible(params, rows, first_row + 8 * h, token)) out->x[i / 2 * 4 + 2 * h + i % 2] += NAN;
        }
      }
    }
  }
  asm volatile("" ::: "memory");
#pragma unroll
  for (int32_t i = 0; i < kFp8MmaDims.v / 2; ++i) o[i] = out->x[i];
}

/// Thread `thread` of all consumers: NaN of the tile become zeros.
__device__ __forceinline__ void clear_nonfinite_fp8(uint32_t tile, int32_t thread) {
#pragma unroll 1
  for (int32_t i = thread; i < kFp8TileBytes / 4; i += kConsumerWarpgroups * kWarpgroupThreads) {
    const uint32_t at = tile + 4 * static_cast<uint32_t>(i);
    const uint32_t word = ptx::ld_shared_4(at);
    const uint32_t nonfinite = nonfinite_mask<__half, Fp8::kE4M3>(word);
    if (nonfinite != 0) ptx::st_shared_4(at, word & ~nonfinite);
  }
}

/// The largest p is 2^kFp8PExponentBias when row_max is found, and more than half of that when it has been raised.
constexpr int32_t kFp8PExponentBias = 6;
/// The largest sum of four p that leaves row_max as it is: none of the four is beyond e4m3.
constexpr float kMaxSumOfFour = 448.0f;

/// O is accumulated over tiles by float32 instructions. FP8 MMA keeps 13 bits of a sum, and would lose a little more
/// with every tile. Rescaling is lazy, as in ConsumerWarpgroup, though e4m3 has little room for it: row_max is found in
/// the first tile that a row sees, and raised by a power of two where p would leave that room.
class Fp8MmaConsumerWarpgroup : public ConsumerWarpgroup<__half, kFp8MmaDims.qk, kFp8MmaDims.v, Variant::kPlain> {
  using Base = ConsumerWarpgroup<__half, kFp8MmaDims.qk, kFp8MmaDims.v, Variant::kPlain>;
  friend Base;
  static constexpr int32_t kHalf = kOutputs / 2;  ///< of half of the components

 public:
  using Base::Base;
  __device__ __forceinline__ void run() { this->run_as(*this); }

 private:
  struct MainloopState : MainloopPosition {
    uint32_t p[kScores / 4] = {};
  };
  /// Of a lane's p of one tile.
  struct TileSums {
    float row[2];
    float most_of_four[2];  ///< the largest sum of four
  };

  /// As in ConsumerWarpgroup.
  __device__ __forceinline__ void prologue(MainloopState& loop, uint32_t q_smem) {
    make_uniform(fp8_k_state_);
    make_uniform(vt_state_);
    begin_mainloop(loop);
    loop.q = ptx::make_smem_desc<kFp8RowBytes>(q_smem, 0, kFp8AtomBytes);
    float s[kScores];
    const uint32_t k_stage = consumer_wait(k_pipeline_, fp8_k_state_);
    if (loop.by_threads) [[unlikely]]
      ptx::fence_view_async_shared();
    gemm0(loop.q, k_stage, s);
    ptx::wgmma_wait<0>(s);
    consumer_release(k_pipeline_, k_stage, lane_);
    mask<true>(loop, s);
    find_row_max(s);
    TileSums sums;
    exponentiate<0, kScores>(s, sums);
    softmax_.row_sum[0] = sums.row[0];
    softmax_.row_sum[1] = sums.row[1];
    pack_p(s, loop.p);
  }

  /// As in ConsumerWarpgroup.
  __device__ __forceinline__ FastEpilogue tail(MainloopState& loop, const EpilogueContext& ctx,
                                               ChunkOffsets<kFp8MmaDims.v>& chunks) {
    if (loop.edge) isolate_nonfinite(loop.rows, loop.first);
    float s[kScores];
    const uint32_t v_stage = consumer_wait(v_pipeline_, vt_state_);
    if (loop.by_threads) [[unlikely]]
      ptx::fence_view_async_shared();
    gemm1(v_stage, 0, loop.p, s);
    const FastEpilogue end = prepare_fast_epilogue(loop.rows, softmax_, ctx);
    chunks = find_chunks<kFp8MmaDims.v>(loop.context, loop.rows, ctx);
    ptx::named_barrier_sync(kConsumerWarpgroupBarrier + warpgroup_, kWarpgroupThreads);
    ptx::wgmma_wait<0>(s);
    consumer_release(v_pipeline_, v_stage, lane_);
    accumulate<0>(s);
    return end;
  }

  /// Every row has seen a token, and has its row_max, before the first unmasked tile.
  __device__ __forceinline__ static int32_t unmasked_end(const TileContext& context) {
    return context.visible.all_end - 1;
  }

  /// GEMM0 and softmax of the next KV tile; GEMM1 of the one before overlaps it. Half of the components are multiplied
  /// until the first p are computed, the others meanwhile, so that a tile's output takes half of the registers. Scores
  /// are not kept: K stays in its stage until row_max is known to stay.
  template <bool Masked>
  __device__ __forceinline__ void step(MainloopState& loop) {
    float s[kScores];
    const uint32_t k_stage = consumer_wait(k_pipeline_, fp8_k_state_);
    if constexpr (Masked) {
      if (loop.edge) [[unlikely]]
        isolate_nonfinite(loop.rows, loop.first);
      loop.edge = is_edge(loop.context, loop.first - kBlockN);
    }
    if (loop.by_threads) [[unlikely]] {
      ptx::mbarrier_wait_warp(v_pipeline_ + 8 * vt_state_.stage, vt_state_.parity);
      ptx::fence_view_async_shared();
    }
    loop.first -= kBlockN;
    ptx::named_barrier_sync(kPingPongBarrier + warpgroup_, kConsumerWarpgroups * kWarpgroupThreads);
    gemm0(loop.q, k_stage, s);
    const uint32_t v_stage = consumer_wait(v_pipeline_, vt_state_);
    float tile_o[kHalf];
    gemm1(v_stage, 0, loop.p, tile_o);
    ptx::named_barrier_arrive(kPingPongBarrier + 1 - warpgroup_, kConsumerWarpgroups * kWarpgroupThreads);
    ptx::wgmma_wait<1>(s);
    mask<Masked>(loop, s);
    if constexpr (Masked) find_row_max(s);
    constexpr int32_t kEarly = kScores / 4;  // p computed while GEMM1 multiplies the first half of the components
    TileSums sums;
    exponentiate<0, kEarly>(s, sums);
    ptx::order_wait_after(sums.row[0], memory_);
    ptx::wgmma_wait<0>(tile_o);
    accumulate<0>(tile_o);
    gemm1(v_stage, kHalf, loop.p, tile_o);
    exponentiate<kEarly, kScores>(s, sums);
    ptx::wgmma_wait<0>(tile_o);
    consumer_release(v_pipeline_, v_stage, lane_);
    accumulate<kHalf>(tile_o);
    pack_p(s, loop.p);
    if (__any_sync(kAllLanes, fmaxf(sums.most_of_four[0], sums.most_of_four[1]) > kMaxSumOfFour)) [[unlikely]] {
      raise_row_max(loop, k_stage, s, sums);
      pack_p(s, loop.p);
    }
    consumer_release(k_pipeline_, k_stage, lane_);
    softmax_.row_sum[0] = __fadd_rn(softmax_.row_sum[0], sums.row[0]);
    softmax_.row_sum[1] = __fadd_rn(softmax_.row_sum[1], sums.row[1]);
  }

  template <bool Masked>
  __device__ __forceinline__ void mask(const MainloopState& loop, float (&s)[kScores]) const {
    if constexpr (Masked) {
      negate_scores(loop.rows, s);
      mask_scores(loop.rows, first_row_, loop.first + 2 * (lane_ % 4), -INFINITY, s);
    }
  }

  /// The largest of a row's scores or p in a tile.
  __device__ __forceinline__ static float largest(const float (&s)[kScores], int32_t h) {
    float most = s[2 * h];
#pragma unroll
    for (int32_t i = 0; i < kScores; i += 4) most = fmaxf(most, fmaxf(s[i + 2 * h], s[i + 2 * h + 1]));
    most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
    return fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
  }
  __device__ __forceinline__ float row_max_of(float score, int32_t h) const {
    return __fmaf_rn(score, softmax_.scale[h], -static_cast<float>(kFp8PExponentBias));
  }

  /// Finds row_max of rows that have seen no token before this tile.
  __device__ __forceinline__ void find_row_max(const float (&s)[kScores]) {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const float row_max = row_max_of(largest(s, h), h);
      if (softmax_.row_max[h] == -INFINITY) softmax_.row_max[h] = row_max;
    }
  }

  /// Replaces scores [First, End) by p, and adds them up.
  template <int32_t First, int32_t End>
  __device__ __forceinline__ void exponentiate(float (&s)[kScores], TileSums& sums) const {
    float base[2];
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) base[h] = softmax_.row_max[h] == -INFINITY ? 0.0f : softmax_.row_max[h];
#pragma unroll
    for (int32_t i = First; i < End; i += 8) {
#pragma unroll
      for (int32_t j = i; j < i + 8; ++j) {
        s[j] = ptx::ex2_approx(__fmaf_rn(s[j], softmax_.scale[j / 2 % 2], -base[j / 2 % 2]));
      }
      add_up(s, i, sums);
    }
  }

  /// Adds p of eight scores from `i` on: four of each row.
  __device__ __forceinline__ static void add_up(const float (&s)[kScores], int32_t i, TileSums& sums) {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const float* const p = s + i + 2 * h;
      const float four = __fadd_rn(__fadd_rn(p[0], p[1]), __fadd_rn(p[4], p[5]));
      sums.row[h] = i == 0 ? four : __fadd_rn(sums.row[h], four);
      sums.most_of_four[h] = i == 0 ? four : fmaxf(sums.most_of_four[h], four);
    }
  }

  /// Raises row_max of rows with a p that may be beyond e4m3. Their p, row_sum and O are scaled by a power of two.
  /// Where even float32 has no such p, they are computed from new scores.
  __device__ __forceinline__ void raise_row_max(const MainloopState& loop, uint32_t k_stage, float (&s)[kScores],
                                                TileSums& sums) {
    float factor[2] = {1.0f, 1.0f};  // of O
    bool beyond[2] = {false, false};
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      float most = sums.most_of_four[h];
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
      const float p = largest(s, h);
      const bool raises = most > kMaxSumOfFour;
      beyond[h] = raises && p == INFINITY;
      if (!raises || beyond[h]) continue;
      const int32_t by = static_cast<int32_t>(__float_as_uint(p) >> 23) - 126 - kFp8PExponentBias;
      factor[h] = __uint_as_float(static_cast<uint32_t>(127 - by) << 23);  // 2^-by
      softmax_.row_max[h] = __fadd_rn(softmax_.row_max[h], static_cast<float>(by));
    }
#pragma unroll
    for (int32_t i = 0; i < kScores; ++i) s[i] = __fmul_rn(s[i], factor[i / 2 % 2]);
    if (__any_sync(kAllLanes, beyond[0] || beyond[1])) [[unlikely]] {
      compute_scores(loop, k_stage, beyond, s);
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) {
        const float row_max = row_max_of(largest(s, h), h);
        if (!beyond[h]) continue;
        factor[h] = ptx::ex2_approx(__fadd_rn(softmax_.row_max[h], -row_max));
        softmax_.row_max[h] = row_max;
#pragma unroll
        for (int32_t i = 2 * h; i < kScores; i += i % 2 == 0 ? 1 : 3) {
          s[i] = ptx::ex2_approx(__fmaf_rn(s[i], softmax_.scale[h], -row_max));
        }
      }
    }
#pragma unroll
    for (int32_t i = 0; i < kScores; i += 8) add_up(s, i, sums);
#pragma unroll
    for (int32_t i = 0; i < kOutputs; ++i) o_[i] = __fmul_rn(o_[i], factor[i / 2 % 2]);
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) softmax_.row_sum[h] = __fmul_rn(softmax_.row_sum[h], factor[h]);
  }

  /// Replaces p of `rows` by their scores, masked. Slow, and next to never needed: a warp alone has no MMAs.
  __device__ __forceinline__ void compute_scores(const MainloopState& loop, uint32_t k_stage, const bool (&rows)[2],
                                                 float (&s)[kScores]) const {
    struct {
      float x[kScores];
    } local;
#pragma unroll
    for (int32_t i = 0; i < kScores; ++i) local.x[i] = s[i];
    auto* out = &local;
    asm volatile("" : "+l"(out)::"memory");  // in local memory
    const uint32_t q_tile = ptx::address_of_desc(loop.q);
    const uint32_t k_tile = memory_ + k_stage * kFp8TileBytes;
#pragma unroll 1
    for (int32_t i = 0; i < kScores; ++i) {
      if (!rows[i / 2 % 2]) continue;
      const int32_t row = first_row_ + i / 2 % 2 * 8;
      const int32_t column = i / 4 * 8 + lane_ % 4 * 2 + i % 2;
      float sum = 0.0f;
#pragma unroll 1
      for (int32_t at = 0; at < kFp8RowBytes; at += 4) {
        const auto offset = [at](int32_t tile_row) {
          return static_cast<uint32_t>(fp8_tile_offset(tile_row, at / 16) + at % 16);
        };
        float of_q[4];
        float of_k[4];
        narrow::e4m3_to_floats(ptx::ld_shared_4(q_tile + offset(row % kWarpgroupRows)), of_q);
        narrow::e4m3_to_floats(ptx::ld_shared_4(k_tile + offset(column)), of_k);
#pragma unroll
        for (int32_t j = 0; j < 4; ++j) sum = __fmaf_rn(of_q[j], of_k[j], sum);
      }
      out->x[i] = is_visible(params_.attention, loop.rows, row, loop.first + column)
                      ? __fmul_rn(sum, sign_of_scale(loop.rows.scale[row]))
                      : -INFINITY;
    }
    asm volatile("" ::: "memory");
#pragma unroll
    for (int32_t i = 0; i < kScores; ++i) s[i] = out->x[i];
  }

  /// p as GEMM1 takes it.
  __device__ __forceinline__ static void pack_p(const float (&s)[kScores], uint32_t (&p)[kScores / 4]) {
#pragma unroll
    for (int32_t i = 0; i < kScores / 4; ++i) {
      const float* const from = s + i / 2 * 8 + i % 2 * 2;
      p[i] = ptx::pack_e4m3x4(from[0], from[1], from[4], from[5]);
    }
  }

  /// Adds a tile's output, components from First on, to O.
  template <int32_t First, int32_t Count>
  __device__ __forceinline__ void accumulate(const float (&tile_o)[Count]) {
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) o_[First + i] = __fadd_rn(o_[First + i], tile_o[i]);
  }

  /// See ConsumerWarpgroup::isolate_nonfinite.
  __device__ __forceinline__ void isolate_nonfinite(const RowInfo& rows, int32_t first) {
    ptx::mbarrier_wait_warp(v_pipeline_ + 8 * vt_state_.stage, vt_state_.parity);
    // The lane that releases the stage is the one that reads.
    const uint32_t flags = lane_ == 0 ? *reinterpret_cast<const uint32_t*>(storage_.nonfinite[vt_state_.stage]) : 0;
    if (__shfl_sync(kAllLanes, flags, 0) == 0) [[likely]]
      return;
    const uint32_t tile = v_tile(vt_state_.stage);
    add_nonfinite_fp8(params_.attention, rows, tile, first, first_row_, o_);
    ptx::named_barrier_sync(kConsumersBarrier, kConsumerWarpgroups * kWarpgroupThreads);
    clear_nonfinite_fp8(tile, static_cast<int32_t>(threadIdx.x) - kWarpgroupThreads);
    ptx::fence_view_async_shared();
    ptx::named_barrier_sync(kConsumersBarrier, kConsumerWarpgroups * kWarpgroupThreads);
    ptx::fence_view_async_shared();
  }

  __device__ __forceinline__ uint32_t v_tile(uint32_t stage) const {
    return memory_ + kVtOffset + stage * kFp8TileBytes;
  }

  /// Issues S = Q K^T.
  __device__ __forceinline__ void gemm0(uint64_t q, uint32_t stage, float (&s)[kScores]) const {
    const uint64_t k = ptx::make_smem_desc<kFp8RowBytes>(memory_ + stage * kFp8TileBytes, 0, kFp8AtomBytes);
    ptx::wgmma_fence();
    ptx::wgmma_fp8_ss<ptx::ScaleOut::kZero>(s, q, k);
#pragma unroll
    for (uint32_t step = 1; step < kFp8MmaDims.qk / 32; ++step) {
      ptx::wgmma_fp8_ss<ptx::ScaleOut::kOne>(s, ptx::advance_desc(q, 32 * step), ptx::advance_desc(k, 32 * step));
    }
    ptx::wgmma_commit();
  }

  /// Issues P V of components from 2 * `first` on.
  template <int32_t Count>
  __device__ __forceinline__ void gemm1(uint32_t stage, int32_t first, const uint32_t (&p)[kScores / 4],
                                        float (&tile_o)[Count]) {
    const uint64_t v = ptx::make_smem_desc<kFp8RowBytes>(
        v_tile(stage) + static_cast<uint32_t>(2 * first * kFp8RowBytes), 0, kFp8AtomBytes);
    ptx::wgmma_fence();
    ptx::wgmma_fp8_rs<ptx::ScaleOut::kZero>(tile_o, {p[0], p[1], p[2], p[3]}, v);
#pragma unroll
    for (uint32_t step = 1; step < kBlockN / 32; ++step) {
      const uint32_t a[4] = {p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3]};
      ptx::wgmma_fp8_rs<ptx::ScaleOut::kOne>(tile_o, a, ptx::advance_desc(v, 32 * step));
    }
    ptx::wgmma_commit();
  }

  PipelineState<kKStages> fp8_k_state_;
  PipelineState<kVtStages> vt_state_;
};

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
