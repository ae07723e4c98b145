#pragma once

#include "kernels/cuda/sm90/prefill/shared_state.cuh"

/// Values that must not be multiplied: a weight of 0 times an infinity or a NaN is NaN. Of tiles at which an item's
/// rows look differently, the loading warpgroup makes tokens that no row sees zeros and looks for infinities and NaN in
/// the others. Where there are any, the math warpgroups add them to the rows that see them, make them zeros and only
/// then multiply.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

template <typename T>
constexpr uint32_t kExponent = 0x7f80u;
template <>
inline constexpr uint32_t kExponent<__half> = 0x7c00u;

/// Bits 15 and 31 of the result are set where the half of that bit is infinite or NaN; other bits mean nothing.
template <typename T>
__device__ __forceinline__ uint32_t special_halves(uint32_t pair) {
  constexpr uint32_t kBoth = kExponent<T> | kExponent<T> << 16;
  constexpr uint32_t kOne = (0x8000u - kExponent<T>) | (0x8000u - kExponent<T>) << 16;
  return (pair & kBoth) + kOne;
}
constexpr uint32_t kSpecialLow = 0x8000u;
constexpr uint32_t kSpecialHigh = 0x80000000u;

template <typename T>
__device__ __forceinline__ float half_of(uint32_t pair, bool high) {
  const auto bits = static_cast<uint16_t>(high ? pair >> 16 : pair);
  if constexpr (kExponent<T> == 0x7c00u) {
    return __half2float(__ushort_as_half(bits));
  } else {
    return __bfloat162float(__ushort_as_bfloat16(bits));
  }
}

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
      found |= special_halves<T>(piece.x) | special_halves<T>(piece.y) | special_halves<T>(piece.z) |
               special_halves<T>(piece.w);
    }
  }
  return (found & (kSpecialLow | kSpecialHigh)) != 0;
}

/// `Rows`: this kernel's RowInfo, or another's that has the same fields.
template <typename Rows>
__device__ __forceinline__ bool sees(const AttentionParams& params, const Rows& rows, int32_t row, int32_t token) {
  if (token < rows.visible_begin[row] || token >= rows.visible_end[row]) return false;
  if (token < rows.mask_begin[row]) return true;
  const int64_t bit = rows.mask_bit[row] + token;
  return (params.custom_mask[bit >> 3] >> (bit & 7) & 1) != 0;
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
    const uint32_t special = special_halves<T>(pair);
    if ((special & (kSpecialLow | kSpecialHigh)) == 0) continue;
#pragma unroll 1
    for (int32_t h = 0; h < 2; ++h) {
      if (!sees(params, rows, first_row + 8 * h, first_token + token)) continue;
      float* const two = &sums->x[4 * column + 2 * h];
      if ((special & kSpecialLow) != 0) two[0] += half_of<T>(pair, false);
      if ((special & kSpecialHigh) != 0) two[1] += half_of<T>(pair, true);
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
    const uint32_t special = special_halves<T>(pair);
    if ((special & (kSpecialLow | kSpecialHigh)) == 0) continue;
    ptx::st_shared_4(at, pair & ((special & kSpecialLow) != 0 ? 0xffff0000u : ~0u) &
                             ((special & kSpecialHigh) != 0 ? 0xffffu : ~0u));
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
