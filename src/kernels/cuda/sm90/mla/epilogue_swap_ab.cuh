#pragma once

#include "kernels/cuda/sm90/mla/epilogue.cuh"
#include "kernels/cuda/sm90/mla/softmax_swap_ab.cuh"

/// The epilogue of a consumer where MMAs have their operands swapped: a lane's accumulators are components of several
/// packed rows. See epilogue.cuh.
namespace folio::inline v0::kernels::cuda::sm90::mla {

constexpr int32_t kSwapAbOBlocks = kHeadDimV / kConsumers / 64;  ///< of 64 components: a consumer's half

/// A lane's accumulators of earlier work tiles of the same output tile.
template <typename Traits>
struct SwapAbOutputTileState {
  float o[kSwapAbOBlocks][SwapAbLane<Traits>::kScores];
  float row_max[SwapAbLane<Traits>::kRows];
  float row_sum[SwapAbLane<Traits>::kRows];
};

/// write_lse, not inlined: several rows of a lane share it.
__device__ FOLIO_CALLED inline void write_row_lse(const AttentionParams& params, int32_t token, int32_t q_head,
                                                  const RowEnd& end) {
  write_lse(params, token, q_head, end);
}

/// Two neighbouring components of a row from the accumulators of two lanes, g and g ^ 1: an even lane gets the lane's
/// first row, an odd lane the second. x, y: the lane's accumulators of one component and both rows.
__device__ __forceinline__ void exchange_pair(bool odd, float& x, float& y) {
  const float got = __shfl_xor_sync(kAllLanes, odd ? x : y, 4);
  x = odd ? got : x;
  y = odd ? y : got;
}

/// Ends a work tile. `row_max`, `row_sum`: of the lane's rows, reduced over the work tile. `o`: the lane's
/// accumulators, which are overwritten.
template <typename Traits, int32_t Rows, int32_t Count>
__device__ __forceinline__ void epilogue(const AttentionParams& params, const WorkTileContext& context,
                                         const RowInfo& rows, const SwapAbLane<Traits>& lane, int32_t consumer,
                                         float (&row_max)[Rows], float (&row_sum)[Rows],
                                         float (&o)[kSwapAbOBlocks][Count],
                                         SwapAbOutputTileState<Traits>& output_tile) {
  const scheduler::WorkTile& work_tile = context.work_tile;
#pragma unroll
  for (int32_t i = 0; i < Count; ++i) {
    const int32_t row = lane.row(lane.row_of(i));
    const float v_scale = row < context.num_rows ? rows.v_scale[row] : 1.0f;
#pragma unroll
    for (auto& block : o) block[i] = __fmul_rn(block[i], v_scale);
  }
  auto& before = in_local_memory(output_tile);
  if ((work_tile.flags & scheduler::kStart) == 0) {
#pragma unroll
    for (int32_t r = 0; r < Rows; ++r) {
      const Fold factors = fold_factors(before.row_max[r], before.row_sum[r], row_max[r], row_sum[r]);
      row_sum[r] = fold(factors, before.row_sum[r], row_sum[r]);
      row_max[r] = factors.max;
#pragma unroll
      for (int32_t b = 0; b < kSwapAbOBlocks; ++b) {
#pragma unroll
        for (int32_t h = 0; h < 2; ++h) {
          const int32_t i = r / 2 * 4 + 2 * h + r % 2;
          o[b][i] = fold(factors, before.o[b][i], o[b][i]);
        }
      }
    }
  }
  if ((work_tile.flags & scheduler::kFinish) == 0) {
#pragma unroll
    for (int32_t b = 0; b < kSwapAbOBlocks; ++b) {
#pragma unroll
      for (int32_t i = 0; i < Count; ++i) before.o[b][i] = o[b][i];
    }
#pragma unroll
    for (int32_t r = 0; r < Rows; ++r) {
      before.row_max[r] = row_max[r];
      before.row_sum[r] = row_sum[r];
    }
    return;
  }
  const bool writes_row_stats = consumer == 0 && lane.warp == 0 && lane.g() == 0;  // the one lane of a row
  const bool odd = lane.g() % 2 != 0;
  constexpr bool kExchanges = Traits::kFp8 == Fp8::kNone;  // a component's neighbour is another lane's
  const int32_t first = consumer * kHeadDimV / kConsumers;
  const bool is_partial = work_tile.partial >= 0;
  if (kExchanges) {
#pragma unroll
    for (auto& block : o) {
#pragma unroll
      for (int32_t i = 0; i < Count; i += 2) exchange_pair(odd, block[i], block[i + 1]);
    }
  }
#pragma unroll
  for (int32_t r = 0; r < Rows; ++r) {
    const int32_t row = lane.row(r);
    if (row >= context.num_rows || !writes_row_stats) continue;
    if (is_partial) {
      params.partial_row_max[work_tile.partial + row] = row_max[r];
      params.partial_row_sum[work_tile.partial + row] = row_sum[r];
    } else if (params.lse.data != nullptr) {
      const int32_t q_head = rows.q_head[row];
      write_row_lse(params, rows.token[row], q_head, end_row(params, q_head, row_max[r], row_sum[r]));
    }
  }
  // Of the lane's rows, two neighbours at a time: with an exchange one of them is this lane's, without both are.
#pragma unroll
  for (int32_t r = 0; r < Rows; r += kExchanges ? 2 : 1) {
    const int32_t row = lane.row(r) + (kExchanges && odd ? 1 : 0);
    if (row >= context.num_rows) continue;
    // Calls function(component, x, y) for the lane's pairs of the row.
    const auto for_pairs = [&](const auto& function) {
#pragma unroll
      for (int32_t b = 0; b < kSwapAbOBlocks; ++b) {
        if constexpr (kExchanges) {
#pragma unroll
          for (int32_t h = 0; h < 2; ++h) {
            const int32_t i = r / 2 * 4 + 2 * h;
            function(first + (lane.component(b, 2 * h) & ~1), o[b][i], o[b][i + 1]);
          }
        } else {
          const int32_t i = r / 2 * 4 + r % 2;
          function(first + lane.component(b, 0), o[b][i], o[b][i + 2]);
        }
      }
    };
    if (is_partial) {
      float* const to = params.partial_acc + int64_t{work_tile.partial + row} * kHeadDimV;
      for_pairs([&](int32_t d, float x, float y) { *reinterpret_cast<float2*>(to + d) = float2{x, y}; });
      continue;
    }
    const int32_t q_head = rows.q_head[row];
    const bool second = kExchanges && odd;
    const RowEnd end = end_row(params, q_head, second ? row_max[r + kExchanges] : row_max[r],
                               second ? row_sum[r + kExchanges] : row_sum[r]);
    const int64_t at = rows.token[row] * params.out_token_stride + q_head * params.out_head_stride;
    for_pairs([&](int32_t d, float x, float y) { write_pair(params, at + d, row_value(end, x), row_value(end, y)); });
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
