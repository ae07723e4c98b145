#pragma once

#include "kernels/cuda/common/mask.cuh"
#include "kernels/cuda/sm90/common/nonfinite.cuh"
#include "kernels/cuda/sm90/prefill/shared_state.cuh"

/// Values that must not be multiplied: a weight of 0 times an infinity or a NaN is NaN. Of tiles at which an item's
/// rows look differently, the loading warpgroup makes tokens that no row sees zeros and looks for infinities and NaN in
/// the others. Where there are any, the math warpgroups add them to the rows that see them, make them zeros and only
/// then multiply.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

/// By the loading warpgroup's thread `thread`: its pieces of a tile that is there, whose first token is `first`.
/// Returns whether it has found any among tokens that some rows see and others do not. `Ranges`: rows see ranges of
/// tokens; else any token may be such a one.
template <typename T, int32_t Dim, int32_t Tokens, bool Ranges>
__device__ __forceinline__ bool look_through(uint32_t tile, const Sight& sight, int32_t first, int32_t thread) {
  constexpr int32_t kPieces = Dim / kPiece;
  uint32_t found = 0;
#pragma unroll 4
  for (int32_t i = thread; i < Tokens * kPieces; i += kGroupThreads) {
    const int32_t token = first + i / kPieces;
    const uint32_t at = tile + static_cast<uint32_t>(tile_offset(Dim, i / kPieces, i % kPieces));
    if (token < sight.any_begin || token >= sight.any_end) {
      ptx::st_shared_16(at, uint4{});
    } else if (!Ranges || token < sight.all_begin || token >= sight.all_end) {
      const uint4 piece = ptx::ld_shared_16(at);
      found |= nonfinite_signs<T>(piece.x) | nonfinite_signs<T>(piece.y) | nonfinite_signs<T>(piece.z) |
               nonfinite_signs<T>(piece.w);
    }
  }
  return (found & (kNonfiniteLow | kNonfiniteHigh)) != 0;
}

/// Bits [0, count) for a count of 0 to 32.
__device__ __forceinline__ uint32_t low_bits(int32_t count) {
  return static_cast<uint32_t>((uint64_t{1} << count) - 1);
}

/// Which of the 32 tokens from `first` on a row sees: bit i is token first + i's.
__device__ __forceinline__ uint32_t sight_of(const AttentionParams& params, const RowInfo& rows, int32_t row,
                                             int32_t first) {
  const int32_t begin = max(rows.visible_begin[row] - first, 0);
  const int32_t end = min(rows.visible_end[row] - first, 32);
  if (begin >= end) return 0;
  const int32_t masked = min(max(rows.mask_begin[row], first + begin) - first, end);
  uint32_t seen = low_bits(masked) & ~low_bits(begin);
  if (masked < end) {
    const int64_t bit = rows.mask_bit[row] + first + masked;
    const uint8_t* const from = params.custom_mask + (bit >> 3);
    const int32_t bytes = (static_cast<int32_t>(bit & 7) + end - masked + 7) / 8;  // nothing is read beyond the mask
    uint64_t bits = 0;
#pragma unroll
    for (int32_t i = 0; i < 5; ++i) {
      if (i < bytes) bits |= uint64_t{from[i]} << 8 * i;
    }
    seen |= (static_cast<uint32_t>(bits >> (bit & 7)) & low_bits(end - masked)) << masked;
  }
  return seen;
}

/// Adds a tile's infinities and NaN to the sums of the rows that see them. `first_row`: the lane's first; `o`: see
/// MathGroup.
template <typename T, int32_t Dim, int32_t Tokens>
__device__ __forceinline__ void add_special(const AttentionParams& params, const RowInfo& rows, uint32_t tile,
                                            int32_t first_token, int32_t first_row, float (&o)[Dim / 2]) {
  struct {
    float x[Dim / 2];
  } local;
#pragma unroll
  for (int32_t i = 0; i < Dim / 2; ++i) local.x[i] = o[i];
  auto* sums = &local;
  asm volatile("" : "+l"(sums)::"memory");  // no registers
  const uint32_t mine = tile + 4 * (threadIdx.x % 4);
#pragma unroll 1
  for (int32_t i = 0; i < Tokens * (Dim / 8); ++i) {
    const int32_t token = i / (Dim / 8);
    const int32_t column = i % (Dim / 8);
    const uint32_t pair = ptx::ld_shared_4(mine + static_cast<uint32_t>(tile_offset(Dim, token, column)));
    const uint32_t special = nonfinite_signs<T>(pair);
    if ((special & (kNonfiniteLow | kNonfiniteHigh)) == 0) continue;
#pragma unroll 1
    for (int32_t h = 0; h < 2; ++h) {
      if (!is_visible(params, rows, first_row + 8 * h, first_token + token)) continue;
      float* const two = &sums->x[4 * column + 2 * h];
      if ((special & kNonfiniteLow) != 0) two[0] += element_of_pair<T>(pair, false);
      if ((special & kNonfiniteHigh) != 0) two[1] += element_of_pair<T>(pair, true);
    }
  }
  asm volatile("" ::: "memory");
#pragma unroll
  for (int32_t i = 0; i < Dim / 2; ++i) o[i] = sums->x[i];
}

/// By thread `thread` of all math threads: the tile's infinities and NaN become zeros.
template <typename T, int32_t Dim, int32_t Tokens>
__device__ __forceinline__ void clear_special(uint32_t tile, int32_t thread) {
#pragma unroll 1
  for (int32_t i = thread; i < Tokens * Dim / 2; i += kMathGroups * kGroupThreads) {
    const uint32_t at = tile + 4 * static_cast<uint32_t>(i);
    const uint32_t pair = ptx::ld_shared_4(at);
    const uint32_t special = nonfinite_signs<T>(pair);
    if ((special & (kNonfiniteLow | kNonfiniteHigh)) == 0) continue;
    ptx::st_shared_4(at, pair & ((special & kNonfiniteLow) != 0 ? 0xffff0000u : ~0u) &
                             ((special & kNonfiniteHigh) != 0 ? 0xffffu : ~0u));
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
