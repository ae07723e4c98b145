#pragma once

#include "kernels/cuda/common/mask.cuh"
#include "kernels/cuda/sm90/common/softmax.cuh"
#include "kernels/cuda/sm90/decode/smem.cuh"

/// Online softmax of a KV tile: 16 tokens against column tiles of eight rows, as S^T = K Q^T leaves them. With g = lane
/// / 4 and t = lane % 4, a lane's four scores of column tile n belong to tokens g (two) and g + 8 and to rows 8n + 2t
/// and 8n + 2t + 1. Rounding is written out, so that a row's bits do not depend on the number of column tiles.
namespace folio::inline v0::kernels::cuda::sm90::decode {

/// The exponent bias of p, see sm90::kPExponentBias. The low threshold below leaves room for more of it.
template <typename T>
constexpr float kPBias = 0.0f;
template <>
inline constexpr float kPBias<__half> = 12.0f;

/// Lazy rescaling: row_max follows a row's logits only when they exceed it by more than this, in base-2 units. So
/// rescaling is rare, and p, up to 2^(kRescaleThreshold + kPBias), stays in the range of its type.
template <typename T>
constexpr float kRescaleThreshold = 8.0f;
template <>
inline constexpr float kRescaleThreshold<__half> = 3.0f;

/// Of a lane's rows. row_sum is the lane's share until the epilogue.
template <int32_t Columns>
struct SoftmaxState {
  float row_max[Columns][2];
  float row_sum[Columns][2];
  float scale[Columns][2];
};

/// Scores become base-2 logits where there is neither soft cap nor ALiBi.
template <int32_t Columns>
__device__ __forceinline__ void scale_scores(const SoftmaxState<Columns>& state, float (&s)[Columns][4]) {
#pragma unroll
  for (int32_t n = 0; n < Columns; ++n) {
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) s[n][i] = __fmul_rn(s[n][i], state.scale[n][i % 2]);
  }
}

/// The base-2 logit of one score, with what is rare: soft cap, ALiBi, custom mask.
__device__ __forceinline__ float general_logit(const AttentionParams& params, const WorkTileContext& context,
                                               int32_t row, int32_t token, float score) {
  float x = __fmul_rn(score, context.scale[row]);
  if (has_bias(params)) {
    if (params.soft_cap != 0.0f) x = soft_capped(x, params.soft_cap, 2.0f * kLog2E / params.soft_cap);
    if (params.alibi_slopes != nullptr) {
      const int64_t key = context.first_pos + position_offset(context.shard, static_cast<uint32_t>(token));
      const int64_t apart = context.position[row] - key;
      x = __fadd_rn(x, -__fmul_rn(context.slope[row], static_cast<float>(apart < 0 ? -apart : apart)));
    }
    x = __fmul_rn(x, kLog2E);
  }
  return context.custom && !is_visible(params, context, row, token) ? -INFINITY : x;
}

/// All of a lane's scores, in a loop over shared memory instead of unrolled code. Local memory would cost 2
/// microseconds at its first touch. `scratch`: the lane's floats, 32 apart.
template <int32_t Columns>
__device__ __forceinline__ void to_general_logits(const AttentionParams& params, const WorkTileContext& context,
                                                  int32_t first, int32_t lane, float* scratch, float (&s)[Columns][4]) {
#pragma unroll
  for (int32_t i = 0; i < Columns * 4; ++i) scratch[32 * i] = s[i / 4][i % 4];
#pragma unroll 1
  for (int32_t i = 0; i < Columns * 4; ++i) {
    scratch[32 * i] = general_logit(params, context, i / 4 * 8 + lane % 4 * 2 + i % 2, first + lane / 4 + i / 2 % 2 * 8,
                                    scratch[32 * i]);
  }
#pragma unroll
  for (int32_t i = 0; i < Columns * 4; ++i) s[i / 4][i % 4] = scratch[32 * i];
}

/// Logits `s` become p, and the state takes them in. Lanes exchange maxima only where a row of the warp exceeds the
/// threshold; then O is rescaled, too.
template <typename T, int32_t Columns, int32_t Tiles>
__device__ __forceinline__ void online_softmax(SoftmaxState<Columns>& state, float (&s)[Columns][4],
                                               float (&o)[Tiles][Columns][4]) {
  float rescale[Columns][2];
  bool exceeds = false;
#pragma unroll
  for (int32_t n = 0; n < Columns; ++n) {
#pragma unroll
    for (int32_t j = 0; j < 2; ++j) {
      rescale[n][j] = __fadd_rn(fmaxf(s[n][j], s[n][2 + j]), -kPBias<T>);  // the lane's maximum, for now
      exceeds = exceeds || rescale[n][j] > __fadd_rn(state.row_max[n][j], kRescaleThreshold<T>);
    }
  }
  if (__any_sync(kAllLanes, exceeds)) {
#pragma unroll
    for (int32_t n = 0; n < Columns; ++n) {
#pragma unroll
      for (int32_t j = 0; j < 2; ++j) {
        float tile_max = rescale[n][j];
#pragma unroll
        for (int32_t step = 4; step < 32; step *= 2) {
          tile_max = fmaxf(tile_max, __shfl_xor_sync(kAllLanes, tile_max, step));
        }
        const float row_max =
            tile_max > __fadd_rn(state.row_max[n][j], kRescaleThreshold<T>) ? tile_max : state.row_max[n][j];
        const float base = row_max == -INFINITY ? 0.0f : row_max;
        rescale[n][j] = ptx::ex2_approx(__fadd_rn(state.row_max[n][j], -base));
        state.row_max[n][j] = row_max;
        state.row_sum[n][j] = __fmul_rn(state.row_sum[n][j], rescale[n][j]);
      }
    }
#pragma unroll
    for (int32_t m = 0; m < Tiles; ++m) {
#pragma unroll
      for (int32_t n = 0; n < Columns; ++n) {
#pragma unroll
        for (int32_t i = 0; i < 4; ++i) o[m][n][i] = __fmul_rn(o[m][n][i], rescale[n][i % 2]);
      }
    }
  }
#pragma unroll
  for (int32_t n = 0; n < Columns; ++n) {
#pragma unroll
    for (int32_t j = 0; j < 2; ++j) {
      const float base = state.row_max[n][j] == -INFINITY ? 0.0f : state.row_max[n][j];
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) {
        float& x = s[n][2 * h + j];
        x = ptx::ex2_approx(__fadd_rn(x, -base));
        state.row_sum[n][j] = __fadd_rn(state.row_sum[n][j], x);
      }
    }
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
