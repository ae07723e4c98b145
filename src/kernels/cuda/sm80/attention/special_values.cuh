#pragma once

#include "kernels/cuda/sm80/attention/softmax.cuh"

/// Infinite and NaN values that some rows see and others do not. In a product, a weight of 0 times such a value would
/// be NaN; so they are added to the rows that see them, and become zeros in the tile before the product. Rare: looked
/// for only in tiles that rows see differently.
namespace folio::inline v0::kernels::cuda::sm80 {

template <typename T>
constexpr uint32_t kExponentBits = 0x7f80u;
template <>
inline constexpr uint32_t kExponentBits<__half> = 0x7c00u;

/// Bits of the halves of `pair` that are infinite or NaN: 1 the lower, 2 the upper.
template <typename T>
__device__ __forceinline__ uint32_t special_halves(uint32_t pair) {
  constexpr uint32_t kLow = kExponentBits<T>;
  return ((pair & kLow) == kLow ? 1u : 0u) | ((pair >> 16 & kLow) == kLow ? 2u : 0u);
}

template <typename T>
__device__ __forceinline__ float half_of(uint32_t pair, int32_t half) {
  const auto bits = static_cast<uint16_t>(half == 0 ? pair : pair >> 16);
  if constexpr (sizeof(T) == 2 && kExponentBits<T> == 0x7c00u) {
    return __half2float(__ushort_as_half(bits));
  } else {
    return __bfloat162float(__ushort_as_bfloat16(bits));
  }
}

/// Whether the tile's rows [row_begin, row_begin + count) have such a value in what this thread of `threads` looks at;
/// with `clear`, they become zeros.
template <typename T, int32_t Dim>
__device__ __forceinline__ bool scan_special(uint32_t tile, int32_t count, int32_t thread, int32_t threads,
                                             bool clear) {
  bool found = false;
#pragma unroll 1
  for (int32_t i = thread; i < count * (Dim / 2); i += threads) {
    const uint32_t at = tile + 4 * static_cast<uint32_t>(i);
    const uint32_t pair = ptx::ld_shared_4(at);
    const uint32_t special = special_halves<T>(pair);
    if (special == 0) continue;
    found = true;
    if (clear)
      ptx::st_shared_4(at, pair & ((special & 1) != 0 ? 0xffff0000u : ~0u) & ((special & 2) != 0 ? 0xffffu : ~0u));
  }
  return found;
}

/// Accumulators in local memory, so that a loop over them is one loop: for what is rarely done.
template <int32_t RowTiles, int32_t ColumnTiles>
struct LocalSums {
  float x[RowTiles * ColumnTiles * 4];
};
template <int32_t RowTiles, int32_t ColumnTiles>
__device__ __forceinline__ LocalSums<RowTiles, ColumnTiles>* to_local(const float (&acc)[RowTiles][ColumnTiles][4],
                                                                      LocalSums<RowTiles, ColumnTiles>& local) {
#pragma unroll
  for (int32_t i = 0; i < RowTiles * ColumnTiles * 4; ++i) {
    local.x[i] = acc[i / 4 / ColumnTiles][i / 4 % ColumnTiles][i % 4];
  }
  auto* address = &local;
  asm volatile("" : "+l"(address)::"memory");
  return address;
}
template <int32_t RowTiles, int32_t ColumnTiles>
__device__ __forceinline__ void from_local(const LocalSums<RowTiles, ColumnTiles>* local,
                                           float (&acc)[RowTiles][ColumnTiles][4]) {
  asm volatile("" ::: "memory");
#pragma unroll
  for (int32_t i = 0; i < RowTiles * ColumnTiles * 4; ++i) {
    acc[i / 4 / ColumnTiles][i / 4 % ColumnTiles][i % 4] = local->x[i];
  }
}

/// Adds them to the rows that see them. Tiles of 8 columns from `first_column_tile` on are the warp's.
template <typename T, int32_t Dim, int32_t RowTiles, int32_t ColumnTiles, int32_t Rows>
__device__ __forceinline__ void add_special(const AttentionParams& params, const RowInfo<Rows>& rows, uint32_t tile,
                                            int32_t first_token, int32_t count, int32_t first_row,
                                            float (&acc)[RowTiles][ColumnTiles][4], int32_t first_column_tile = 0) {
  const int32_t column = 2 * (static_cast<int32_t>(threadIdx.x) % 4);
  LocalSums<RowTiles, ColumnTiles> storage;
  auto* const sums = to_local(acc, storage);
#pragma unroll 1
  for (int32_t i = 0; i < count; ++i) {
#pragma unroll 1
    for (int32_t n = 0; n < ColumnTiles; ++n) {
      const uint32_t pair = ptx::ld_shared_4(tile + piece_offset(Dim, i, first_column_tile + n) + 2 * column);
      const uint32_t special = special_halves<T>(pair);
      if (special == 0) continue;
#pragma unroll 1
      for (int32_t r = 0; r < 2 * RowTiles; ++r) {
        if (!sees(params, rows, first_row + 8 * r, first_token + i)) continue;
        float* const two = &sums->x[(r / 2 * ColumnTiles + n) * 4 + r % 2 * 2];
        if ((special & 1) != 0) two[0] += half_of<T>(pair, 0);
        if ((special & 2) != 0) two[1] += half_of<T>(pair, 1);
      }
    }
  }
  from_local(sums, acc);
}

}  // namespace folio::inline v0::kernels::cuda::sm80
