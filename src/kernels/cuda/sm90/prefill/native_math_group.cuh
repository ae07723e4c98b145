#pragma once

#include "kernels/cuda/sm90/prefill/math_group.cuh"
#include "kernels/cuda/sm90/prefill/native_values.cuh"

/// A math warpgroup whose products take codes as they are: weights become e4m3, in the order in which a lane has them.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

/// The largest weight is 2^kCodeWeightShift: what is 2^-18 of it or more is not 0 in e4m3.
constexpr float kCodeWeightShift = 8.0f;

/// Each tile's products with values are added up by float32 instructions: sums of products keep 13 bits, and would lose
/// a little more with every tile.
class NativeMathGroup : public MathGroup<__half, kNativeDims.qk, kNativeDims.v, Variant::kPlain> {
  using Base = MathGroup<__half, kNativeDims.qk, kNativeDims.v, Variant::kPlain>;
  friend Base;
  static constexpr int32_t kHalf = kValues / 2;  ///< sums of half of the components

 public:
  using Base::Base;
  __device__ __forceinline__ void run() { this->run_as(*this); }

 private:
  struct Walk : WalkPlace {
    uint32_t p[kScores / 4] = {};
    float factor[2] = {};  ///< what sums without this tile are to be multiplied with
  };

  /// See MathGroup's.
  __device__ __forceinline__ void open(Walk& walk, uint32_t queries) {
    keep_uniform(key_place_);
    keep_uniform(value_place_);
    begin_walk(walk);
    walk.q = ptx::make_smem_desc<kNativeRow>(queries, 0, kNativeEight);
    float s[kScores];
    const uint32_t keys = await(keys_ring_, key_place_);
    if (walk.by_threads) [[unlikely]]
      ptx::fence_view_async_shared();
    multiply_keys(walk.q, keys, s);
    ptx::wgmma_wait<0>(s);
    release(keys_ring_, keys);
    float base[2];
    mask<true>(walk, s);
    find_tops(s, walk.factor, base);
    make_weights(s, base, walk.factor);
    pack(s, walk.p);
  }

  /// See MathGroup's.
  __device__ __forceinline__ PlainEnd close(Walk& walk, const ResultPlace& place, PiecePlaces<kNativeDims.v>& places) {
    if (walk.edge) set_special_apart(walk.rows, walk.first);
    float s[kScores];
    const uint32_t values = await(values_ring_, value_place_);
    if (walk.by_threads) [[unlikely]]
      ptx::fence_view_async_shared();
    multiply_values(values, 0, walk.p, s);
    const PlainEnd end = prepare_plain_end(walk.rows, state_row_, place);
    places = find_places<kNativeDims.v>(walk.context, walk.rows, place);
    ptx::named_barrier_sync(kGroupMeeting + group_, kGroupThreads);
    ptx::wgmma_wait<0>(s);
    release(values_ring_, values);
    add<0>(walk.factor, s);
    return end;
  }

  /// The next tile's scores become weights while the last one's values are multiplied: half of the components until the
  /// scores' maximum is known, the others while weights are made, so that a tile's sums take half of the registers.
  template <bool Masked>
  __device__ __forceinline__ void step(Walk& walk) {
    float s[kScores];
    float factor[2];
    float base[2];
    const uint32_t keys = await(keys_ring_, key_place_);
    if constexpr (Masked) {
      if (walk.edge) [[unlikely]]
        set_special_apart(walk.rows, walk.first);
      walk.edge = is_edge(walk.context, walk.first - kTokens);
    }
    if (walk.by_threads) [[unlikely]] {
      ptx::mbarrier_wait_warp(values_ring_ + 8 * value_place_.stage, value_place_.parity);
      ptx::fence_view_async_shared();
    }
    walk.first -= kTokens;
    ptx::named_barrier_sync(kTurns + group_, kMathGroups * kGroupThreads);
    multiply_keys(walk.q, keys, s);
    const uint32_t values = await(values_ring_, value_place_);
    float part[kHalf];
    multiply_values(values, 0, walk.p, part);
    ptx::named_barrier_arrive(kTurns + 1 - group_, kMathGroups * kGroupThreads);
    ptx::wgmma_wait<1>(s);
    release(keys_ring_, keys);
    mask<Masked>(walk, s);
    find_tops(s, factor, base);
    ptx::wgmma_wait<0>(part);
    add<0>(walk.factor, part);
    multiply_values(values, kHalf, walk.p, part);
    make_weights(s, base, factor);
    ptx::wgmma_wait<0>(part);
    release(values_ring_, values);
    add<kHalf>(walk.factor, part);
    walk.factor[0] = factor[0];
    walk.factor[1] = factor[1];
    pack(s, walk.p);
  }

  template <bool Masked>
  __device__ __forceinline__ void mask(const Walk& walk, float (&s)[kScores]) const {
    if constexpr (Masked) {
      turn(walk.rows, s);
      mask_scores(walk.rows, first_row_, walk.first + 2 * (lane_ % 4), -INFINITY, s);
    }
  }

  /// The rows' maxima take in a tile's scores. `base`: what is taken from logits. Both rows side by side: a row alone
  /// has too little for a warp to do between an instruction and what waits for it.
  __device__ __forceinline__ void find_tops(const float (&s)[kScores], float (&factor)[2], float (&base)[2]) {
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
      const float top = fmaxf(state_row_.top[h], __fmaf_rn(max[h], state_row_.scale[h], -kCodeWeightShift));
      base[h] = top == -INFINITY ? 0.0f : top;
      factor[h] = ptx::ex2_approx(__fadd_rn(state_row_.top[h], -base[h]));
      state_row_.top[h] = top;
    }
  }

  /// Scores become weights, whose sums the rows take in.
  __device__ __forceinline__ void make_weights(float (&s)[kScores], const float (&base)[2], const float (&factor)[2]) {
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int32_t i = 0; i < kScores; ++i) {
      const int32_t h = i / 2 % 2;
      s[i] = ptx::ex2_approx(__fmaf_rn(s[i], state_row_.scale[h], -base[h]));
      sums[i % 4] = __fadd_rn(sums[i % 4], s[i]);
    }
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      state_row_.sum[h] = __fmaf_rn(state_row_.sum[h], factor[h], __fadd_rn(sums[2 * h], sums[2 * h + 1]));
    }
  }

  /// Weights as the product with values wants them.
  __device__ __forceinline__ static void pack(const float (&s)[kScores], uint32_t (&p)[kScores / 4]) {
#pragma unroll
    for (int32_t i = 0; i < kScores / 4; ++i) {
      const float* const from = s + i / 2 * 8 + i % 2 * 2;
      p[i] = ptx::pack_e4m3x4(from[0], from[1], from[4], from[5]);
    }
  }

  /// Adds a tile's sums of components from First on to what has been added up before.
  template <int32_t First, int32_t Count>
  __device__ __forceinline__ void add(const float (&factor)[2], const float (&part)[Count]) {
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) o_[First + i] = __fmaf_rn(o_[First + i], factor[i / 2 % 2], part[i]);
  }

  /// Before the values of the tile that begins at `first`, the next of the ring, are multiplied.
  __device__ __forceinline__ void set_special_apart(const RowInfo& rows, int32_t first) {
    ptx::mbarrier_wait_warp(values_ring_ + 8 * value_place_.stage, value_place_.parity);
    // The lane that gives the tile back is the one that reads.
    const uint32_t flags = lane_ == 0 ? *reinterpret_cast<const uint32_t*>(state_.special[value_place_.stage]) : 0;
    if (__shfl_sync(kAllLanes, flags, 0) == 0) [[likely]]
      return;
    const uint32_t tile = values_address(value_place_.stage);
    add_special_codes(params_.attention, rows, tile, first, first_row_, o_);
    ptx::named_barrier_sync(kMathMeeting, kMathGroups * kGroupThreads);
    clear_special_codes(tile, static_cast<int32_t>(threadIdx.x) - kGroupThreads);
    ptx::fence_view_async_shared();
    ptx::named_barrier_sync(kMathMeeting, kMathGroups * kGroupThreads);
    ptx::fence_view_async_shared();
  }

  __device__ __forceinline__ uint32_t values_address(uint32_t stage) const {
    return memory_ + kNativeValues + stage * kNativeTile;
  }

  /// Begins the product of the queries with a tile of keys.
  __device__ __forceinline__ void multiply_keys(uint64_t q, uint32_t stage, float (&s)[kScores]) const {
    const uint64_t k = ptx::make_smem_desc<kNativeRow>(memory_ + stage * kNativeTile, 0, kNativeEight);
    ptx::wgmma_fence();
    ptx::wgmma_fp8_ss<ptx::ScaleOut::kZero>(s, q, k);
#pragma unroll
    for (uint32_t step = 1; step < kNativeDims.qk / 32; ++step) {
      ptx::wgmma_fp8_ss<ptx::ScaleOut::kOne>(s, ptx::advance_desc(q, 32 * step), ptx::advance_desc(k, 32 * step));
    }
    ptx::wgmma_commit();
  }

  /// Begins the product of weights with a tile's values, of components from 2 * `first` on.
  template <int32_t Count>
  __device__ __forceinline__ void multiply_values(uint32_t stage, int32_t first, const uint32_t (&p)[kScores / 4],
                                                  float (&sums)[Count]) {
    const uint64_t v = ptx::make_smem_desc<kNativeRow>(
        values_address(stage) + static_cast<uint32_t>(2 * first * kNativeRow), 0, kNativeEight);
    ptx::wgmma_fence();
    ptx::wgmma_fp8_rs<ptx::ScaleOut::kZero>(sums, {p[0], p[1], p[2], p[3]}, v);
#pragma unroll
    for (uint32_t step = 1; step < kTokens / 32; ++step) {
      const uint32_t a[4] = {p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3]};
      ptx::wgmma_fp8_rs<ptx::ScaleOut::kOne>(sums, a, ptx::advance_desc(v, 32 * step));
    }
    ptx::wgmma_commit();
  }

  RingPlace<kKeyStages> key_place_;  ///< of the next tile
  RingPlace<kValueStages> value_place_;
};

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
