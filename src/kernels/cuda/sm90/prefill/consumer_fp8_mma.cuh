#pragma once

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

/// The largest p is 2^kFp8PExponentBias: what is at least 2^-18 of it is not 0 in e4m3.
constexpr float kFp8PExponentBias = 8.0f;

/// O is accumulated over tiles by float32 instructions. FP8 MMA keeps 13 bits of a sum, and would lose a little more
/// with every tile.
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
    float factor[2] = {};  ///< rescales O without this tile
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
    float base[2];
    mask<true>(loop, s);
    update_row_max(s, loop.factor, base);
    exponentiate(s, base, loop.factor);
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
    accumulate<0>(loop.factor, s);
    return end;
  }

  /// GEMM0 and softmax of the next KV tile; GEMM1 of the one before overlaps it. Half of the components are multiplied
  /// until the maximum is known, the others during exponentiation, so that a tile's output takes half of the registers.
  template <bool Masked>
  __device__ __forceinline__ void step(MainloopState& loop) {
    float s[kScores];
    float factor[2];
    float base[2];
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
    consumer_release(k_pipeline_, k_stage, lane_);
    mask<Masked>(loop, s);
    update_row_max(s, factor, base);
    ptx::wgmma_wait<0>(tile_o);
    accumulate<0>(loop.factor, tile_o);
    gemm1(v_stage, kHalf, loop.p, tile_o);
    exponentiate(s, base, factor);
    ptx::wgmma_wait<0>(tile_o);
    consumer_release(v_pipeline_, v_stage, lane_);
    accumulate<kHalf>(loop.factor, tile_o);
    loop.factor[0] = factor[0];
    loop.factor[1] = factor[1];
    pack_p(s, loop.p);
  }

  template <bool Masked>
  __device__ __forceinline__ void mask(const MainloopState& loop, float (&s)[kScores]) const {
    if constexpr (Masked) {
      negate_scores(loop.rows, s);
      mask_scores(loop.rows, first_row_, loop.first + 2 * (lane_ % 4), -INFINITY, s);
    }
  }

  /// Updates row_max with a tile's scores. `base`: what is subtracted from logits. Both rows are computed side by side:
  /// one alone leaves a warp too little to do between dependent instructions.
  __device__ __forceinline__ void update_row_max(const float (&s)[kScores], float (&factor)[2], float (&base)[2]) {
    float most[8];
#pragma unroll
    for (int32_t i = 0; i < 8; ++i) most[i] = s[i];
#pragma unroll
    for (int32_t i = 8; i < kScores; ++i) most[i % 8] = fmaxf(most[i % 8], s[i]);
    float max[2];
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      max[h] = fmaxf(fmaxf(most[2 * h], most[2 * h + 1]), fmaxf(most[2 * h + 4], most[2 * h + 5]));
    }
#pragma unroll
    for (int32_t lanes = 1; lanes <= 2; lanes *= 2) {
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) max[h] = fmaxf(max[h], __shfl_xor_sync(kAllLanes, max[h], lanes));
    }
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const float row_max = fmaxf(softmax_.row_max[h], __fmaf_rn(max[h], softmax_.scale[h], -kFp8PExponentBias));
      base[h] = row_max == -INFINITY ? 0.0f : row_max;
      factor[h] = ptx::ex2_approx(__fadd_rn(softmax_.row_max[h], -base[h]));
      softmax_.row_max[h] = row_max;
    }
  }

  /// Replaces scores by p, and updates row_sum.
  __device__ __forceinline__ void exponentiate(float (&s)[kScores], const float (&base)[2], const float (&factor)[2]) {
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int32_t i = 0; i < kScores; ++i) {
      const int32_t h = i / 2 % 2;
      s[i] = ptx::ex2_approx(__fmaf_rn(s[i], softmax_.scale[h], -base[h]));
      sums[i % 4] = __fadd_rn(sums[i % 4], s[i]);
    }
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      softmax_.row_sum[h] = __fmaf_rn(softmax_.row_sum[h], factor[h], __fadd_rn(sums[2 * h], sums[2 * h + 1]));
    }
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
  __device__ __forceinline__ void accumulate(const float (&factor)[2], const float (&tile_o)[Count]) {
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) o_[First + i] = __fmaf_rn(o_[First + i], factor[i / 2 % 2], tile_o[i]);
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
