#pragma once

#include "kernels/cuda/common/nvfp4_row.cuh"
#include "kernels/cuda/sm80/attention/softmax.cuh"

/// How items end: states go from registers to shared memory, are joined, folded into the chain's and written.
namespace folio::inline v0::kernels::cuda::sm80 {

/// What a chain of items has accumulated before the present one. Touched at the ends of items only, hence kept where it
/// takes no registers: the address is hidden from the compiler.
template <int32_t Places>
struct RunningState {
  float4 acc[Places];
  float max;  ///< of the row of this thread's number
  float sum;
};
template <int32_t Places>
__device__ __forceinline__ RunningState<Places>& hidden(RunningState<Places>& state) {
  RunningState<Places>* address = &state;
  asm volatile("" : "+l"(address)::"memory");
  return *address;
}

/// Four neighbouring components of a row that ends here, multiplied with what ends it.
__device__ __forceinline__ void write_four(const AttentionParams& params, int64_t at, const float4& out) {
  if (is_fp8(params.out_dtype)) {
    auto* const to = static_cast<uint8_t*>(params.out) + at;
    const float scale = scale_at(params.out_scale, 0, 0);
#pragma unroll 1
    for (int32_t i = 0; i < 4; ++i) {
      const float value = (i == 0 ? out.x : (i == 1 ? out.y : (i == 2 ? out.z : out.w))) / scale;
      to[i] = params.out_dtype == DType::kFloat8E4M3 ? float_to_fp8_e4m3(value) : float_to_fp8_e5m2(value);
    }
    return;
  }
  if (params.out_dtype == DType::kFloat32) {
    auto* const to = static_cast<float*>(params.out) + at;
    if (params.out_pairs) {
      reinterpret_cast<float2*>(to)[0] = float2{out.x, out.y};
      reinterpret_cast<float2*>(to)[1] = float2{out.z, out.w};
    } else {
      to[0] = out.x;
      to[1] = out.y;
      to[2] = out.z;
      to[3] = out.w;
    }
    return;
  }
  auto* const to = static_cast<uint16_t*>(params.out) + at;
  const bool is_half = params.out_dtype == DType::kFloat16;
  const uint32_t low = is_half ? ptx::pack_two<__half>(out.x, out.y) : ptx::pack_two<__nv_bfloat16>(out.x, out.y);
  const uint32_t high = is_half ? ptx::pack_two<__half>(out.z, out.w) : ptx::pack_two<__nv_bfloat16>(out.z, out.w);
  if (params.out_pairs) {
    reinterpret_cast<uint32_t*>(to)[0] = low;
    reinterpret_cast<uint32_t*>(to)[1] = high;
  } else {
    to[0] = static_cast<uint16_t>(low);
    to[1] = static_cast<uint16_t>(low >> 16);
    to[2] = static_cast<uint16_t>(high);
    to[3] = static_cast<uint16_t>(high >> 16);
  }
}

/// A warp's rows to `results` [result][stride] and rows.result. Nobody uses the tiles any more. `column` is the lane's
/// first.
template <int32_t DimV, int32_t RowTiles, int32_t ColumnTiles, int32_t Rows>
__device__ __forceinline__ void keep_results(const RowState<RowTiles>& state,
                                             const float (&acc)[RowTiles][ColumnTiles][4], int32_t first_row,
                                             int32_t column, float* results, RowInfo<Rows>& rows) {
  constexpr int32_t kStride = result_stride({DimV, DimV});
#pragma unroll
  for (int32_t m = 0; m < RowTiles; ++m) {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const int32_t row = first_row + 16 * m + 8 * h;
#pragma unroll
      for (int32_t n = 0; n < ColumnTiles; ++n) {
        *reinterpret_cast<float2*>(results + row * kStride + 8 * n + column) =
            float2{acc[m][n][2 * h], acc[m][n][2 * h + 1]};
      }
      if (column != 0) continue;
      rows.result.top[row] = state.top[m][h];
      rows.result.sum[row] = state.sum[m][h];
    }
  }
}

/// The same of the narrow way's products with codes, whose lanes have components 16j + 4t to 16j + 4t + 3.
template <int32_t DimV, int32_t Rows>
__device__ __forceinline__ void keep_code_results(const RowState<1>& state, const float (&acc)[1][DimV / 8][4],
                                                  int32_t first_row, int32_t t, float* results, RowInfo<Rows>& rows) {
  constexpr int32_t kStride = result_stride({DimV, DimV});
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    const int32_t row = first_row + 8 * h;
#pragma unroll
    for (int32_t j = 0; j < DimV / 16; ++j) {
      *reinterpret_cast<float4*>(results + row * kStride + 16 * j + 4 * t) = float4{
          acc[0][2 * j][2 * h], acc[0][2 * j + 1][2 * h], acc[0][2 * j][2 * h + 1], acc[0][2 * j + 1][2 * h + 1]};
    }
    if (t != 0) continue;
    rows.result.top[row] = state.top[0][h];
    rows.result.sum[row] = state.sum[0][h];
  }
}

/// By the thread of a row's number: joins the maxima and sums of its states (`num_states`, kNarrowRows results apart),
/// folds them into the chain's, and says what the row's values are to be multiplied with.
template <int32_t Rows, int32_t Places>
__device__ __forceinline__ void end_state(const AttentionParams& params, RowInfo<Rows>& rows, int32_t row,
                                          int32_t num_states, RunningState<Places>& before) {
  const ItemContext& context = rows.context;
  const scheduler::WorkTile& item = context.item;
  float max = rows.result.top[row];
#pragma unroll 1
  for (int32_t w = 1; w < num_states; ++w) max = fmaxf(max, rows.result.top[w * kNarrowRows + row]);
  float sum = 0.0f;
#pragma unroll 1
  for (int32_t w = 0; w < num_states; ++w) {
    float& top = rows.result.top[w * kNarrowRows + row];
    const float other = rows.result.sum[w * kNarrowRows + row];
    const float factor = is_empty(top, other) ? -1.0f : (top == max ? 1.0f : exp2f(top - max));
    if (factor >= 0.0f) sum = __fmaf_rn(other, factor, sum);
    top = factor;
  }
  RowEnding ending{};
  ending.scale = context.num_tiles > 0 ? scale_at(context.segment->v_scale, rows.request[row], item.kv_head) : 1.0f;
  if ((item.flags & scheduler::kStart) == 0) {
    const Fold factors = fold_factors(before.max, before.sum, max, sum);
    sum = fold(factors, before.sum, sum);
    max = factors.max;
    ending.before = factors.mine;
    ending.here = factors.other;
  }
  if ((item.flags & scheduler::kFinish) == 0) {
    before.max = max;
    before.sum = sum;
  } else if (item.partial >= 0) {
    const int32_t partial = item.partial + row;
    params.partial_row_max[partial] = max;
    params.partial_row_sum[partial] = sum;
    ending.at = int64_t{partial} * params.head_dim_v;
  } else {
    const RowPlace place = row_place(params, item, row);
    const RowEnd end = end_row(params, place.q_head, max, sum);
    write_lse(params, place.token, place.q_head, end);
    ending.at = place.token * params.out_token_stride + place.q_head * params.out_head_stride;
    ending.factor = end.empty ? -1.0f : end.factor;
  }
  rows.ending[row] = ending;
}

__device__ __forceinline__ float4 times(const float4& value, float factor) {
  return {__fmul_rn(value.x, factor), __fmul_rn(value.y, factor), __fmul_rn(value.z, factor),
          __fmul_rn(value.w, factor)};
}

/// Rows of one state whose chain is this item alone, to an output of 16 bits: what most rows of a prefill are. As
/// finish_rows would write them, but several at once. `d` is the thread's first component.
template <int32_t DimV, int32_t Rows>
__device__ __forceinline__ void write_whole_rows(const AttentionParams& params, const RowInfo<Rows>& rows,
                                                 const float* results, int32_t first_row, int32_t d) {
  constexpr int32_t kStride = result_stride({DimV, DimV});
  constexpr int32_t kRowStep = kThreads / (DimV / 4);
  constexpr int32_t kAtOnce = 4;
  static_assert(Rows % (kAtOnce * kRowStep) == 0);
  const int32_t num_rows = rows.context.num_rows;
  const bool is_half = params.out_dtype == DType::kFloat16;
  auto* const out = static_cast<uint16_t*>(params.out) + d;
#pragma unroll 1
  for (int32_t row = first_row; row < num_rows; row += kAtOnce * kRowStep) {
    float4 value[kAtOnce];
    int64_t at[kAtOnce];
#pragma unroll
    for (int32_t i = 0; i < kAtOnce; ++i) {
      const int32_t r = row + i * kRowStep;  // rows behind the item's last have places too
      const RowEnding ending = rows.ending[r];
      const float4 part = *reinterpret_cast<const float4*>(results + r * kStride + d);
      const float here = rows.result.top[r];
      value[i] = times(times(part, here), ending.scale);
      if (here < 0.0f || ending.factor < 0.0f) value[i] = {};
      value[i] = {value[i].x * ending.factor + 0.0f, value[i].y * ending.factor + 0.0f,
                  value[i].z * ending.factor + 0.0f, value[i].w * ending.factor + 0.0f};
      at[i] = ending.at;
    }
#pragma unroll
    for (int32_t i = 0; i < kAtOnce; ++i) {
      if (row + i * kRowStep >= num_rows) break;
      const float4& v = value[i];
      auto* const to = reinterpret_cast<uint32_t*>(out + at[i]);
      to[0] = is_half ? ptx::pack_two<__half>(v.x, v.y) : ptx::pack_two<__nv_bfloat16>(v.x, v.y);
      to[1] = is_half ? ptx::pack_two<__half>(v.z, v.w) : ptx::pack_two<__nv_bfloat16>(v.z, v.w);
    }
  }
}

/// The end of an item whose results are there: see end_state. Then values are joined, folded and written; a thread has
/// four neighbouring components of every kRowStep-th row. Passes a barrier.
template <int32_t DimV, int32_t Rows, int32_t Places>
__device__ __forceinline__ void finish_rows(const AttentionParams& params, RowInfo<Rows>& rows, const float* results,
                                            int32_t num_states, RunningState<Places>& running) {
  constexpr int32_t kStride = result_stride({DimV, DimV});
  constexpr int32_t kQuads = DimV / 4;
  constexpr int32_t kRowStep = kThreads / kQuads;
  static_assert(Places * kRowStep >= Rows && Rows <= kThreads);
  const ItemContext& context = rows.context;
  const scheduler::WorkTile& item = context.item;
  RunningState<Places>& before = hidden(running);
  const int32_t thread = thread_number();
  if (thread < context.num_rows) end_state(params, rows, thread, num_states, before);
  __syncthreads();
  const bool folds = (item.flags & scheduler::kStart) == 0;
  const bool ends = (item.flags & scheduler::kFinish) != 0;
  const int32_t d = 4 * (thread % kQuads);
  if (d >= params.head_dim_v) return;
  const bool is_16_bit = params.out_dtype == DType::kFloat16 || params.out_dtype == DType::kBFloat16;
  if (num_states == 1 && !folds && ends && item.partial < 0 && is_16_bit && params.out_pairs) {
    write_whole_rows<DimV>(params, rows, results, thread / kQuads, d);
    return;
  }
  int32_t place = 0;
#pragma unroll 2
  for (int32_t row = thread / kQuads; row < context.num_rows; row += kRowStep, ++place) {
    const RowEnding ending = rows.ending[row];
    float4 value{};
#pragma unroll 1
    for (int32_t w = 0; w < num_states; ++w) {
      const float factor = rows.result.top[w * kNarrowRows + row];
      if (factor < 0.0f) continue;
      const float4 part = *reinterpret_cast<const float4*>(results + (w * kNarrowRows + row) * kStride + d);
      value.x = __fmaf_rn(part.x, factor, value.x);
      value.y = __fmaf_rn(part.y, factor, value.y);
      value.z = __fmaf_rn(part.z, factor, value.z);
      value.w = __fmaf_rn(part.w, factor, value.w);
    }
    value = times(value, ending.scale);
    if (folds) {
      const Fold factors{0.0f, ending.before, ending.here};
      const float4 old = before.acc[place];
      value = {fold(factors, old.x, value.x), fold(factors, old.y, value.y), fold(factors, old.z, value.z),
               fold(factors, old.w, value.w)};
    }
    if (!ends) {
      before.acc[place] = value;
    } else if (item.partial >= 0) {
      *reinterpret_cast<float4*>(params.partial_acc + ending.at + d) = value;
    } else {
      if (ending.factor < 0.0f) value = {};
      const float4 out{value.x * ending.factor + 0.0f, value.y * ending.factor + 0.0f, value.z * ending.factor + 0.0f,
                       value.w * ending.factor + 0.0f};
      if (params.out_dtype == DType::kFloat4E2M1x2) {
        const RowPlace at = row_place(params, item, row);
        store_nvfp4<4>(params, at.token, at.q_head, d, {out.x, out.y, out.z, out.w});
      } else {
        write_four(params, ending.at + d, out);
      }
    }
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm80
