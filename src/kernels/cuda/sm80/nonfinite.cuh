#pragma once

#include "kernels/cuda/common/nonfinite.cuh"
#include "kernels/cuda/sm80/softmax.cuh"

/// NaN and Inf among the values of a KV tile that some rows see and others do not. For a row that does not see the
/// token p is 0, and 0 * NaN is NaN. So they are added to the rows that see them and become zeros in the tile before
/// GEMM1. Rare: only tiles that rows see differently are scanned.
namespace folio::inline v0::kernels::cuda::sm80 {

/// Which halves of `pair` are NaN or Inf: bit 0 the lower, bit 1 the upper.
template <typename T>
__device__ __forceinline__ uint32_t nonfinite_halves(uint32_t pair) {
  constexpr uint32_t kLow = kExponentBits<T>;
  return ((pair & kLow) == kLow ? 1u : 0u) | ((pair >> 16 & kLow) == kLow ? 2u : 0u);
}

/// Scans the first `count` rows of a tile, this thread of `threads` its share of the words. Returns whether it found
/// NaN or Inf; with `clear` they become zeros.
template <typename T, int32_t Dim>
__device__ __forceinline__ bool scan_nonfinite(uint32_t tile, int32_t count, int32_t thread, int32_t threads,
                                               bool clear) {
  bool found = false;
#pragma unroll 1
  for (int32_t i = thread; i < count * (Dim / 2); i += threads) {
    const uint32_t at = tile + 4 * static_cast<uint32_t>(i);
    const uint32_t pair = ptx::ld_shared_4(at);
    const uint32_t special = nonfinite_halves<T>(pair);
    if (special == 0) continue;
    found = true;
    if (clear)
      ptx::st_shared_4(at, pair & ((special & 1) != 0 ? 0xffff0000u : ~0u) & ((special & 2) != 0 ? 0xffffu : ~0u));
  }
  return found;
}

/// Accumulators in local memory, so that rare code is a loop over them and not unrolled.
template <int32_t RowTiles, int32_t ColumnTiles>
struct LocalAcc {
  float x[RowTiles * ColumnTiles * 4];
};
template <int32_t RowTiles, int32_t ColumnTiles>
__device__ __forceinline__ LocalAcc<RowTiles, ColumnTiles>* to_local(const float (&acc)[RowTiles][ColumnTiles][4],
                                                                     LocalAcc<RowTiles, ColumnTiles>& local) {
#pragma unroll
  for (int32_t i = 0; i < RowTiles * ColumnTiles * 4; ++i) {
    local.x[i] = acc[i / 4 / ColumnTiles][i / 4 % ColumnTiles][i % 4];
  }
  auto* address = &local;
  asm volatile("" : "+l"(address)::"memory");
  return address;
}
template <int32_t RowTiles, int32_t ColumnTiles>
__device__ __forceinline__ void from_local(const LocalAcc<RowTiles, ColumnTiles>* local,
                                           float (&acc)[RowTiles][ColumnTiles][4]) {
  asm volatile("" ::: "memory");
#pragma unroll
  for (int32_t i = 0; i < RowTiles * ColumnTiles * 4; ++i) {
    acc[i / 4 / ColumnTiles][i / 4 % ColumnTiles][i % 4] = local->x[i];
  }
}

/// Adds the NaN and Inf of a tile to the rows that see their tokens. The warp has column tiles of 8 from
/// `first_column_tile` on.
template <typename T, int32_t Dim, int32_t RowTiles, int32_t ColumnTiles, int32_t Rows>
__device__ __forceinline__ void add_nonfinite(const AttentionParams& params, const SharedStorage<Rows>& storage,
                                              uint32_t tile, int32_t first_token, int32_t count, int32_t first_row,
                                              float (&acc)[RowTiles][ColumnTiles][4], int32_t first_column_tile = 0) {
  const int32_t column = 2 * (static_cast<int32_t>(threadIdx.x) % 4);
  LocalAcc<RowTiles, ColumnTiles> local;
  auto* const sums = to_local(acc, local);
#pragma unroll 1
  for (int32_t i = 0; i < count; ++i) {
#pragma unroll 1
    for (int32_t n = 0; n < ColumnTiles; ++n) {
      const uint32_t pair = ptx::ld_shared_4(tile + swizzled_offset(Dim, i, first_column_tile + n) + 2 * column);
      const uint32_t special = nonfinite_halves<T>(pair);
      if (special == 0) continue;
#pragma unroll 1
      for (int32_t r = 0; r < 2 * RowTiles; ++r) {
        if (!is_visible(params, storage, first_row + 8 * r, first_token + i)) continue;
        float* const two = &sums->x[(r / 2 * ColumnTiles + n) * 4 + r % 2 * 2];
        if ((special & 1) != 0) two[0] += element_of_pair<T>(pair, false);
        if ((special & 2) != 0) two[1] += element_of_pair<T>(pair, true);
      }
    }
  }
  from_local(sums, acc);
}

/// The e4m3 NaN of a word: bit 8i + 7 for byte i.
__device__ __forceinline__ uint32_t nan_bytes(uint32_t word) {
  return ((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
}

/// scan_nonfinite for fp8, by a warp.
template <int32_t Dim>
__device__ __forceinline__ bool scan_nan_fp8(uint32_t tile, int32_t count, int32_t lane, bool clear) {
  bool found = false;
#pragma unroll 1
  for (int32_t i = lane; i < count * (Dim / 4); i += 32) {
    const uint32_t at = tile + 4 * static_cast<uint32_t>(i);
    const uint32_t word = ptx::ld_shared_4(at);
    const uint32_t special = nan_bytes(word);
    if (special == 0) continue;
    found = true;
    if (clear) ptx::st_shared_4(at, word & ~((special >> 7) * 0xffu));
  }
  return found;
}

/// add_nonfinite for fp8, where a lane has components 16j + 4t to 16j + 4t + 3 of its rows.
template <int32_t Dim, int32_t Rows>
__device__ __forceinline__ void add_nan_fp8(const AttentionParams& params, const SharedStorage<Rows>& storage,
                                            uint32_t tile, int32_t first_token, int32_t count, int32_t first_row,
                                            float (&acc)[1][Dim / 8][4]) {
  const int32_t t = static_cast<int32_t>(threadIdx.x) % 4;
  LocalAcc<1, Dim / 8> local;
  auto* const sums = to_local(acc, local);
#pragma unroll 1
  for (int32_t i = 0; i < count; ++i) {
#pragma unroll 1
    for (int32_t j = 0; j < Dim / 16; ++j) {
      const uint32_t special = nan_bytes(ptx::ld_shared_4(tile + swizzled_offset_fp8(Dim, i, j) + 4 * t));
      if (special == 0) continue;
#pragma unroll 1
      for (int32_t r = 0; r < 2; ++r) {
        if (!is_visible(params, storage, first_row + 8 * r, first_token + i)) continue;
#pragma unroll 1
        for (int32_t b = 0; b < 4; ++b) {
          if ((special >> (8 * b + 7) & 1) != 0) sums->x[(2 * j + b % 2) * 4 + 2 * r + b / 2] = NAN;
        }
      }
    }
  }
  from_local(sums, acc);
}

}  // namespace folio::inline v0::kernels::cuda::sm80
