#pragma once

#include "kernels/cuda/sm80/attention/softmax.cuh"

/// How items end: states go from registers to shared memory, are joined, folded into the chain's and written.
namespace folio::inline v0::kernels::cuda::sm80 {

/// What a chain of items has accumulated before the present one. Touched at the ends of items only, hence kept where it
/// takes no registers: the address is hidden from the compiler.
template <int32_t Places>
struct RunningState {
  float4 acc[Places];
  float max[Places];
  float sum[Places];
};
template <int32_t Places>
__device__ __forceinline__ RunningState<Places>& hidden(RunningState<Places>& state) {
  RunningState<Places>* address = &state;
  asm volatile("" : "+l"(address)::"memory");
  return *address;
}

/// Four neighbouring components of a row that ends here.
__device__ __forceinline__ void write_four(const AttentionParams& params, const RowPlace& row, int32_t d,
                                           const float4& acc, const RowEnd& end) {
  const int64_t at = row.token * params.out_token_stride + row.q_head * params.out_head_stride + d;
  const float values[4] = {acc.x, acc.y, acc.z, acc.w};
  if (!params.out_pairs || is_fp8(params.out_dtype)) {
#pragma unroll 1
    for (int32_t i = 0; i < 4; ++i) {
      const float value = i == 0 ? acc.x : (i == 1 ? acc.y : (i == 2 ? acc.z : acc.w));
      write_out(params, row.token, row.q_head, d + i, value, end);
    }
    return;
  }
  float out[4];
#pragma unroll
  for (int32_t i = 0; i < 4; ++i) out[i] = end.empty ? 0.0f : values[i] * end.factor / end.sum + 0.0f;
  if (params.out_dtype == DType::kFloat32) {
    auto* const to = reinterpret_cast<float2*>(static_cast<float*>(params.out) + at);
    to[0] = float2{out[0], out[1]};
    to[1] = float2{out[2], out[3]};
    return;
  }
  auto* const to = reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(params.out) + at);
  const bool is_half = params.out_dtype == DType::kFloat16;
  to[0] = is_half ? ptx::pack_two<__half>(out[0], out[1]) : ptx::pack_two<__nv_bfloat16>(out[0], out[1]);
  to[1] = is_half ? ptx::pack_two<__half>(out[2], out[3]) : ptx::pack_two<__nv_bfloat16>(out[2], out[3]);
}

/// One row's end, as far as a thread has it: either the output or a partial result.
class RowWriter {
 public:
  __device__ __forceinline__ RowWriter(const AttentionParams& params, const planner::WorkItem& item, int32_t row,
                                       float max, float sum, bool first_thread)
      : params_(params), place_(row_place(params, item, row)), partial_(item.partial < 0 ? -1 : item.partial + row) {
    if (partial_ >= 0) {
      if (!first_thread) return;
      params.partial_max[partial_] = max;
      params.partial_sum[partial_] = sum;
      return;
    }
    end_ = end_row(params, place_.q_head, max, sum);
    if (first_thread) write_lse(params, place_.token, place_.q_head, end_);
  }
  __device__ __forceinline__ void four(int32_t d, const float4& acc) const {
    if (partial_ >= 0) {
      *reinterpret_cast<float4*>(params_.partial_acc + int64_t{partial_} * params_.head_dim_v + d) = acc;
    } else {
      write_four(params_, place_, d, acc, end_);
    }
  }

 private:
  const AttentionParams& params_;
  const RowPlace place_;
  const int32_t partial_;
  RowEnd end_{};
};

__device__ __forceinline__ bool is_scaled(const Scale& scale) {
  return scale.data != nullptr || scale.value != 1.0f;
}

/// A warp's rows to `results` [result][stride] and rows.result. Nobody uses the tiles any more.
template <int32_t DimV, int32_t RowTiles, int32_t Rows>
__device__ __forceinline__ void keep_results(const RowState<RowTiles>& state, const float (&acc)[RowTiles][DimV / 8][4],
                                             int32_t first_row, int32_t column, float* results, RowInfo<Rows>& rows) {
  constexpr int32_t kStride = result_stride({DimV, DimV});
#pragma unroll
  for (int32_t m = 0; m < RowTiles; ++m) {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const int32_t row = first_row + 16 * m + 8 * h;
#pragma unroll
      for (int32_t n = 0; n < DimV / 8; ++n) {
        *reinterpret_cast<float2*>(results + row * kStride + 8 * n + column) =
            float2{acc[m][n][2 * h], acc[m][n][2 * h + 1]};
      }
      if (column != 0) continue;
      rows.result.top[row] = state.top[m][h];
      rows.result.sum[row] = state.sum[m][h];
    }
  }
}

/// Joins each row's `num_states` states (kNarrowRows results apart), scales the values, folds the state into the
/// chain's, and writes it where the chain ends. A thread has four neighbouring components of every kRowStep-th row.
template <int32_t DimV, int32_t Rows, int32_t Places>
__device__ __forceinline__ void finish_rows(const AttentionParams& params, const RowInfo<Rows>& rows,
                                            const float* results, int32_t num_states, RunningState<Places>& running) {
  constexpr int32_t kStride = result_stride({DimV, DimV});
  constexpr int32_t kQuads = DimV / 4;
  constexpr int32_t kRowStep = kThreads / kQuads;
  static_assert(Places * kRowStep >= Rows);
  const ItemContext& context = rows.context;
  const planner::WorkItem& item = context.item;
  const bool folds = (item.flags & planner::kStart) == 0;
  const bool ends = (item.flags & planner::kFinish) != 0;
  const bool scaled = context.num_tiles > 0 && is_scaled(context.segment->v_scale);
  RunningState<Places>& before = hidden(running);
  const int32_t thread = thread_number();
  const int32_t d = 4 * (thread % kQuads);
  int32_t place = 0;
#pragma unroll 1
  for (int32_t row = thread / kQuads; row < context.num_rows; row += kRowStep, ++place) {
    float max = rows.result.top[row];
#pragma unroll 1
    for (int32_t w = 1; w < num_states; ++w) max = fmaxf(max, rows.result.top[w * kNarrowRows + row]);
    float sum = 0.0f;
    float4 value{};
#pragma unroll 1
    for (int32_t w = 0; w < num_states; ++w) {
      const float top = rows.result.top[w * kNarrowRows + row];
      const float other = rows.result.sum[w * kNarrowRows + row];
      if (is_empty(top, other)) continue;
      const float factor = top == max ? 1.0f : exp2f(top - max);
      const float4 part = *reinterpret_cast<const float4*>(results + (w * kNarrowRows + row) * kStride + d);
      sum = __fmaf_rn(other, factor, sum);
      value.x = __fmaf_rn(part.x, factor, value.x);
      value.y = __fmaf_rn(part.y, factor, value.y);
      value.z = __fmaf_rn(part.z, factor, value.z);
      value.w = __fmaf_rn(part.w, factor, value.w);
    }
    if (scaled) {
      const float scale = scale_at(context.segment->v_scale, rows.request[row], item.kv_head);
      value = {__fmul_rn(value.x, scale), __fmul_rn(value.y, scale), __fmul_rn(value.z, scale),
               __fmul_rn(value.w, scale)};
    }
    if (folds) {
      const Fold factors = fold_factors(before.max[place], before.sum[place], max, sum);
      const float4 old = before.acc[place];
      sum = fold(factors, before.sum[place], sum);
      max = factors.max;
      value = {fold(factors, old.x, value.x), fold(factors, old.y, value.y), fold(factors, old.z, value.z),
               fold(factors, old.w, value.w)};
    }
    if (ends) {
      const RowWriter writer(params, item, row, max, sum, d == 0);
      if (d < params.head_dim_v) writer.four(d, value);
      continue;
    }
    before.acc[place] = value;
    before.max[place] = max;
    before.sum[place] = sum;
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm80
