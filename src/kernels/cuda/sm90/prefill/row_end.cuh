#pragma once

#include "kernels/cuda/sm90/prefill/scores.cuh"
#include "ptx/tma.cuh"

/// How a warp's sixteen rows of an item end: sums are joined, folded into the chain's and written.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

/// What a chain of items has accumulated before the present one, of a lane's rows. Touched at the ends of chained items
/// only, hence kept in local memory: the address is hidden from the compiler.
template <int32_t Count>
struct RunningState {
  float values[Count];
  float max[2];
  float sum[2];
};
template <int32_t Count>
__device__ __forceinline__ RunningState<Count>& hidden(RunningState<Count>& state) {
  RunningState<Count>* address = &state;
  asm volatile("" : "+l"(address)::"memory");
  return *address;
}

/// Where a warpgroup's results are put together, and what a lane has of them.
struct ResultPlace {
  uint32_t shared;  ///< the queries' place, which nothing reads any more
  uint32_t done;  ///< barrier at which every thread arrives that reads and writes no more of the item in shared memory
  int32_t group;
  int32_t first_row;
  int32_t lane;
};

/// Two neighbouring components of a row that ends here.
__device__ __forceinline__ void write_two(const AttentionParams& params, int64_t at, float x, float y) {
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

__device__ __forceinline__ int64_t out_offset(const AttentionParams& params, const RowInfo& rows, int32_t row) {
  return rows.token[row] * params.out_token_stride + rows.q_head[row] * params.out_head_stride;
}

/// The next item's queries may come, by copies of either kind.
__device__ __forceinline__ void give_back_item(const ResultPlace& place) {
  ptx::order_before_box_copies();
  ptx::arrive(place.done);
}

/// A lane's results of rows `row` and `row` + 8, as type T, to where rows are put together.
template <typename T, int32_t DimV>
__device__ __forceinline__ void store_pairs(const float (&o)[DimV / 2], uint32_t to, int32_t row) {
#pragma unroll
  for (int32_t i = 0; i < DimV / 2; i += 2) {
    ptx::store_4(to + static_cast<uint32_t>(result_offset(DimV, row + i / 2 % 2 * 8, i / 4)),
                 ptx::pack_two<T>(o[i], o[i + 1]));
  }
}

/// Results of 16 bits, through shared memory, so that rows are written in pieces of 16 bytes. A warp has its own
/// sixteen rows; all of its warpgroup's products with the queries are through. Half a warp has a row's pieces at a
/// time. The item is given back before global memory is written.
template <int32_t DimV>
__device__ __forceinline__ void write_pieces(const AttentionParams& params, const ItemContext& context,
                                             const RowInfo& rows, const float (&o)[DimV / 2],
                                             const ResultPlace& place) {
  constexpr int32_t kPieces = DimV / kPiece;
  constexpr int32_t kMine = 16 * kPieces / 32;  ///< of a lane
  int32_t lane = place.lane;
  asm volatile("" : "+r"(lane));  // places are computed here: loops of products have no registers for them
  const int32_t begin = place.first_row % kGroupRows / 16 * 16;
  const uint32_t to = place.shared + static_cast<uint32_t>(4 * (lane % 4));
  if (params.out_dtype == DType::kFloat16) {
    store_pairs<__half, DimV>(o, to, begin + lane / 4);
  } else {
    store_pairs<__nv_bfloat16, DimV>(o, to, begin + lane / 4);
  }
  __syncwarp();
  uint4 pieces[kMine];
  int64_t at[kMine];
#pragma unroll
  for (int32_t k = 0; k < kMine; ++k) {
    const int32_t i = lane + 32 * k;
    const int32_t in_warp = begin + i / kPieces;
    const int32_t row = place.group * kGroupRows + in_warp;
    at[k] = row < context.num_rows ? out_offset(params, rows, row) + i % kPieces * kPiece : -1;
    pieces[k] = ptx::load_16(place.shared + static_cast<uint32_t>(result_offset(DimV, in_warp, i % kPieces)));
  }
  give_back_item(place);
#pragma unroll
  for (int32_t k = 0; k < kMine; ++k) {
    if (at[k] >= 0) *reinterpret_cast<uint4*>(static_cast<uint16_t*>(params.out) + at[k]) = pieces[k];
  }
}

/// The end of an item, by all warps of a warpgroup, which give it back. `o`: see MathGroup; its values are used up.
template <int32_t DimV>
__device__ __forceinline__ void end_item(const PrefillParams& all, const ItemContext& context, const RowInfo& rows,
                                         const RowState& state, float (&o)[DimV / 2], const ResultPlace& place,
                                         RunningState<DimV / 2>& running) {
  constexpr int32_t kCount = DimV / 2;
  const AttentionParams& params = all.attention;
  const planner::WorkItem& item = context.item;
  float max[2];
  float sum[2];
  bool mine[2];  // the row is one of the item's
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    max[h] = state.top[h];
    sum[h] = __fadd_rn(state.sum[h], __shfl_xor_sync(kAllLanes, state.sum[h], 1));
    sum[h] = __fadd_rn(sum[h], __shfl_xor_sync(kAllLanes, sum[h], 2));
    mine[h] = place.first_row + 8 * h < context.num_rows;
    const float v_scale = mine[h] ? rows.v_scale[place.first_row + 8 * h] : 1.0f;
    if (v_scale == 1.0f) continue;
#pragma unroll
    for (int32_t i = 0; i < kCount; i += 4) {
      o[i + 2 * h] = __fmul_rn(o[i + 2 * h], v_scale);
      o[i + 2 * h + 1] = __fmul_rn(o[i + 2 * h + 1], v_scale);
    }
  }
  if ((item.flags & planner::kStart) == 0) {
    const RunningState<kCount>& before = hidden(running);
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const Fold factors = fold_factors(before.max[h], before.sum[h], max[h], sum[h]);
      sum[h] = fold(factors, before.sum[h], sum[h]);
      max[h] = factors.max;
#pragma unroll
      for (int32_t i = 0; i < kCount / 2; ++i) {
        float& x = o[i / 2 * 4 + 2 * h + i % 2];
        x = fold(factors, before.values[i / 2 * 4 + 2 * h + i % 2], x);
      }
    }
  }
  if ((item.flags & planner::kFinish) == 0) {
    RunningState<kCount>& after = hidden(running);
#pragma unroll
    for (int32_t i = 0; i < kCount; ++i) after.values[i] = o[i];
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      after.max[h] = max[h];
      after.sum[h] = sum[h];
    }
    give_back_item(place);
    return;
  }
  const int32_t column = 2 * (place.lane % 4);
  if (item.partial >= 0) {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      if (!mine[h]) continue;
      const int32_t partial = item.partial + place.first_row + 8 * h;
      if (column == 0) {
        params.partial_max[partial] = max[h];
        params.partial_sum[partial] = sum[h];
      }
      float* const to = params.partial_acc + int64_t{partial} * DimV + column;
#pragma unroll
      for (int32_t i = 0; i < kCount; i += 4)
        *reinterpret_cast<float2*>(to + 2 * i) = float2{o[i + 2 * h], o[i + 2 * h + 1]};
    }
    give_back_item(place);
    return;
  }
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    if (!mine[h]) continue;
    const int32_t row = place.first_row + 8 * h;
    const RowEnd end = end_row(params, rows.q_head[row], max[h], sum[h]);
    if (column == 0) write_lse(params, rows.token[row], rows.q_head[row], end);
    if (end.empty) {
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
  if (out_16 && all.out_wide) {
    ptx::meet(kGroupMeeting + place.group, kGroupThreads);
    write_pieces<DimV>(params, context, rows, o, place);
    return;
  }
  RunningState<kCount>& results = hidden(running);  // its chain ends here
#pragma unroll
  for (int32_t i = 0; i < kCount; ++i) results.values[i] = o[i];
#pragma unroll 1
  for (int32_t h = 0; h < 2; ++h) {
    const int32_t row = place.first_row + 8 * h;
    if (row >= context.num_rows) continue;
    const int64_t at = out_offset(params, rows, row) + column;
#pragma unroll 1
    for (int32_t i = 0; i < kCount; i += 4) {
      write_two(params, at + 2 * i, results.values[i + 2 * h], results.values[i + 2 * h + 1]);
    }
  }
  give_back_item(place);
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
