#pragma once

#include "kernels/cuda/sm90/common/epilogue.cuh"
#include "kernels/cuda/sm90/mla/shared_state.cuh"

/// How a math warpgroup's half of an item's rows ends: values are folded into the chain's and written.
namespace folio::inline v0::kernels::cuda::sm90::mla {

/// Products have 128 columns: a warpgroup's half is two of them. A lane has 64 values of each.
constexpr int32_t kBlocks = kHalfColumns / 2;
constexpr int32_t kBlockValues = 64;

/// What a chain of items has accumulated before the present one, of a lane's rows. Touched at the ends of items only,
/// hence kept in local memory: see sm90::in_local_memory.
struct ChainState {
  float values[kBlocks][kBlockValues];
  float max[2];
  float sum[2];
};

/// A lane's place: its rows are first_row and first_row + 8, its components come in pairs, 8 apart.
struct LanePlace {
  int32_t first_row;
  int32_t first_component;
  bool first_of_row;  ///< writes what there is one of a row
};

/// Calls function(h, component, x, y) for the lane's pairs of values.
template <typename Function>
__device__ __forceinline__ void for_pairs(float (&o)[kBlocks][kBlockValues], int32_t h, const LanePlace& place,
                                          const Function& function) {
#pragma unroll
  for (int32_t b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int32_t i = 0; i < kBlockValues; i += 4) {
      function(place.first_component + 128 * b + 2 * i, o[b][i + 2 * h], o[b][i + 2 * h + 1]);
    }
  }
}

/// The end of an item. `max`, `sum`: of the lane's rows, joined. `o`: see MathGroup; its values are used up.
__device__ __forceinline__ void end_item(const AttentionParams& params, const ItemContext& context, const RowInfo& rows,
                                         float (&max)[2], float (&sum)[2], float (&o)[kBlocks][kBlockValues],
                                         const LanePlace& place, ChainState& chain) {
  const scheduler::WorkTile& item = context.item;
  bool mine[2];  // the row is one of the item's
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    mine[h] = place.first_row + 8 * h < context.num_rows;
    const float v_scale = mine[h] ? rows.v_scale[place.first_row + 8 * h] : 1.0f;
    for_pairs(o, h, place, [&](int32_t, float& x, float& y) {
      x = __fmul_rn(x, v_scale);
      y = __fmul_rn(y, v_scale);
    });
  }
  ChainState& before = in_local_memory(chain);
  if ((item.flags & scheduler::kStart) == 0) {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const Fold factors = fold_factors(before.max[h], before.sum[h], max[h], sum[h]);
      sum[h] = fold(factors, before.sum[h], sum[h]);
      max[h] = factors.max;
#pragma unroll
      for (int32_t b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int32_t i = 2 * h; i < kBlockValues; i += 4) {
          o[b][i] = fold(factors, before.values[b][i], o[b][i]);
          o[b][i + 1] = fold(factors, before.values[b][i + 1], o[b][i + 1]);
        }
      }
    }
  }
  if ((item.flags & scheduler::kFinish) == 0) {
#pragma unroll
    for (int32_t b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int32_t i = 0; i < kBlockValues; ++i) before.values[b][i] = o[b][i];
    }
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      before.max[h] = max[h];
      before.sum[h] = sum[h];
    }
    return;
  }
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    if (!mine[h]) continue;
    const int32_t row = place.first_row + 8 * h;
    if (item.partial >= 0) {
      const int32_t partial = item.partial + row;
      if (place.first_of_row) {
        params.partial_row_max[partial] = max[h];
        params.partial_row_sum[partial] = sum[h];
      }
      float* const to = params.partial_acc + int64_t{partial} * kDimV;
      for_pairs(o, h, place, [&](int32_t d, float x, float y) { *reinterpret_cast<float2*>(to + d) = float2{x, y}; });
      continue;
    }
    const int32_t token = rows.token[row];
    const int32_t q_head = rows.q_head[row];
    const RowEnd end = end_row(params, q_head, max[h], sum[h]);
    if (place.first_of_row) write_lse(params, token, q_head, end);
    const int64_t at = token * params.out_token_stride + q_head * params.out_head_stride;
    for_pairs(o, h, place, [&](int32_t, float& x, float& y) {
      x = row_value(end, x);
      y = row_value(end, y);
    });
    if (params.out_dtype == DType::kBFloat16 && params.out_pairs) {  // what is usual, without looking at every pair
      auto* const to = static_cast<uint16_t*>(params.out) + at;
      for_pairs(o, h, place, [&](int32_t d, float x, float y) {
        *reinterpret_cast<uint32_t*>(to + d) = ptx::pack_two<__nv_bfloat16>(x, y);
      });
      continue;
    }
#pragma unroll
    for (int32_t b = 0; b < kBlocks; ++b) {  // its chain ends here
#pragma unroll
      for (int32_t i = 0; i < kBlockValues; ++i) before.values[b][i] = o[b][i];
    }
#pragma unroll 1
    for (int32_t i = 0; i < kBlocks * kBlockValues; i += 4) {
      const float* const two = &before.values[i / kBlockValues][i % kBlockValues + 2 * h];
      write_pair(params, at + place.first_component + 2 * i, two[0], two[1]);
    }
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
