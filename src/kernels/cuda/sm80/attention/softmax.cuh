#pragma once

#include "kernels/cuda/sm80/attention/rows.cuh"

/// Scores of some row tiles of 16 against some column tiles of 8, as a warp's product leaves them: this lane has rows
/// g and g + 8 of each row tile and columns 2t and 2t + 1 of each column tile. All arithmetic is written out, so that
/// a row's bits do not depend on how many tiles a warp has.
namespace folio::inline v0::kernels::cuda::sm80 {

/// Weights are 2^(logit - top): their maximum is 2^kWeightShift, which keeps float16 weights of keys that matter little
/// above its subnormal numbers.
template <typename T>
constexpr float kWeightShift = 0.0f;
template <>
inline constexpr float kWeightShift<__half> = 12.0f;

/// By how much a logit may exceed its row's top before the top follows: weights stay numbers of the 16-bit type.
template <typename T>
constexpr float kTopSlack = 8.0f;
template <>
inline constexpr float kTopSlack<__half> = 3.0f;

/// Running state of a lane's rows. Sums are this lane's share until join_quad.
template <int32_t RowTiles>
struct RowState {
  float top[RowTiles][2];
  float sum[RowTiles][2];
  float logit_scale[RowTiles][2];  ///< to base-2 units, but to natural ones where there is a cap or a bias
};

template <int32_t Rows>
__device__ __forceinline__ bool sees(const AttentionParams& params, const RowInfo<Rows>& rows, int32_t row,
                                     int32_t token) {
  if (token < rows.visible_begin[row] || token >= rows.visible_end[row]) return false;
  if (token < rows.mask_begin[row]) return true;
  const int64_t bit = rows.mask_bit[row] + token;
  return (params.custom_mask[bit >> 3] >> (bit & 7) & 1) != 0;
}

__device__ __forceinline__ bool has_bias(const AttentionParams& params) {
  return params.soft_cap != 0.0f || params.alibi_slopes != nullptr;
}

/// c * tanh(x / c) of natural logits, within a few units of c's last place.
__device__ __forceinline__ float capped(float logit, float cap) {
  const float e = ptx::ex2_approx(__fmul_rn(logit, 2.0f * kLog2E / cap));
  return __fmul_rn(cap, __fmaf_rn(-2.0f, ptx::rcp_approx(__fadd_rn(e, 1.0f)), 1.0f));
}

/// One product as a logit in base-2 units, with what few batches have: soft cap, ALiBi, custom mask.
template <int32_t Rows>
__device__ __forceinline__ float general_logit(const AttentionParams& params, const ItemContext& context,
                                               const RowInfo<Rows>& rows, int32_t row, int32_t token, float scale,
                                               float slope, float product) {
  float x = __fmul_rn(product, scale);
  if (has_bias(params)) {
    if (params.soft_cap != 0.0f) x = capped(x, params.soft_cap);
    if (params.alibi_slopes != nullptr) {
      const int64_t key = context.first_pos + position_offset(context.shard, static_cast<uint32_t>(token));
      const int64_t apart = rows.position[row] - key;
      x = __fadd_rn(x, -__fmul_rn(slope, static_cast<float>(apart < 0 ? -apart : apart)));
    }
    x = __fmul_rn(x, kLog2E);
  }
  return context.custom && !sees(params, rows, row, token) ? -INFINITY : x;
}

/// All of a lane's products, one after the other in local memory: a loop instead of as many copies of its body.
template <int32_t RowTiles, int32_t ColumnTiles, int32_t Rows>
__device__ __forceinline__ void to_general_logits(const AttentionParams& params, const ItemContext& context,
                                                  const RowInfo<Rows>& rows, const RowState<RowTiles>& state,
                                                  int32_t first_row, int32_t first,
                                                  float (&s)[RowTiles][ColumnTiles][4]) {
  struct {
    float x[RowTiles * ColumnTiles * 4];
    float scale[RowTiles * 2];
    float slope[RowTiles * 2];
  } local;
#pragma unroll
  for (int32_t r = 0; r < 2 * RowTiles; ++r) {
    const int32_t q_head = row_place(params, context.item, first_row + 8 * r).q_head;
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
    address->x[i] = general_logit(params, context, rows, first_row + 8 * r, first + i / 4 % ColumnTiles * 8 + i % 2,
                                  address->scale[r], address->slope[r], address->x[i]);
  }
  asm volatile("" ::: "memory");
#pragma unroll
  for (int32_t i = 0; i < RowTiles * ColumnTiles * 4; ++i)
    s[i / 4 / ColumnTiles][i / 4 % ColumnTiles][i % 4] = address->x[i];
}

/// -infinity where the row does not see the key.
template <int32_t RowTiles, int32_t ColumnTiles, int32_t Rows>
__device__ __forceinline__ void mask_logits(const RowInfo<Rows>& rows, int32_t first_row, int32_t first,
                                            float (&s)[RowTiles][ColumnTiles][4]) {
#pragma unroll
  for (int32_t m = 0; m < RowTiles; ++m) {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const int32_t row = first_row + 16 * m + 8 * h;
      const int32_t begin = rows.visible_begin[row] - first;
      const int32_t end = rows.visible_end[row] - first;
#pragma unroll
      for (int32_t n = 0; n < ColumnTiles; ++n) {
#pragma unroll
        for (int32_t j = 0; j < 2; ++j) {
          const int32_t column = 8 * n + j;
          if (column < begin || column >= end) s[m][n][2 * h + j] = -INFINITY;
        }
      }
    }
  }
}

/// Products become logits in base-2 units; -infinity where the row does not see the key. A lane's rows are `first_row`
/// and those 8, 16, ... further, `first` is the token of its first column. Without `upper`, rows g + 8 are no rows of
/// the item.
template <int32_t RowTiles, int32_t ColumnTiles, int32_t Rows>
__device__ __forceinline__ void to_logits(const AttentionParams& params, const ItemContext& context,
                                          const RowInfo<Rows>& rows, const RowState<RowTiles>& state, int32_t first_row,
                                          int32_t first, bool general, bool masked, bool upper,
                                          float (&s)[RowTiles][ColumnTiles][4]) {
  if (general) {
    to_general_logits(params, context, rows, state, first_row, first, s);
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
  if (masked) mask_logits(rows, first_row, first, s);
}

/// Logits become weights, the state takes them in. Returns in `factor` what the values accumulated so far are to be
/// multiplied with, and whether any of the warp's factors is not 1.
template <typename T, int32_t RowTiles, int32_t ColumnTiles>
__device__ __forceinline__ bool to_weights(RowState<RowTiles>& state, bool upper, float (&s)[RowTiles][ColumnTiles][4],
                                           float (&factor)[RowTiles][2]) {
  bool changed = false;
#pragma unroll
  for (int32_t m = 0; m < RowTiles; ++m) {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      factor[m][h] = 1.0f;
      if (h == 1 && !upper) continue;
      float most = fmaxf(s[m][0][2 * h], s[m][0][2 * h + 1]);
#pragma unroll
      for (int32_t n = 1; n < ColumnTiles; ++n) {
        most = fmaxf(most, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
      }
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      const float top = fmaxf(state.top[m][h], __fadd_rn(most, -kWeightShift<T>));
      const float base = top == -INFINITY ? 0.0f : top;
      factor[m][h] = ptx::ex2_approx(__fadd_rn(state.top[m][h], -base));
      changed = changed || factor[m][h] != 1.0f;
      state.top[m][h] = top;
      float sum = __fmul_rn(state.sum[m][h], factor[m][h]);
#pragma unroll
      for (int32_t n = 0; n < ColumnTiles; ++n) {
#pragma unroll
        for (int32_t j = 0; j < 2; ++j) {
          float& x = s[m][n][2 * h + j];
          x = ptx::ex2_approx(__fadd_rn(x, -base));
          sum = __fadd_rn(sum, x);
        }
      }
      state.sum[m][h] = sum;
    }
  }
  return __any_sync(0xffffffffu, changed);
}

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

/// The wide way's: tops follow a tile's scores, and sums and accumulated values with them. Logits are the scores times
/// `scale`, which is positive. A row's top stays as it is while logits are less than kTopSlack above it: in most tiles
/// of a warp, none moves.
template <typename T, int32_t RowTiles, int32_t ColumnTiles, int32_t ValueTiles>
__device__ __forceinline__ void follow_scores(RowState<RowTiles>& state, const float (&scale)[RowTiles][2],
                                              const float (&s)[RowTiles][ColumnTiles][4],
                                              float (&acc)[RowTiles][ValueTiles][4]) {
  float most[RowTiles][2];
  bool exceeds = false;  // if a row's largest logit does, then that of the lane that has it
#pragma unroll
  for (int32_t m = 0; m < RowTiles; ++m) {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      most[m][h] = fmaxf(s[m][0][2 * h], s[m][0][2 * h + 1]);
#pragma unroll
      for (int32_t n = 1; n < ColumnTiles; ++n) {
        most[m][h] = fmaxf(most[m][h], fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
      }
      const float logit = __fadd_rn(__fmul_rn(most[m][h], scale[m][h]), -kWeightShift<T>);
      exceeds = exceeds || logit > __fadd_rn(state.top[m][h], kTopSlack<T>);
    }
  }
  if (!__any_sync(0xffffffffu, exceeds)) return;
  float factor[RowTiles][2];
#pragma unroll
  for (int32_t m = 0; m < RowTiles; ++m) {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      most[m][h] = fmaxf(most[m][h], __shfl_xor_sync(0xffffffffu, most[m][h], 1));
      most[m][h] = fmaxf(most[m][h], __shfl_xor_sync(0xffffffffu, most[m][h], 2));
      const float before = state.top[m][h];
      const float logit = __fadd_rn(__fmul_rn(most[m][h], scale[m][h]), -kWeightShift<T>);
      const float top = logit > __fadd_rn(before, kTopSlack<T>) ? logit : before;
      factor[m][h] = ptx::ex2_approx(__fadd_rn(before, top == -INFINITY ? 0.0f : -top));
      state.top[m][h] = top;
      state.sum[m][h] = __fmul_rn(state.sum[m][h], factor[m][h]);
    }
  }
  rescale(acc, factor);
}

/// Two scores of a row become weights, which its sum takes in.
template <typename T, int32_t RowTiles>
__device__ __forceinline__ uint32_t weigh_two(RowState<RowTiles>& state, const float (&scale)[RowTiles][2], int32_t m,
                                              int32_t h, float low, float high) {
  const float base = state.top[m][h] == -INFINITY ? 0.0f : state.top[m][h];
  low = ptx::ex2_approx(__fmaf_rn(low, scale[m][h], -base));
  high = ptx::ex2_approx(__fmaf_rn(high, scale[m][h], -base));
  float sum = __fadd_rn(__fadd_rn(state.sum[m][h], low), high);
  uint32_t weights = ptx::pack_two<T>(low, high);
  asm volatile("" : "+f"(sum), "+r"(weights));  // here, and not when the next product wants them
  state.sum[m][h] = sum;
  return weights;
}

/// A new state for an item. `Codes`: queries were scaled.
template <bool Codes, int32_t RowTiles, int32_t Rows>
__device__ __forceinline__ void begin_state(const AttentionParams& params, const ItemContext& context,
                                            const RowInfo<Rows>& rows, int32_t first_row, RowState<RowTiles>& state) {
#pragma unroll
  for (int32_t m = 0; m < RowTiles; ++m) {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const int32_t row = first_row + 16 * m + 8 * h;
      state.top[m][h] = -INFINITY;
      state.sum[m][h] = 0.0f;
      state.logit_scale[m][h] = 0.0f;
      if (row >= context.num_rows || context.num_tiles == 0) continue;
      const float q_scale = scale_at(params.q_scale, rows.request[row], context.item.kv_head);
      const float k_scale = scale_at(context.segment->k_scale, rows.request[row], context.item.kv_head);
      float scale = __fmul_rn(__fmul_rn(q_scale, k_scale), params.sm_scale);
      if constexpr (Codes) {
        scale = __fmul_rn(scale, __int_as_float((127 + int32_t{rows.query_exponent[row]}) << 23));
      }
      state.logit_scale[m][h] = has_bias(params) ? scale : __fmul_rn(scale, kLog2E);
    }
  }
}

/// The lanes' shares of the sums become the rows' sums, in every lane of a row.
template <int32_t RowTiles>
__device__ __forceinline__ void join_quad(RowState<RowTiles>& state) {
#pragma unroll
  for (int32_t m = 0; m < RowTiles; ++m) {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      float& sum = state.sum[m][h];
      sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
      sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
    }
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm80
