#pragma once

#include "kernels/cuda/common/combine_row.cuh"
#include "kernels/cuda/sm80/softmax.cuh"

/// The epilogue of a work tile. O goes from registers to shared memory; the states of warps are reduced (cross-warp
/// reduction), folded into the output tile's state, and written as output or as a partial result. Whoever writes the
/// last partial result of an output tile combines them.
namespace folio::inline v0::kernels::cuda::sm80 {

/// What earlier work tiles of the same output tile have accumulated. Only the epilogue uses it, so it stays in local
/// memory: its address is hidden from the compiler.
template <int32_t Places>
struct OutputTileState {
  float4 acc[Places];
  float max;  ///< of row threadIdx.x
  float row_sum;
};
template <int32_t Places>
__device__ __forceinline__ OutputTileState<Places>& opaque_ref(OutputTileState<Places>& state) {
  OutputTileState<Places>* address = &state;
  asm volatile("" : "+l"(address)::"memory");
  return *address;
}

/// Writes four neighbouring components of a finished row, of any dtype but NVFP4.
__device__ __forceinline__ void store_quad(const AttentionParams& params, int64_t at, const float4& out) {
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

/// O and the states of a warp go to `results` [row][epilogue_stride] and storage.result, in place of the tiles.
/// `column`: the lane's first.
template <int32_t DimV, int32_t RowTiles, int32_t ColumnTiles, int32_t Rows>
__device__ __forceinline__ void store_acc_to_smem(const RowState<RowTiles>& state,
                                                  const float (&acc)[RowTiles][ColumnTiles][4], int32_t first_row,
                                                  int32_t column, float* results, SharedStorage<Rows>& storage) {
  constexpr int32_t kStride = epilogue_stride({DimV, DimV});
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
      storage.result.row_max[row] = state.row_max[m][h];
      storage.result.row_sum[row] = state.row_sum[m][h];
    }
  }
}

/// The same for the decode path on fp8, whose lanes have components 16j + 4t to 16j + 4t + 3.
template <int32_t DimV, int32_t Rows>
__device__ __forceinline__ void store_fp8_acc_to_smem(const RowState<1>& state, const float (&acc)[1][DimV / 8][4],
                                                      int32_t first_row, int32_t t, float* results,
                                                      SharedStorage<Rows>& storage) {
  constexpr int32_t kStride = epilogue_stride({DimV, DimV});
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    const int32_t row = first_row + 8 * h;
#pragma unroll
    for (int32_t j = 0; j < DimV / 16; ++j) {
      *reinterpret_cast<float4*>(results + row * kStride + 16 * j + 4 * t) = float4{
          acc[0][2 * j][2 * h], acc[0][2 * j + 1][2 * h], acc[0][2 * j][2 * h + 1], acc[0][2 * j + 1][2 * h + 1]};
    }
    if (t != 0) continue;
    storage.result.row_max[row] = state.row_max[0][h];
    storage.result.row_sum[row] = state.row_sum[0][h];
  }
}

/// Cross-warp reduction of a row, by thread `row`: `num_states` states, kDecodeRows rows of `results` apart, become
/// one. Folds it into the output tile's state and sets the factors of the row's values.
template <int32_t Rows, int32_t Places>
__device__ __forceinline__ void reduce_row_states(const AttentionParams& params, SharedStorage<Rows>& storage,
                                                  int32_t row, int32_t num_states, OutputTileState<Places>& before) {
  const WorkTileContext& context = storage.context;
  const scheduler::WorkTile& work_tile = context.work_tile;
  float max = storage.result.row_max[row];
#pragma unroll 1
  for (int32_t w = 1; w < num_states; ++w) max = fmaxf(max, storage.result.row_max[w * kDecodeRows + row]);
  float row_sum = 0.0f;
#pragma unroll 1
  for (int32_t w = 0; w < num_states; ++w) {
    float& row_max = storage.result.row_max[w * kDecodeRows + row];
    const float other = storage.result.row_sum[w * kDecodeRows + row];
    const float factor = is_empty(row_max, other) ? -1.0f : (row_max == max ? 1.0f : exp2f(row_max - max));
    if (factor >= 0.0f) row_sum = __fmaf_rn(other, factor, row_sum);
    row_max = factor;
  }
  RowEpilogue epilogue{};
  epilogue.scale =
      context.num_tiles > 0 ? scale_at(context.segment->v_scale, storage.request[row], work_tile.kv_head) : 1.0f;
  if ((work_tile.flags & scheduler::kStart) == 0) {
    const Fold factors = fold_factors(before.max, before.row_sum, max, row_sum);
    row_sum = fold(factors, before.row_sum, row_sum);
    max = factors.max;
    epilogue.before = factors.mine;
    epilogue.here = factors.other;
  }
  if ((work_tile.flags & scheduler::kFinish) == 0) {
    before.max = max;
    before.row_sum = row_sum;
  } else if (work_tile.partial >= 0) {
    const int32_t partial = work_tile.partial + row;
    params.partial_row_max[partial] = max;
    params.partial_row_sum[partial] = row_sum;
    epilogue.at = int64_t{partial} * params.head_dim_v;
  } else {
    const RowPlace place = row_place(params, work_tile, row);
    const RowEnd end = end_row(params, place.q_head, max, row_sum);
    write_lse(params, place.token, place.q_head, end);
    epilogue.at = place.token * params.out_token_stride + place.q_head * params.out_head_stride;
    epilogue.factor = end.empty ? -1.0f : end.factor;
  }
  storage.epilogue[row] = epilogue;
}

__device__ __forceinline__ float4 scaled(const float4& value, float factor) {
  return {__fmul_rn(value.x, factor), __fmul_rn(value.y, factor), __fmul_rn(value.z, factor),
          __fmul_rn(value.w, factor)};
}

/// Rows of one state, whose output tile is this work tile alone, with a 16-bit output: most rows of a prefill. Same
/// results as run_epilogue, but four rows are in flight. `d`: the thread's first component.
template <int32_t DimV, int32_t Rows>
__device__ __forceinline__ void store_complete_rows(const AttentionParams& params, const SharedStorage<Rows>& storage,
                                                    const float* results, int32_t first_row, int32_t d) {
  constexpr int32_t kStride = epilogue_stride({DimV, DimV});
  constexpr int32_t kRowStep = kThreads / (DimV / 4);
  constexpr int32_t kAtOnce = 4;
  static_assert(Rows % (kAtOnce * kRowStep) == 0);
  const int32_t num_rows = storage.context.num_rows;
  const bool is_half = params.out_dtype == DType::kFloat16;
  auto* const out = static_cast<uint16_t*>(params.out) + d;
#pragma unroll 1
  for (int32_t row = first_row; row < num_rows; row += kAtOnce * kRowStep) {
    float4 value[kAtOnce];
    int64_t at[kAtOnce];
#pragma unroll
    for (int32_t i = 0; i < kAtOnce; ++i) {
      const int32_t r = row + i * kRowStep;  // rows behind the last have memory too
      const RowEpilogue epilogue = storage.epilogue[r];
      const float4 part = *reinterpret_cast<const float4*>(results + r * kStride + d);
      const float here = storage.result.row_max[r];
      value[i] = scaled(scaled(part, here), epilogue.scale);
      if (here < 0.0f || epilogue.factor < 0.0f) value[i] = {};
      value[i] = {value[i].x * epilogue.factor + 0.0f, value[i].y * epilogue.factor + 0.0f,
                  value[i].z * epilogue.factor + 0.0f, value[i].w * epilogue.factor + 0.0f};
      at[i] = epilogue.at;
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

/// By all threads, with O and the states in shared memory. A thread has four neighbouring components of every
/// kRowStep-th row. Passes a barrier.
template <int32_t DimV, int32_t Rows, int32_t Places>
__device__ __forceinline__ void run_epilogue(const AttentionParams& params, SharedStorage<Rows>& storage,
                                             const float* results, int32_t num_states,
                                             OutputTileState<Places>& running) {
  constexpr int32_t kStride = epilogue_stride({DimV, DimV});
  constexpr int32_t kQuads = DimV / 4;
  constexpr int32_t kRowStep = kThreads / kQuads;
  static_assert(Places * kRowStep >= Rows && Rows <= kThreads);
  const WorkTileContext& context = storage.context;
  const scheduler::WorkTile& work_tile = context.work_tile;
  OutputTileState<Places>& before = opaque_ref(running);
  const int32_t thread = thread_index();
  if (thread < context.num_rows) reduce_row_states(params, storage, thread, num_states, before);
  __syncthreads();
  const bool folds = (work_tile.flags & scheduler::kStart) == 0;
  const bool finishes = (work_tile.flags & scheduler::kFinish) != 0;
  const int32_t d = 4 * (thread % kQuads);
  if (d >= params.head_dim_v) return;
  const bool is_16_bit = params.out_dtype == DType::kFloat16 || params.out_dtype == DType::kBFloat16;
  if (num_states == 1 && !folds && finishes && work_tile.partial < 0 && is_16_bit && params.out_pairs) {
    store_complete_rows<DimV>(params, storage, results, thread / kQuads, d);
    return;
  }
  int32_t place = 0;
#pragma unroll 2
  for (int32_t row = thread / kQuads; row < context.num_rows; row += kRowStep, ++place) {
    const RowEpilogue epilogue = storage.epilogue[row];
    float4 value{};
#pragma unroll 1
    for (int32_t w = 0; w < num_states; ++w) {
      const float factor = storage.result.row_max[w * kDecodeRows + row];
      if (factor < 0.0f) continue;
      const float4 part = *reinterpret_cast<const float4*>(results + (w * kDecodeRows + row) * kStride + d);
      value.x = __fmaf_rn(part.x, factor, value.x);
      value.y = __fmaf_rn(part.y, factor, value.y);
      value.z = __fmaf_rn(part.z, factor, value.z);
      value.w = __fmaf_rn(part.w, factor, value.w);
    }
    value = scaled(value, epilogue.scale);
    if (folds) {
      const Fold factors{0.0f, epilogue.before, epilogue.here};
      const float4 old = before.acc[place];
      value = {fold(factors, old.x, value.x), fold(factors, old.y, value.y), fold(factors, old.z, value.z),
               fold(factors, old.w, value.w)};
    }
    if (!finishes) {
      before.acc[place] = value;
    } else if (work_tile.partial >= 0) {
      *reinterpret_cast<float4*>(params.partial_acc + epilogue.at + d) = value;
    } else {
      if (epilogue.factor < 0.0f) value = {};
      const float4 out{value.x * epilogue.factor + 0.0f, value.y * epilogue.factor + 0.0f,
                       value.z * epilogue.factor + 0.0f, value.w * epilogue.factor + 0.0f};
      if (params.out_dtype == DType::kFloat4E2M1x2) {
        const RowPlace at = row_place(params, work_tile, row);
        store_nvfp4<4>(params, at.token, at.q_head, d, {out.x, out.y, out.z, out.w});
      } else {
        store_quad(params, epilogue.at + d, out);
      }
    }
  }
}

/// Split-KV combine in the kernel, by all threads, a barrier behind the write of a partial result. Counts the result;
/// the CTA that counts the last one combines them all. Which CTA that is varies, the order of folding does not. The
/// counter is zero again at the end, for the next launch. Not inlined: it is called seldom and takes registers.
template <int32_t DimV>
__device__ __noinline__ void combine_if_last(const AttentionParams& params, int32_t index) {
  constexpr int32_t kParts = DimV <= kCombineDims ? 1 : (DimV <= 2 * kCombineDims ? 2 : 4);
  static_assert(DimV <= kParts * kCombineDims);
  const scheduler::PlanView& plan = params.plan->view;
  const scheduler::CombineTile tile = plan.combine_tiles[index];
  const auto thread = static_cast<int32_t>(threadIdx.x);
  bool last = false;
  if (thread == 0) {
    __threadfence();  // what the CTA wrote comes before the count
    uint32_t* const finished = params.combine_counters + index;
    last = atomicAdd(finished, 1u) + 1 == static_cast<uint32_t>(tile.source_end - tile.source_begin);
    if (last) *finished = 0;
    __threadfence();  // what the others wrote comes after it
  }
  if (__syncthreads_or(static_cast<int>(last)) == 0) return;
  run_combine<kParts>(params, {tile, plan.combine_sources}, thread / 32, kWarps, thread % 32);
}

}  // namespace folio::inline v0::kernels::cuda::sm80
