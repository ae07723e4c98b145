#pragma once

#include "kernels/cuda/common/mask.cuh"
#include "kernels/cuda/sm90/common/nonfinite.cuh"
#include "kernels/cuda/sm90/mla/smem.cuh"

/// Masks of scores, and values that must not enter GEMM1. A masked token has p = 0, but 0 * NaN and 0 * Inf are NaN.
/// The producer zeroes values that no row sees and scans mixed KV tiles for NaN and Inf. If it finds any, each consumer
/// adds those of its half of V to the rows that see them, zeroes them and only then issues GEMM1.
namespace folio::inline v0::kernels::cuda::sm90::mla {

/// Sets the scores of invisible tokens to -infinity. `first`: the lane's first token.
template <typename Rows, int32_t Count>
__device__ __forceinline__ void mask_scores(const Rows& rows, int32_t first_row, int32_t first, float (&s)[Count]) {
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    const int32_t begin = rows.visible_begin[first_row + 8 * h] - first;
    const int32_t end = rows.visible_end[first_row + 8 * h] - first;
#pragma unroll
    for (int32_t i = 0; i < Count / 2; ++i) {
      const int32_t column = i / 2 * 8 + i % 2;
      if (column < begin || column >= end) s[i / 2 * 4 + 2 * h + i % 2] = -INFINITY;
    }
  }
}

/// Adds the NaN and Inf of a half of V, at `half`, to the accumulators of the rows that see them. `first_row`: the
/// lane's first; `o`: see ConsumerWarpgroup.
template <typename T, int32_t Blocks, int32_t Count>
__device__ __forceinline__ void add_nonfinite(const AttentionParams& params, const RowInfo& rows, uint32_t half,
                                              int32_t first_token, int32_t first_row, float (&o)[Blocks][Count]) {
  struct {
    float x[Blocks][Count];
  } local;
#pragma unroll
  for (int32_t b = 0; b < Blocks; ++b) {
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) local.x[b][i] = o[b][i];
  }
  auto* acc = &local;
  asm volatile("" : "+l"(acc)::"memory");  // keeps it in local memory
  constexpr int32_t kChunks = RowsLayout::kHalfColumnBlocks * 8;
  const uint32_t lane_half = half + 4 * (threadIdx.x % 4);
#pragma unroll 1
  for (int32_t i = 0; i < kBlockN * kChunks; ++i) {
    const int32_t token = i / kChunks;
    const int32_t chunk = i % kChunks;
    const uint32_t pair = ptx::ld_shared_4(lane_half + static_cast<uint32_t>(tile_offset(token, chunk)));
    const uint32_t signs = nonfinite_signs<T>(pair);
    if ((signs & (kNonfiniteLow | kNonfiniteHigh)) == 0) continue;
#pragma unroll 1
    for (int32_t h = 0; h < 2; ++h) {
      if (!is_visible(params, rows, first_row + 8 * h, first_token + token)) continue;
      float* const two = &acc->x[4 * chunk / Count][4 * chunk % Count + 2 * h];
      if ((signs & kNonfiniteLow) != 0) two[0] += element_of_pair<T>(pair, false);
      if ((signs & kNonfiniteHigh) != 0) two[1] += element_of_pair<T>(pair, true);
    }
  }
  asm volatile("" ::: "memory");
#pragma unroll
  for (int32_t b = 0; b < Blocks; ++b) {
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) o[b][i] = acc->x[b][i];
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
