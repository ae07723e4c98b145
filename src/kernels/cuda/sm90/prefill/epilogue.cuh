#pragma once

#include "kernels/cuda/sm90/common/epilogue.cuh"
#include "kernels/cuda/sm90/prefill/softmax.cuh"
#include "ptx/tma.cuh"

/// Epilogue: reduces row_sum over the lanes, combines the row with the carried state of its output tile, normalises and
/// stores it.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

/// State of an output tile that continues in the CTA's next work tile, of a lane's rows. Only such work tiles touch it,
/// so it stays in local memory.
template <int32_t Count>
struct CarriedState {
  float o[Count];
  float row_max[2];
  float row_sum[2];
};

/// Where a consumer warpgroup stages its output, and which rows a lane has.
struct EpilogueContext {
  uint32_t out_smem;  ///< Q's memory, which nothing reads any more
  uint32_t
      tile_empty;  ///< barrier: every consumer thread arrives when it no longer accesses the work tile in shared memory
  int32_t warpgroup;
  int32_t first_row;
  int32_t lane;
};

/// Writes two neighbouring components of a finished row.
__device__ __forceinline__ void store_pair(const AttentionParams& params, int64_t at, float x, float y) {
  if (is_fp8(params.out_dtype)) {
    auto* const to = static_cast<uint8_t*>(params.out) + at;
    const float scale = scale_at(params.out_scale, 0, 0);
    const bool e4m3 = params.out_dtype == DType::kFloat8E4M3;
    to[0] = e4m3 ? float_to_fp8_e4m3(x / scale) : float_to_fp8_e5m2(x / scale);
    to[1] = e4m3 ? float_to_fp8_e4m3(y / scale) : float_to_fp8_e5m2(y / scale);
    return;
  }
  if (params.out_dtype == DType::kFloat32) {
    auto* const to = static_cast<float*>(params.out) + at;
    if (params.out_pairs) {
      *reinterpret_cast<float2*>(to) = float2{x, y};
    } else {
      to[0] = x;
      to[1] = y;
    }
    return;
  }
  auto* const to = static_cast<uint16_t*>(params.out) + at;
  const uint32_t pair =
      params.out_dtype == DType::kFloat16 ? ptx::pack_two<__half>(x, y) : ptx::pack_two<__nv_bfloat16>(x, y);
  to[0] = static_cast<uint16_t>(pair);
  to[1] = static_cast<uint16_t>(pair >> 16);
}

/// Releases the work tile: the producer may load the next one, by TMA or by threads.
__device__ __forceinline__ void release_work_tile(const EpilogueContext& ctx) {
  ptx::fence_view_async_shared();
  ptx::mbarrier_arrive(ctx.tile_empty);
}

/// Stages a lane's output of rows `row` and `row` + 8 as type T.
template <typename T, int32_t DimV>
__device__ __forceinline__ void stage_pairs(const float (&o)[DimV / 2], uint32_t to, int32_t row) {
#pragma unroll
  for (int32_t i = 0; i < DimV / 2; i += 2) {
    ptx::st_shared_4(to + static_cast<uint32_t>(out_tile_offset(DimV, row + i / 2 % 2 * 8, i / 4)),
                     ptx::pack_two<T>(o[i], o[i + 1]));
  }
}

/// Where a lane's 16-byte chunks of its warp's sixteen rows go, in elements; -1: the work tile has no such row.
/// Neighbouring lanes have the chunks of a row.
template <int32_t DimV>
struct ChunkOffsets {
  static constexpr int32_t kChunks = DimV / kElementsPer16B;  ///< of a row
  static constexpr int32_t kPerLane = 16 * kChunks / 32;
  int64_t at[kPerLane];
};
template <int32_t DimV>
__device__ __forceinline__ ChunkOffsets<DimV> find_chunks(const TileContext& context, const RowInfo& rows,
                                                          const EpilogueContext& ctx) {
  using Chunks = ChunkOffsets<DimV>;
  int32_t lane = ctx.lane;
  asm volatile("" : "+r"(lane));  // computed here: the mainloop has no registers for it
  Chunks chunks;
#pragma unroll
  for (int32_t k = 0; k < Chunks::kPerLane; ++k) {
    const int32_t i = lane + 32 * k;
    const int32_t row = ctx.first_row / 16 * 16 + i / Chunks::kChunks;
    const int64_t at = rows.out[row] + i % Chunks::kChunks * kElementsPer16B;
    chunks.at[k] = row < context.num_rows ? at : -1;
  }
  return chunks;
}

/// Stores 16-bit output through shared memory, in chunks of 16 bytes, a warp its own rows. All MMAs of its warpgroup
/// with Q must be complete. Releases the work tile before it writes to global memory.
template <int32_t DimV>
__device__ __forceinline__ void store_chunks(void* out, bool is_half, const float (&o)[DimV / 2],
                                             const ChunkOffsets<DimV>& chunks, const EpilogueContext& ctx) {
  using Chunks = ChunkOffsets<DimV>;
  int32_t lane = ctx.lane;
  asm volatile("" : "+r"(lane));
  const int32_t begin = ctx.first_row % kWarpgroupRows / 16 * 16;
  const uint32_t to = ctx.out_smem + static_cast<uint32_t>(4 * (lane % 4));
  if (is_half) {
    stage_pairs<__half, DimV>(o, to, begin + lane / 4);
  } else {
    stage_pairs<__nv_bfloat16, DimV>(o, to, begin + lane / 4);
  }
  __syncwarp();
  uint4 data[Chunks::kPerLane];
#pragma unroll
  for (int32_t k = 0; k < Chunks::kPerLane; ++k) {
    const int32_t i = lane + 32 * k;
    data[k] = ptx::ld_shared_16(
        ctx.out_smem + static_cast<uint32_t>(out_tile_offset(DimV, begin + i / Chunks::kChunks, i % Chunks::kChunks)));
  }
  release_work_tile(ctx);
#pragma unroll
  for (int32_t k = 0; k < Chunks::kPerLane; ++k) {
    if (chunks.at[k] >= 0) *reinterpret_cast<uint4*>(static_cast<uint16_t*>(out) + chunks.at[k]) = data[k];
  }
}

/// Stages a warp's sixteen rows of output as type T in Q's memory, in Q's layout.
template <typename T, int32_t DimV>
__device__ __forceinline__ void stage_rows(const float (&o)[DimV / 2], const EpilogueContext& ctx) {
  // Four matrices: eight rows, the next eight, and both of the next eight components. A lane gives the address of a row
  // of one.
  const int32_t matrix = ctx.lane / 8;
  const int32_t row = ctx.first_row % kWarpgroupRows / 16 * 16 + matrix % 2 * 8 + ctx.lane % 8;
#pragma unroll
  for (int32_t i = 0; i < DimV / 2; i += 8) {
    const uint32_t four[4] = {ptx::pack_two<T>(o[i], o[i + 1]), ptx::pack_two<T>(o[i + 2], o[i + 3]),
                              ptx::pack_two<T>(o[i + 4], o[i + 5]), ptx::pack_two<T>(o[i + 6], o[i + 7])};
    ptx::stmatrix_x4(ctx.out_smem + static_cast<uint32_t>(q_tile_offset(DimV, row, i / 4 + matrix / 2)), four);
  }
}
/// Leaves 16-bit output in shared memory for the producer's TMA store, and releases the work tile. All MMAs of the
/// warpgroup with Q must be complete.
template <int32_t DimV>
__device__ __forceinline__ void stage_for_tma(bool is_half, const float (&o)[DimV / 2], const EpilogueContext& ctx) {
  if (is_half) {
    stage_rows<__half, DimV>(o, ctx);
  } else {
    stage_rows<__nv_bfloat16, DimV>(o, ctx);
  }
  release_work_tile(ctx);
}

/// What the epilogue of a work tile that is its whole output tile, without sinks and LSE (TileContext::fast_epilogue),
/// needs of shared memory and of other lanes. It reads no kernel parameters, which would stall it.
struct FastEpilogue {
  float row_max[2];
  float row_sum[2];
  float v_scale[2];
};
__device__ __forceinline__ FastEpilogue prepare_fast_epilogue(const RowInfo& rows, const SoftmaxState& state,
                                                              const EpilogueContext& ctx) {
  FastEpilogue end;
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    end.row_max[h] = state.row_max[h];
    end.row_sum[h] = __fadd_rn(state.row_sum[h], __shfl_xor_sync(kAllLanes, state.row_sum[h], 1));
    end.row_sum[h] = __fadd_rn(end.row_sum[h], __shfl_xor_sync(kAllLanes, end.row_sum[h], 2));
    end.v_scale[h] = rows.v_scale[ctx.first_row + 8 * h];
  }
  return end;
}
/// The same arithmetic as epilogue's.
template <int32_t DimV>
__device__ __forceinline__ void fast_epilogue(const TileContext& context, const FastEpilogue& end,
                                              const ChunkOffsets<DimV>& chunks, float (&o)[DimV / 2],
                                              const EpilogueContext& ctx) {
  bool empty[2];
  float factor[2];
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    empty[h] = is_empty(end.row_max[h], end.row_sum[h]);
    factor[h] = empty[h] ? 0.0f : 1.0f / end.row_sum[h];
  }
  if (__any_sync(kAllLanes, end.v_scale[0] != 1.0f || end.v_scale[1] != 1.0f)) [[unlikely]] {
#pragma unroll
    for (int32_t i = 0; i < DimV / 2; ++i) o[i] = __fmul_rn(o[i], end.v_scale[i / 2 % 2]);
  }
#pragma unroll
  for (int32_t i = 0; i < DimV / 2; ++i) o[i] = __fmaf_rn(o[i], factor[i / 2 % 2], 0.0f);  // see row_value
  if (__any_sync(kAllLanes, empty[0] || empty[1])) [[unlikely]] {
#pragma unroll
    for (int32_t i = 0; i < DimV / 2; ++i) o[i] = empty[i / 2 % 2] ? 0.0f : o[i];
  }
  if (context.out_by_tma) {
    stage_for_tma<DimV>(context.is_half, o, ctx);
  } else {
    store_chunks<DimV>(context.out, context.is_half, o, chunks, ctx);
  }
}

/// The epilogue of a work tile, by all warps of a consumer warpgroup; releases it. `o`: see ConsumerWarpgroup; it is
/// overwritten.
template <int32_t DimV>
__device__ __forceinline__ void epilogue(const PrefillParams& all, const TileContext& context, const RowInfo& rows,
                                         const SoftmaxState& state, float (&o)[DimV / 2], const EpilogueContext& ctx,
                                         CarriedState<DimV / 2>& carried) {
  constexpr int32_t kCount = DimV / 2;
  const AttentionParams& params = all.attention;
  const scheduler::WorkTile& work_tile = context.work_tile;
  float row_max[2];
  float row_sum[2];
  bool mine[2];  // the work tile has the row
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    row_max[h] = state.row_max[h];
    row_sum[h] = __fadd_rn(state.row_sum[h], __shfl_xor_sync(kAllLanes, state.row_sum[h], 1));
    row_sum[h] = __fadd_rn(row_sum[h], __shfl_xor_sync(kAllLanes, row_sum[h], 2));
    mine[h] = ctx.first_row + 8 * h < context.num_rows;
    const float v_scale = mine[h] ? rows.v_scale[ctx.first_row + 8 * h] : 1.0f;
    if (v_scale != 1.0f) [[unlikely]] {
#pragma unroll
      for (int32_t i = 0; i < kCount; i += 4) {
        o[i + 2 * h] = __fmul_rn(o[i + 2 * h], v_scale);
        o[i + 2 * h + 1] = __fmul_rn(o[i + 2 * h + 1], v_scale);
      }
    }
  }
  if ((work_tile.flags & scheduler::kStart) == 0) [[unlikely]] {
    const CarriedState<kCount>& before = in_local_memory(carried);
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const Fold factors = fold_factors(before.row_max[h], before.row_sum[h], row_max[h], row_sum[h]);
      row_sum[h] = fold(factors, before.row_sum[h], row_sum[h]);
      row_max[h] = factors.max;
#pragma unroll
      for (int32_t i = 0; i < kCount / 2; ++i) {
        float& x = o[i / 2 * 4 + 2 * h + i % 2];
        x = fold(factors, before.o[i / 2 * 4 + 2 * h + i % 2], x);
      }
    }
  }
  if ((work_tile.flags & scheduler::kFinish) == 0) [[unlikely]] {
    CarriedState<kCount>& after = in_local_memory(carried);
#pragma unroll
    for (int32_t i = 0; i < kCount; ++i) after.o[i] = o[i];
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      after.row_max[h] = row_max[h];
      after.row_sum[h] = row_sum[h];
    }
    release_work_tile(ctx);
    return;
  }
  const int32_t column = 2 * (ctx.lane % 4);
  if (work_tile.partial >= 0) [[unlikely]] {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      if (!mine[h]) continue;
      const int32_t partial = work_tile.partial + ctx.first_row + 8 * h;
      if (column == 0) {
        params.partial_row_max[partial] = row_max[h];
        params.partial_row_sum[partial] = row_sum[h];
      }
      float* const to = params.partial_acc + int64_t{partial} * DimV + column;
#pragma unroll
      for (int32_t i = 0; i < kCount; i += 4)
        *reinterpret_cast<float2*>(to + 2 * i) = float2{o[i + 2 * h], o[i + 2 * h + 1]};
    }
    release_work_tile(ctx);
    return;
  }
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    if (!mine[h]) continue;
    const int32_t row = ctx.first_row + 8 * h;
    const RowEnd end = end_row(params, rows.q_head[row], row_max[h], row_sum[h]);
    if (column == 0) write_lse(params, rows.token[row], rows.q_head[row], end);
    if (end.empty) [[unlikely]] {
#pragma unroll
      for (int32_t i = 0; i < kCount / 2; ++i) o[i / 2 * 4 + 2 * h + i % 2] = 0.0f;
    } else {
#pragma unroll
      for (int32_t i = 0; i < kCount / 2; ++i) {
        float& x = o[i / 2 * 4 + 2 * h + i % 2];
        x = __fmaf_rn(x, end.factor, 0.0f);  // see row_value
      }
    }
  }
  const bool out_16 = params.out_dtype == DType::kFloat16 || params.out_dtype == DType::kBFloat16;
  if (out_16 && all.out_16B_aligned) [[likely]] {
    ptx::named_barrier_sync(kConsumerWarpgroupBarrier + ctx.warpgroup, kWarpgroupThreads);
    store_chunks<DimV>(params.out, params.out_dtype == DType::kFloat16, o, find_chunks<DimV>(context, rows, ctx), ctx);
    return;
  }
  CarriedState<kCount>& finished = in_local_memory(carried);  // its output tile ends here
#pragma unroll
  for (int32_t i = 0; i < kCount; ++i) finished.o[i] = o[i];
#pragma unroll 1
  for (int32_t h = 0; h < 2; ++h) {
    const int32_t row = ctx.first_row + 8 * h;
    if (row >= context.num_rows) continue;
    const int64_t at = rows.out[row] + column;
#pragma unroll 1
    for (int32_t i = 0; i < kCount; i += 4) {
      store_pair(params, at + 2 * i, finished.o[i + 2 * h], finished.o[i + 2 * h + 1]);
    }
  }
  release_work_tile(ctx);
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
