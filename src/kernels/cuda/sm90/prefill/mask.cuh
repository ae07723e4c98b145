#pragma once

#include "kernels/cuda/common/mask.cuh"
#include "kernels/cuda/sm90/common/nonfinite.cuh"
#include "kernels/cuda/sm90/prefill/smem.cuh"

/// Masks of scores, and NaN and Inf in V of masked tokens. p of a masked token is 0, but 0 * NaN and 0 * Inf are NaN.
/// So the producer scans V tiles that some rows see in part: tokens that no row sees become zeros, and it flags NaN and
/// Inf in the others. Where a tile is flagged, the consumers add its NaN and Inf to the rows that see them, replace
/// them by zeros and only then run GEMM1.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

/// Masks scores of tokens that a row does not see with `hidden`. `first`: the lane's first token.
template <int32_t Count>
__device__ __forceinline__ void mask_scores(const RowInfo& rows, int32_t first_row, int32_t first, float hidden,
                                            float (&s)[Count]) {
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    const int32_t begin = rows.visible_begin[first_row + 8 * h] - first;
    const int32_t end = rows.visible_end[first_row + 8 * h] - first;
#pragma unroll
    for (int32_t i = 0; i < Count / 2; ++i) {
      const int32_t column = i / 2 * 8 + i % 2;
      if (column < begin || column >= end) s[i / 2 * 4 + 2 * h + i % 2] = hidden;
    }
  }
}

/// The same with -infinity, where no row's range begins behind the lane's first token: only ends are compared.
template <int32_t Count>
__device__ __forceinline__ void mask_ends(const RowInfo& rows, int32_t first_row, int32_t first, float (&s)[Count]) {
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    const int32_t end = rows.visible_end[first_row + 8 * h] - first;
#pragma unroll
    for (int32_t i = 0; i < Count / 2; ++i) {
      if (i / 2 * 8 + i % 2 >= end) s[i / 2 * 4 + 2 * h + i % 2] = -INFINITY;
    }
  }
}

/// The same by bits of visible tokens.
template <int32_t Words, int32_t Count>
__device__ __forceinline__ void mask_by_bits(const uint32_t (&visible_bits)[2][Words], int32_t lane,
                                             float (&s)[Count]) {
  static_assert(Words * 16 == Count);
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
#pragma unroll
    for (int32_t w = 0; w < Words; ++w) {
      const uint32_t mine = visible_bits[h][w] >> 2 * (lane % 4);
#pragma unroll
      for (int32_t i = 0; i < 8; ++i) {
        if ((mine >> (i / 2 * 8 + i % 2) & 1) == 0) s[16 * w + i / 2 * 4 + 2 * h + i % 2] = -INFINITY;
      }
    }
  }
}

/// Bits [0, count) for a count of 0 to 32.
__device__ __forceinline__ uint32_t low_bits(int32_t count) {
  return static_cast<uint32_t>((uint64_t{1} << count) - 1);
}

/// Which of the 32 tokens from `first` on row `row` sees: bit i is token first + i.
__device__ __forceinline__ uint32_t visible_bits_of(const AttentionParams& params, const RowInfo& rows, int32_t row,
                                                    int32_t first) {
  const int32_t begin = max(rows.visible_begin[row] - first, 0);
  const int32_t end = min(rows.visible_end[row] - first, 32);
  if (begin >= end) return 0;
  const int32_t masked = min(max(rows.mask_begin[row], first + begin) - first, end);
  uint32_t visible = low_bits(masked) & ~low_bits(begin);
  if (masked < end) {
    const int64_t bit = rows.mask_bit[row] + first + masked;
    const uint8_t* const from = params.custom_mask + (bit >> 3);
    const int32_t bytes = (static_cast<int32_t>(bit & 7) + end - masked + 7) / 8;  // reads nothing beyond the mask
    uint64_t bits = 0;
#pragma unroll
    for (int32_t i = 0; i < 5; ++i) {
      if (i < bytes) bits |= uint64_t{from[i]} << 8 * i;
    }
    visible |= (static_cast<uint32_t>(bits >> (bit & 7)) & low_bits(end - masked)) << masked;
  }
  return visible;
}

/// Consumers: adds the NaN and Inf of a V tile to the output of the rows that see them. `first_row`: the lane's first;
/// `o`: see ConsumerWarpgroup.
template <typename T, int32_t Dim, int32_t BlockN>
__device__ __forceinline__ void add_nonfinite(const AttentionParams& params, const RowInfo& rows, uint32_t tile,
                                              int32_t first_token, int32_t first_row, float (&o)[Dim / 2]) {
  struct {
    float x[Dim / 2];
  } local;
#pragma unroll
  for (int32_t i = 0; i < Dim / 2; ++i) local.x[i] = o[i];
  auto* out = &local;
  asm volatile("" : "+l"(out)::"memory");  // in local memory
  const uint32_t mine = tile + 4 * (threadIdx.x % 4);
#pragma unroll 1
  for (int32_t i = 0; i < BlockN * (Dim / 8); ++i) {
    const int32_t token = i / (Dim / 8);
    const int32_t column = i % (Dim / 8);
    const uint32_t pair = ptx::ld_shared_4(mine + static_cast<uint32_t>(tile_offset(Dim, token, column)));
    const uint32_t nonfinite = nonfinite_signs<T>(pair);
    if ((nonfinite & (kNonfiniteLow | kNonfiniteHigh)) == 0) continue;
#pragma unroll 1
    for (int32_t h = 0; h < 2; ++h) {
      if (!is_visible(params, rows, first_row + 8 * h, first_token + token)) continue;
      float* const two = &out->x[4 * column + 2 * h];
      if ((nonfinite & kNonfiniteLow) != 0) two[0] += element_of_pair<T>(pair, false);
      if ((nonfinite & kNonfiniteHigh) != 0) two[1] += element_of_pair<T>(pair, true);
    }
  }
  asm volatile("" ::: "memory");
#pragma unroll
  for (int32_t i = 0; i < Dim / 2; ++i) o[i] = out->x[i];
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
