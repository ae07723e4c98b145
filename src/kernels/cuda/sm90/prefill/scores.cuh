#pragma once

#include "kernels/cuda/sm90/prefill/edge_values.cuh"

/// Scores of a tile's 128 tokens against two of a lane's rows, as a product leaves them: see ptx/wgmma.cuh. Arithmetic
/// is written out, so that every tile of every kernel goes the same way.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

/// Weights are 2^(logit - top): their maximum is 2^kWeightShift, which keeps float16 weights of keys that matter little
/// above its subnormal numbers.
template <typename T>
constexpr float kWeightShift = 0.0f;
template <>
inline constexpr float kWeightShift<__half> = 12.0f;

/// Running state of a lane's rows g and g + 8. Sums are this lane's share until they are joined.
struct RowState {
  float top[2];
  float sum[2];
  float scale[2];  ///< of scores, to logits in base-2 units; positive
};

/// c * tanh(x / c) of natural logits, within a few units of c's last place.
__device__ __forceinline__ float capped(float logit, float cap, float twice_per_cap) {
  const float e = ptx::exp2_approximate(__fmul_rn(logit, twice_per_cap));
  return __fmul_rn(cap, __fmaf_rn(-2.0f, ptx::reciprocal_approximate(__fadd_rn(e, 1.0f)), 1.0f));
}

/// Products become logits in base-2 units: scale, soft cap, ALiBi, custom mask. `first`: the lane's first token.
template <int32_t Count>
__device__ __forceinline__ void to_general_logits(const AttentionParams& params, const ItemContext& context,
                                                  const RowInfo& rows, int32_t first_row, int32_t first,
                                                  float (&s)[Count]) {
  const float scale[2] = {rows.scale[first_row], rows.scale[first_row + 8]};
#pragma unroll
  for (int32_t i = 0; i < Count; ++i) s[i] = __fmul_rn(s[i], scale[i / 2 % 2]);
  if (params.soft_cap != 0.0f) {
    const float twice_per_cap = 2.0f * kLog2E / params.soft_cap;
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) s[i] = capped(s[i], params.soft_cap, twice_per_cap);
  }
  if (params.alibi_slopes != nullptr) {
    const float slope[2] = {first_row < context.num_rows ? params.alibi_slopes[rows.q_head[first_row]] : 0.0f,
                            first_row + 8 < context.num_rows ? params.alibi_slopes[rows.q_head[first_row + 8]] : 0.0f};
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) {
      const auto token = static_cast<uint32_t>(first + i / 4 * 8 + i % 2);
      const int64_t key = context.first_pos + position_offset(context.shard, token);
      const int64_t apart = rows.position[first_row + i / 2 % 2 * 8] - key;
      s[i] = __fadd_rn(s[i], -__fmul_rn(slope[i / 2 % 2], static_cast<float>(apart < 0 ? -apart : apart)));
    }
  }
  if (has_bias(params)) {
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) s[i] = __fmul_rn(s[i], kLog2E);
  }
  if (context.custom) {
    struct {
      float x[Count];
    } local;
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) local.x[i] = s[i];
    auto* address = &local;
    asm volatile("" : "+l"(address)::"memory");  // no registers
#pragma unroll 1
    for (int32_t i = 0; i < Count; ++i) {
      if (!sees(params, rows, first_row + i / 2 % 2 * 8, first + i / 4 * 8 + i % 2)) address->x[i] = -INFINITY;
    }
    asm volatile("" ::: "memory");
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) s[i] = address->x[i];
  }
}

/// Of a lane's columns of a row, 8j and 8j + 1, those before `column`: bits 2j and 2j + 1.
__device__ __forceinline__ uint32_t columns_before(int32_t column) {
  const int32_t count = column <= 0 ? 0 : min(column / 8 * 2 + min(column % 8, 2), 32);
  return count == 0 ? 0 : 0xffffffffu >> (32 - count);
}

/// -infinity where a row does not see the token.
template <int32_t Count>
__device__ __forceinline__ void mask_scores(const RowInfo& rows, int32_t first_row, int32_t first, float (&s)[Count]) {
  static_assert(Count <= 64);
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    const uint32_t seen = columns_before(rows.visible_end[first_row + 8 * h] - first) &
                          ~columns_before(rows.visible_begin[first_row + 8 * h] - first);
#pragma unroll
    for (int32_t i = 0; i < Count / 2; ++i) {
      if ((seen >> i & 1) == 0) s[i / 2 * 4 + 2 * h + i % 2] = -INFINITY;
    }
  }
}

/// Scores become weights, the state takes them in. `factor`: what the values accumulated so far are to be multiplied
/// with.
template <typename T, int32_t Count>
__device__ __forceinline__ void take_in(RowState& state, float (&s)[Count], float (&factor)[2]) {
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    float most[4] = {s[2 * h], s[2 * h + 1], s[2 * h + 4], s[2 * h + 5]};
#pragma unroll
    for (int32_t i = 8; i < Count; i += 4) {
      most[i / 2 % 4] = fmaxf(most[i / 2 % 4], s[i + 2 * h]);
      most[i / 2 % 4 + 1] = fmaxf(most[i / 2 % 4 + 1], s[i + 2 * h + 1]);
    }
    float max = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
    max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, 1));
    max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, 2));
    const float top = fmaxf(state.top[h], __fmaf_rn(max, state.scale[h], -kWeightShift<T>));
    const float base = top == -INFINITY ? 0.0f : top;
    factor[h] = ptx::exp2_approximate(__fadd_rn(state.top[h], -base));
    state.top[h] = top;
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int32_t i = 0; i < Count; i += 4) {
#pragma unroll
      for (int32_t j = 0; j < 2; ++j) {
        float& x = s[i + 2 * h + j];
        x = ptx::exp2_approximate(__fmaf_rn(x, state.scale[h], -base));
        sums[j] = __fadd_rn(sums[j], x);
      }
    }
    state.sum[h] = __fmaf_rn(state.sum[h], factor[h], __fadd_rn(sums[0], sums[1]));
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
