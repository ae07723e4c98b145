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

/// The next item's queries may come, by copies of either kind.
__device__ __forceinline__ void give_back_item(const ResultPlace& place) {
  ptx::fence_view_async_shared();
  ptx::mbarrier_arrive(place.done);
}

/// A lane's results of rows `row` and `row` + 8, as type T, to where rows are put together.
template <typename T, int32_t DimV>
__device__ __forceinline__ void store_pairs(const float (&o)[DimV / 2], uint32_t to, int32_t row) {
#pragma unroll
  for (int32_t i = 0; i < DimV / 2; i += 2) {
    ptx::st_shared_4(to + static_cast<uint32_t>(result_offset(DimV, row + i / 2 % 2 * 8, i / 4)),
                     ptx::pack_two<T>(o[i], o[i + 1]));
  }
}

/// Where a lane's pieces of 16 bytes of its warp's sixteen rows go, in elements; -1: nowhere, the item has no such row.
/// Neighbouring lanes have a row's pieces.
template <int32_t DimV>
struct PiecePlaces {
  static constexpr int32_t kPieces = DimV / kPiece;  ///< of a row
  static constexpr int32_t kMine = 16 * kPieces / 32;
  int64_t at[kMine];
};
template <int32_t DimV>
__device__ __forceinline__ PiecePlaces<DimV> find_places(const ItemContext& context, const RowInfo& rows,
                                                         const ResultPlace& place) {
  using Places = PiecePlaces<DimV>;
  int32_t lane = place.lane;
  asm volatile("" : "+r"(lane));  // found here: loops of products have no registers for what does not change
  Places places;
#pragma unroll
  for (int32_t k = 0; k < Places::kMine; ++k) {
    const int32_t i = lane + 32 * k;
    const int32_t row = place.first_row / 16 * 16 + i / Places::kPieces;
    const int64_t at = rows.out[row] + i % Places::kPieces * kPiece;
    places.at[k] = row < context.num_rows ? at : -1;
  }
  return places;
}

/// Results of 16 bits, through shared memory, so that rows are written in pieces of 16 bytes, by a warp its own rows;
/// all of its warpgroup's products with the queries are through. The item is given back before global memory is
/// written.
template <int32_t DimV>
__device__ __forceinline__ void write_pieces(void* out, bool half, const float (&o)[DimV / 2],
                                             const PiecePlaces<DimV>& places, const ResultPlace& place) {
  using Places = PiecePlaces<DimV>;
  int32_t lane = place.lane;
  asm volatile("" : "+r"(lane));
  const int32_t begin = place.first_row % kGroupRows / 16 * 16;
  const uint32_t to = place.shared + static_cast<uint32_t>(4 * (lane % 4));
  if (half) {
    store_pairs<__half, DimV>(o, to, begin + lane / 4);
  } else {
    store_pairs<__nv_bfloat16, DimV>(o, to, begin + lane / 4);
  }
  __syncwarp();
  uint4 pieces[Places::kMine];
#pragma unroll
  for (int32_t k = 0; k < Places::kMine; ++k) {
    const int32_t i = lane + 32 * k;
    pieces[k] = ptx::ld_shared_16(
        place.shared + static_cast<uint32_t>(result_offset(DimV, begin + i / Places::kPieces, i % Places::kPieces)));
  }
  give_back_item(place);
#pragma unroll
  for (int32_t k = 0; k < Places::kMine; ++k) {
    if (places.at[k] >= 0) *reinterpret_cast<uint4*>(static_cast<uint16_t*>(out) + places.at[k]) = pieces[k];
  }
}

/// A warp's sixteen rows of results, as type T, to the place of the queries, as these lay there.
template <typename T, int32_t DimV>
__device__ __forceinline__ void store_rows(const float (&o)[DimV / 2], const ResultPlace& place) {
  // Four matrices: eight rows, the next eight, both of the next eight components. A lane gives a row of one.
  const int32_t matrix = place.lane / 8;
  const int32_t row = place.first_row % kGroupRows / 16 * 16 + matrix % 2 * 8 + place.lane % 8;
#pragma unroll
  for (int32_t i = 0; i < DimV / 2; i += 8) {
    const uint32_t four[4] = {ptx::pack_two<T>(o[i], o[i + 1]), ptx::pack_two<T>(o[i + 2], o[i + 3]),
                              ptx::pack_two<T>(o[i + 4], o[i + 5]), ptx::pack_two<T>(o[i + 6], o[i + 7])};
    ptx::stmatrix_x4(place.shared + static_cast<uint32_t>(query_offset(DimV, row, i / 4 + matrix / 2)), four);
  }
}
/// Results of 16 bits, for the loading warpgroup to store as boxes; the item is given back. All of the warpgroup's
/// products with the queries are through.
template <int32_t DimV>
__device__ __forceinline__ void leave_results(bool half, const float (&o)[DimV / 2], const ResultPlace& place) {
  if (half) {
    store_rows<__half, DimV>(o, place);
  } else {
    store_rows<__nv_bfloat16, DimV>(o, place);
  }
  give_back_item(place);
}

/// What the end of an item that is the whole of its accumulation needs of shared memory and of other lanes, if there
/// are neither sinks nor an LSE (ItemContext::plain_end): what stands in the kernel's parameters would be waited for.
struct PlainEnd {
  float top[2];
  float sum[2];
  float v_scale[2];
};
__device__ __forceinline__ PlainEnd prepare_plain_end(const RowInfo& rows, const RowState& state,
                                                      const ResultPlace& place) {
  PlainEnd end;
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    end.top[h] = state.top[h];
    end.sum[h] = __fadd_rn(state.sum[h], __shfl_xor_sync(kAllLanes, state.sum[h], 1));
    end.sum[h] = __fadd_rn(end.sum[h], __shfl_xor_sync(kAllLanes, end.sum[h], 2));
    end.v_scale[h] = rows.v_scale[place.first_row + 8 * h];
  }
  return end;
}
/// The same arithmetic as end_item's.
template <int32_t DimV>
__device__ __forceinline__ void end_plain_item(const ItemContext& context, const PlainEnd& end,
                                               const PiecePlaces<DimV>& places, float (&o)[DimV / 2],
                                               const ResultPlace& place) {
  bool empty[2];
  float factor[2];
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    empty[h] = is_empty(end.top[h], end.sum[h]);
    factor[h] = empty[h] ? 0.0f : 1.0f / end.sum[h];
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
  if (context.results_by_boxes) {
    leave_results<DimV>(context.half, o, place);
  } else {
    write_pieces<DimV>(context.out, context.half, o, places, place);
  }
}

/// The end of an item, by all warps of a warpgroup, which give it back. `o`: see MathGroup; its values are used up.
template <int32_t DimV>
__device__ __forceinline__ void end_item(const PrefillParams& all, const ItemContext& context, const RowInfo& rows,
                                         const RowState& state, float (&o)[DimV / 2], const ResultPlace& place,
                                         RunningState<DimV / 2>& running) {
  constexpr int32_t kCount = DimV / 2;
  const AttentionParams& params = all.attention;
  const scheduler::WorkTile& item = context.item;
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
    if (v_scale != 1.0f) [[unlikely]] {
#pragma unroll
      for (int32_t i = 0; i < kCount; i += 4) {
        o[i + 2 * h] = __fmul_rn(o[i + 2 * h], v_scale);
        o[i + 2 * h + 1] = __fmul_rn(o[i + 2 * h + 1], v_scale);
      }
    }
  }
  if ((item.flags & scheduler::kStart) == 0) [[unlikely]] {
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
  if ((item.flags & scheduler::kFinish) == 0) [[unlikely]] {
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
  if (item.partial >= 0) [[unlikely]] {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      if (!mine[h]) continue;
      const int32_t partial = item.partial + place.first_row + 8 * h;
      if (column == 0) {
        params.partial_row_max[partial] = max[h];
        params.partial_row_sum[partial] = sum[h];
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
  if (out_16 && all.out_wide) [[likely]] {
    ptx::named_barrier_sync(kGroupMeeting + place.group, kGroupThreads);
    write_pieces<DimV>(params.out, params.out_dtype == DType::kFloat16, o, find_places<DimV>(context, rows, place),
                       place);
    return;
  }
  RunningState<kCount>& results = hidden(running);  // its chain ends here
#pragma unroll
  for (int32_t i = 0; i < kCount; ++i) results.values[i] = o[i];
#pragma unroll 1
  for (int32_t h = 0; h < 2; ++h) {
    const int32_t row = place.first_row + 8 * h;
    if (row >= context.num_rows) continue;
    const int64_t at = rows.out[row] + column;
#pragma unroll 1
    for (int32_t i = 0; i < kCount; i += 4) {
      write_two(params, at + 2 * i, results.values[i + 2 * h], results.values[i + 2 * h + 1]);
    }
  }
  give_back_item(place);
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
