#pragma once

#include "kernels/cuda/sm90/common/softmax.cuh"
#include "kernels/cuda/sm90/mla/mask.cuh"

/// From scores to logits to p: the arithmetic of the online softmax on the scores of one lane. A lane has two rows, 8
/// apart; scores 4j + 2h and 4j + 2h + 1 are row h's.
namespace folio::inline v0::kernels::cuda::sm90::mla {

/// Scores to base-2 logits where there is a soft cap, ALiBi or a custom mask, which is applied too. One kernel takes
/// all three, as they are rare. `first`: the lane's first token.
template <typename Context, typename Rows, int32_t Count>
__device__ __forceinline__ void to_general_logits(const AttentionParams& params, const Context& context,
                                                  const Rows& rows, int32_t first_row, int32_t first,
                                                  float (&s)[Count]) {
  const float scale[2] = {rows.scale[first_row], rows.scale[first_row + 8]};
#pragma unroll
  for (int32_t i = 0; i < Count; ++i) s[i] = __fmul_rn(s[i], scale[i / 2 % 2]);
  if (params.soft_cap != 0.0f) {
    const float two_log2e_per_cap = 2.0f * kLog2E / params.soft_cap;
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) s[i] = soft_capped(s[i], params.soft_cap, two_log2e_per_cap);
  }
  if (params.alibi_slopes != nullptr) {
    const float slope[2] = {first_row < context.num_rows ? params.alibi_slopes[rows.q_head[first_row]] : 0.0f,
                            first_row + 8 < context.num_rows ? params.alibi_slopes[rows.q_head[first_row + 8]] : 0.0f};
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) {
      const auto token = static_cast<uint32_t>(first + i / 4 * 8 + i % 2);
      const int64_t key = context.first_pos + position_offset(context.shard, token);
      const int64_t distance = rows.position[first_row + i / 2 % 2 * 8] - key;
      s[i] = __fadd_rn(s[i], -__fmul_rn(slope[i / 2 % 2], static_cast<float>(distance < 0 ? -distance : distance)));
    }
  }
  if (has_bias(params)) {
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) s[i] = __fmul_rn(s[i], kLog2E);
  }
  if (context.custom_mask) {
    struct {
      float x[Count];
    } local;
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) local.x[i] = s[i];
    auto* address = &local;
    asm volatile("" : "+l"(address)::"memory");  // keeps it in local memory: indexed by a loop that is not unrolled
#pragma unroll 1
    for (int32_t i = 0; i < Count; ++i) {
      if (!is_visible(params, rows, first_row + i / 2 % 2 * 8, first + i / 4 * 8 + i % 2)) address->x[i] = -INFINITY;
    }
    asm volatile("" ::: "memory");
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) s[i] = address->x[i];
  }
}

/// Without a soft cap or a bias, the softmax scales with |scale|. Here a negative scale negates the row's scores, and a
/// scale of 0 or NaN multiplies them.
template <typename Rows, int32_t Count>
__device__ __forceinline__ void negate_scores(const Rows& rows, int32_t first_row, float (&s)[Count]) {
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    const float scale = rows.scale[first_row + 8 * h];
    const float factor = scale > 0.0f ? 1.0f : (scale < 0.0f ? -1.0f : scale);
#pragma unroll
    for (int32_t i = 2 * h; i < Count; i += 4) {
      s[i] = __fmul_rn(s[i], factor);
      s[i + 1] = __fmul_rn(s[i + 1], factor);
    }
  }
}

/// Largest score of each of the lane's rows. All four lanes of a row get it.
template <int32_t Count>
__device__ __forceinline__ void reduce_max(const float (&s)[Count], float (&max)[2]) {
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    max[h] = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
    for (int32_t i = 4; i < Count; i += 4) max[h] = fmaxf(max[h], fmaxf(s[i + 2 * h], s[i + 2 * h + 1]));
    max[h] = fmaxf(max[h], __shfl_xor_sync(kAllLanes, max[h], 1));
    max[h] = fmaxf(max[h], __shfl_xor_sync(kAllLanes, max[h], 2));
  }
}

/// What exponents subtract: 0 for a row that has seen nothing, as -inf - -inf is NaN.
__device__ __forceinline__ float finite_row_max(float row_max) {
  return row_max == -INFINITY ? 0.0f : row_max;
}

/// Scores become p, 2^(score * scale - row_max). Adds the lane's share of them to row_sum.
template <int32_t Count>
__device__ __forceinline__ void exponentiate(const float (&scale)[2], const float (&row_max)[2], float (&s)[Count],
                                             float (&row_sum)[2]) {
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    const float base = finite_row_max(row_max[h]);
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int32_t i = 2 * h; i < Count; i += 4) {
#pragma unroll
      for (int32_t j = 0; j < 2; ++j) {
        s[i + j] = ptx::ex2_approx(__fmaf_rn(s[i + j], scale[h], -base));
        sums[j] = __fadd_rn(sums[j], s[i + j]);
      }
    }
    row_sum[h] = __fadd_rn(row_sum[h], __fadd_rn(sums[0], sums[1]));
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
