#pragma once

#include "kernels/cuda/sm80/mask.cuh"
#include "ptx/mma.cuh"

/// Online softmax of scores as a warp's MMA leaves them, in row tiles of 16 and column tiles of 8: with g = lane / 4
/// and t = lane % 4, this lane has rows g and g + 8 of each row tile and columns 2t and 2t + 1 of each column tile.
/// Every operation is one intrinsic, so that a row's bits do not depend on how many tiles a warp has.
namespace folio::inline v0::kernels::cuda::sm80 {

/// p is 2^(logit - row_max + kPExponentBias): the largest p of a row is 2^kPExponentBias. The bias keeps float16
/// probabilities of unimportant keys out of the subnormal numbers.
template <typename T>
constexpr float kPExponentBias = 0.0f;
template <>
inline constexpr float kPExponentBias<__half> = 12.0f;

/// Lazy rescaling: row_max stays until a logit exceeds it by more than this. p then stays in the range of its type.
template <typename T>
constexpr float kRescaleThreshold = 8.0f;
template <>
inline constexpr float kRescaleThreshold<__half> = 3.0f;

/// The online softmax state of a lane's rows. row_max includes -kPExponentBias; row_sum is this lane's share until
/// quad_reduce_row_sum.
template <int32_t RowTiles>
struct RowState {
  float row_max[RowTiles][2];
  float row_sum[RowTiles][2];
  float logit_scale[RowTiles][2];  ///< of scores: to base-2 units, to natural ones where has_bias
};

/// A score as a logit in base-2 units, with soft cap, ALiBi and custom mask.
template <int32_t Rows>
__device__ __forceinline__ float biased_logit(const AttentionParams& params, const WorkTileContext& context,
                                              const SharedStorage<Rows>& storage, int32_t row, int32_t token,
                                              float scale, float slope, float product) {
  float x = __fmul_rn(product, scale);
  if (has_bias(params)) {
    if (params.soft_cap != 0.0f) x = soft_capped(x, params.soft_cap, 2.0f * kLog2E / params.soft_cap);
    if (params.alibi_slopes != nullptr) {
      const int64_t key = context.first_pos + position_offset(context.shard, static_cast<uint32_t>(token));
      const int64_t apart = storage.position[row] - key;
      x = __fadd_rn(x, -__fmul_rn(slope, static_cast<float>(apart < 0 ? -apart : apart)));
    }
    x = __fmul_rn(x, kLog2E);
  }
  return context.custom && !is_visible(params, storage, row, token) ? -INFINITY : x;
}

/// All of a lane's scores, one after the other in local memory: a rare path, so a loop instead of unrolled code.
template <int32_t RowTiles, int32_t ColumnTiles, int32_t Rows>
__device__ __forceinline__ void scores_to_biased_logits(const AttentionParams& params, const WorkTileContext& context,
                                                        const SharedStorage<Rows>& storage,
                                                        const RowState<RowTiles>& state, int32_t first_row,
                                                        int32_t first, float (&s)[RowTiles][ColumnTiles][4]) {
  struct {
    float x[RowTiles * ColumnTiles * 4];
    float scale[RowTiles * 2];
    float slope[RowTiles * 2];
  } local;
#pragma unroll
  for (int32_t r = 0; r < 2 * RowTiles; ++r) {
    const int32_t q_head = row_place(params, context.work_tile, first_row + 8 * r).q_head;
    local.slope[r] = params.alibi_slopes == nullptr ? 0.0f : params.alibi_slopes[q_head];
    local.scale[r] = state.logit_scale[r / 2][r % 2];
  }
#pragma unroll
  for (int32_t i = 0; i < RowTiles * ColumnTiles * 4; ++i)
    local.x[i] = s[i / 4 / ColumnTiles][i / 4 % ColumnTiles][i % 4];
  auto* address = &local;
  asm volatile("" : "+l"(address)::"memory");  // no registers
#pragma unroll 1
  for (int32_t i = 0; i < RowTiles * ColumnTiles * 4; ++i) {
    const int32_t r = i / 4 / ColumnTiles * 2 + i / 2 % 2;
    address->x[i] = biased_logit(params, context, storage, first_row + 8 * r, first + i / 4 % ColumnTiles * 8 + i % 2,
                                 address->scale[r], address->slope[r], address->x[i]);
  }
  asm volatile("" ::: "memory");
#pragma unroll
  for (int32_t i = 0; i < RowTiles * ColumnTiles * 4; ++i)
    s[i / 4 / ColumnTiles][i / 4 % ColumnTiles][i % 4] = address->x[i];
}

/// Scores become logits in base-2 units; -infinity where masked. Rows and `first` as in apply_mask. Without `upper`
/// rows g + 8 are not rows of the work tile.
template <int32_t RowTiles, int32_t ColumnTiles, int32_t Rows>
__device__ __forceinline__ void scores_to_logits(const AttentionParams& params, const WorkTileContext& context,
                                                 const SharedStorage<Rows>& storage, const RowState<RowTiles>& state,
                                                 int32_t first_row, int32_t first, bool general, bool masked,
                                                 bool upper, float (&s)[RowTiles][ColumnTiles][4]) {
  if (general) {
    scores_to_biased_logits(params, context, storage, state, first_row, first, s);
  } else {
#pragma unroll
    for (int32_t m = 0; m < RowTiles; ++m) {
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) {
        if (h == 1 && !upper) continue;
#pragma unroll
        for (int32_t n = 0; n < ColumnTiles; ++n) {
          s[m][n][2 * h] = __fmul_rn(s[m][n][2 * h], state.logit_scale[m][h]);
          s[m][n][2 * h + 1] = __fmul_rn(s[m][n][2 * h + 1], state.logit_scale[m][h]);
        }
      }
    }
  }
  if (masked) apply_mask(storage, first_row, first, s);
}

/// One step of the online softmax: logits become p; row_max and row_sum are updated. Sets `factor`, which rescales what
/// O has accumulated. Returns whether some factor of the warp is not 1.
template <typename T, int32_t RowTiles, int32_t ColumnTiles>
__device__ __forceinline__ bool online_softmax(RowState<RowTiles>& state, bool upper,
                                               float (&s)[RowTiles][ColumnTiles][4], float (&factor)[RowTiles][2]) {
  bool changed = false;
#pragma unroll
  for (int32_t m = 0; m < RowTiles; ++m) {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      factor[m][h] = 1.0f;
      if (h == 1 && !upper) continue;
      float tile_max = fmaxf(s[m][0][2 * h], s[m][0][2 * h + 1]);
#pragma unroll
      for (int32_t n = 1; n < ColumnTiles; ++n) {
        tile_max = fmaxf(tile_max, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
      }
      tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, 1));
      tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, 2));
      const float row_max = fmaxf(state.row_max[m][h], __fadd_rn(tile_max, -kPExponentBias<T>));
      const float base = row_max == -INFINITY ? 0.0f : row_max;
      factor[m][h] = ptx::ex2_approx(__fadd_rn(state.row_max[m][h], -base));
      changed = changed || factor[m][h] != 1.0f;
      state.row_max[m][h] = row_max;
      float row_sum = __fmul_rn(state.row_sum[m][h], factor[m][h]);
#pragma unroll
      for (int32_t n = 0; n < ColumnTiles; ++n) {
#pragma unroll
        for (int32_t j = 0; j < 2; ++j) {
          float& x = s[m][n][2 * h + j];
          x = ptx::ex2_approx(__fadd_rn(x, -base));
          row_sum = __fadd_rn(row_sum, x);
        }
      }
      state.row_sum[m][h] = row_sum;
    }
  }
  return __any_sync(0xffffffffu, changed);
}

/// Multiplies the rows of O.
template <int32_t RowTiles, int32_t ColumnTiles>
__device__ __forceinline__ void rescale(float (&acc)[RowTiles][ColumnTiles][4], const float (&factor)[RowTiles][2]) {
#pragma unroll
  for (int32_t m = 0; m < RowTiles; ++m) {
#pragma unroll
    for (int32_t n = 0; n < ColumnTiles; ++n) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) acc[m][n][i] = __fmul_rn(acc[m][n][i], factor[m][i / 2]);
    }
  }
}

/// Prefill path: updates row_max by a KV tile's scores, and rescales row_sum and O. Logits are scores times `scale`,
/// which is positive. Lazy rescaling: in most KV tiles no row_max of a warp moves, and lanes exchange nothing.
template <typename T, int32_t RowTiles, int32_t ColumnTiles, int32_t ValueTiles>
__device__ __forceinline__ void update_row_max_lazily(RowState<RowTiles>& state, const float (&scale)[RowTiles][2],
                                                      const float (&s)[RowTiles][ColumnTiles][4],
                                                      float (&acc)[RowTiles][ValueTiles][4]) {
  float tile_max[RowTiles][2];
  bool exceeds = false;  // the lane that has the row's largest logit finds it
#pragma unroll
  for (int32_t m = 0; m < RowTiles; ++m) {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      tile_max[m][h] = fmaxf(s[m][0][2 * h], s[m][0][2 * h + 1]);
#pragma unroll
      for (int32_t n = 1; n < ColumnTiles; ++n) {
        tile_max[m][h] = fmaxf(tile_max[m][h], fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
      }
      const float logit = __fadd_rn(__fmul_rn(tile_max[m][h], scale[m][h]), -kPExponentBias<T>);
      exceeds = exceeds || logit > __fadd_rn(state.row_max[m][h], kRescaleThreshold<T>);
    }
  }
  if (!__any_sync(0xffffffffu, exceeds)) return;
  float factor[RowTiles][2];
#pragma unroll
  for (int32_t m = 0; m < RowTiles; ++m) {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      tile_max[m][h] = fmaxf(tile_max[m][h], __shfl_xor_sync(0xffffffffu, tile_max[m][h], 1));
      tile_max[m][h] = fmaxf(tile_max[m][h], __shfl_xor_sync(0xffffffffu, tile_max[m][h], 2));
      const float before = state.row_max[m][h];
      const float logit = __fadd_rn(__fmul_rn(tile_max[m][h], scale[m][h]), -kPExponentBias<T>);
      const float row_max = logit > __fadd_rn(before, kRescaleThreshold<T>) ? logit : before;
      factor[m][h] = ptx::ex2_approx(__fadd_rn(before, row_max == -INFINITY ? 0.0f : -row_max));
      state.row_max[m][h] = row_max;
      state.row_sum[m][h] = __fmul_rn(state.row_sum[m][h], factor[m][h]);
    }
  }
  rescale(acc, factor);
}

/// Two scores of a row become p, packed; row_sum takes them in.
template <typename T, int32_t RowTiles>
__device__ __forceinline__ uint32_t exponentiate_pair(RowState<RowTiles>& state, const float (&scale)[RowTiles][2],
                                                      int32_t m, int32_t h, float low, float high) {
  const float base = state.row_max[m][h] == -INFINITY ? 0.0f : state.row_max[m][h];
  low = ptx::ex2_approx(__fmaf_rn(low, scale[m][h], -base));
  high = ptx::ex2_approx(__fmaf_rn(high, scale[m][h], -base));
  float row_sum = __fadd_rn(__fadd_rn(state.row_sum[m][h], low), high);
  uint32_t p = ptx::pack_two<T>(low, high);
  ptx::compute_here(row_sum, p);  // the compiler would delay it to the next MMA
  state.row_sum[m][h] = row_sum;
  return p;
}

/// A new state for a work tile. `Fp8`: convert_queries has scaled Q.
template <bool Fp8, int32_t RowTiles, int32_t Rows>
__device__ __forceinline__ void init_row_state(const AttentionParams& params, const WorkTileContext& context,
                                               const SharedStorage<Rows>& storage, int32_t first_row,
                                               RowState<RowTiles>& state) {
#pragma unroll
  for (int32_t m = 0; m < RowTiles; ++m) {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const int32_t row = first_row + 16 * m + 8 * h;
      state.row_max[m][h] = -INFINITY;
      state.row_sum[m][h] = 0.0f;
      state.logit_scale[m][h] = 0.0f;
      if (row >= context.num_rows || context.num_tiles == 0) continue;
      const float q_scale = scale_at(params.q_scale, storage.request[row], context.work_tile.kv_head);
      const float k_scale = scale_at(context.segment->k_scale, storage.request[row], context.work_tile.kv_head);
      float scale = __fmul_rn(__fmul_rn(q_scale, k_scale), params.sm_scale);
      if constexpr (Fp8) {
        scale = __fmul_rn(scale, __int_as_float((127 + int32_t{storage.query_exponent[row]}) << 23));
      }
      state.logit_scale[m][h] = has_bias(params) ? scale : __fmul_rn(scale, kLog2E);
    }
  }
}

/// Adds up row_sum over the four lanes of a row.
template <int32_t RowTiles>
__device__ __forceinline__ void quad_reduce_row_sum(RowState<RowTiles>& state) {
#pragma unroll
  for (int32_t m = 0; m < RowTiles; ++m) {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      float& row_sum = state.row_sum[m][h];
      row_sum = __fadd_rn(row_sum, __shfl_xor_sync(0xffffffffu, row_sum, 1));
      row_sum = __fadd_rn(row_sum, __shfl_xor_sync(0xffffffffu, row_sum, 2));
    }
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm80
