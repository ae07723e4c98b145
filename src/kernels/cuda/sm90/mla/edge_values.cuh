#pragma once

#include "kernels/cuda/sm90/common/mask.cuh"
#include "kernels/cuda/sm90/common/nonfinite.cuh"
#include "kernels/cuda/sm90/mla/shared_state.cuh"

/// Values that must not be multiplied, as in cuda-sm90-prefill: the loading warpgroup makes tokens that no row sees
/// zeros and looks for infinities and NaN in tiles at which rows look differently. Where there are any, each math
/// warpgroup adds those of its half to the rows that see them, makes them zeros and only then multiplies.
namespace folio::inline v0::kernels::cuda::sm90::mla {

/// By the loading warpgroup's thread `thread`: its pieces of a tile's values that are there. Tokens outside of [begin,
/// end), counted from the tile's first, become zeros; returns whether the others hold anything special, if `looks`.
template <typename T>
__device__ __forceinline__ bool look_through(uint32_t tile, int32_t begin, int32_t end, bool looks, int32_t thread) {
  uint32_t found = 0;
#pragma unroll 1
  for (int32_t i = thread; i < kTokens * kValueColumns * 8; i += kGroupThreads) {
    const int32_t token = i / 8 % kTokens;
    const uint32_t at = tile + 16 * static_cast<uint32_t>(i);
    if (token < begin || token >= end) {
      ptx::st_shared_16(at, uint4{});
    } else if (looks) {
      const uint4 piece = ptx::ld_shared_16(at);
      found |= nonfinite_signs<T>(piece.x) | nonfinite_signs<T>(piece.y) | nonfinite_signs<T>(piece.z) |
               nonfinite_signs<T>(piece.w);
    }
  }
  return (found & (kNonfiniteLow | kNonfiniteHigh)) != 0;
}

/// Adds the infinities and NaN of a tile's half, which begins at `half`, to the sums of the rows that see them.
/// `first_row`: the lane's first; `o`: see MathGroup.
template <typename T, int32_t Blocks, int32_t Count>
__device__ __forceinline__ void add_special(const AttentionParams& params, const RowInfo& rows, uint32_t half,
                                            int32_t first_token, int32_t first_row, float (&o)[Blocks][Count]) {
  struct {
    float x[Blocks][Count];
  } local;
#pragma unroll
  for (int32_t b = 0; b < Blocks; ++b) {
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) local.x[b][i] = o[b][i];
  }
  auto* sums = &local;
  asm volatile("" : "+l"(sums)::"memory");  // no registers
  const uint32_t mine = half + 4 * (threadIdx.x % 4);
#pragma unroll 1
  for (int32_t i = 0; i < kTokens * kHalfColumns * 8; ++i) {
    const int32_t token = i / (kHalfColumns * 8);
    const int32_t piece = i % (kHalfColumns * 8);
    const uint32_t pair = ptx::ld_shared_4(mine + static_cast<uint32_t>(tile_offset(token, piece)));
    const uint32_t special = nonfinite_signs<T>(pair);
    if ((special & (kNonfiniteLow | kNonfiniteHigh)) == 0) continue;
#pragma unroll 1
    for (int32_t h = 0; h < 2; ++h) {
      if (!is_visible(params, rows, first_row + 8 * h, first_token + token)) continue;
      float* const two = &sums->x[4 * piece / Count][4 * piece % Count + 2 * h];
      if ((special & kNonfiniteLow) != 0) two[0] += element_of_pair<T>(pair, false);
      if ((special & kNonfiniteHigh) != 0) two[1] += element_of_pair<T>(pair, true);
    }
  }
  asm volatile("" ::: "memory");
#pragma unroll
  for (int32_t b = 0; b < Blocks; ++b) {
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) o[b][i] = sums->x[b][i];
  }
}

/// By thread `thread` of a math warpgroup: its half's infinities and NaN become zeros.
template <typename T>
__device__ __forceinline__ void clear_special(uint32_t half, int32_t thread) {
#pragma unroll 1
  for (int32_t i = thread; i < kHalfColumns * kColumnBytes / 4; i += kGroupThreads) {
    const uint32_t at = half + 4 * static_cast<uint32_t>(i);
    const uint32_t pair = ptx::ld_shared_4(at);
    const uint32_t special = nonfinite_signs<T>(pair);
    if ((special & (kNonfiniteLow | kNonfiniteHigh)) == 0) continue;
    ptx::st_shared_4(at, pair & ((special & kNonfiniteLow) != 0 ? 0xffff0000u : ~0u) &
                             ((special & kNonfiniteHigh) != 0 ? 0xffffu : ~0u));
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
