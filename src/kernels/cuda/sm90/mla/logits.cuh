#pragma once

#include "kernels/cuda/sm90/common/mask.cuh"
#include "kernels/cuda/sm90/common/softmax.cuh"
#include "kernels/cuda/sm90/mla/shared_state.cuh"

/// Logits of configurations with a soft cap, ALiBi or a custom mask, and masks: rare here, so one kernel takes them
/// all.
namespace folio::inline v0::kernels::cuda::sm90::mla {

/// Products become logits in base-2 units: scale, soft cap, ALiBi, custom mask. `first`: the lane's first token.
template <typename Context, typename Rows, int32_t Count>
__device__ __forceinline__ void to_general_logits(const AttentionParams& params, const Context& context,
                                                  const Rows& rows, int32_t first_row, int32_t first,
                                                  float (&s)[Count]) {
  const float scale[2] = {rows.scale[first_row], rows.scale[first_row + 8]};
#pragma unroll
  for (int32_t i = 0; i < Count; ++i) s[i] = __fmul_rn(s[i], scale[i / 2 % 2]);
  if (params.soft_cap != 0.0f) {
    const float twice_per_cap = 2.0f * kLog2E / params.soft_cap;
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) s[i] = soft_capped(s[i], params.soft_cap, twice_per_cap);
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
      if (!is_visible(params, rows, first_row + i / 2 % 2 * 8, first + i / 4 * 8 + i % 2)) address->x[i] = -INFINITY;
    }
    asm volatile("" ::: "memory");
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) s[i] = address->x[i];
  }
}

/// -infinity where a row does not see the token.
template <typename Rows, int32_t Count>
__device__ __forceinline__ void mask_scores(const Rows& rows, int32_t first_row, int32_t first, float (&s)[Count]) {
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    const int32_t begin = rows.visible_begin[first_row + 8 * h] - first;
    const int32_t end = rows.visible_end[first_row + 8 * h] - first;
#pragma unroll
    for (int32_t i = 0; i < Count / 2; ++i) {
      const int32_t column = i / 2 * 8 + i % 2;
      if (column < begin || column >= end) s[i / 2 * 4 + 2 * h + i % 2] = -INFINITY;
    }
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
