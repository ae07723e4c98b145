#pragma once

#include "kernels/cuda/sm90/decode/scores.cuh"
#include "kernels/cuda/sm90/decode/stored.cuh"

/// What a tile's values hold that must not be multiplied. A weight of 0 times an infinity or a NaN is NaN: so tokens
/// that no row sees become zeros, and of tokens that some rows see and others do not, such values are added to the rows
/// that see them and become zeros too. Looked for only in tiles where that can be.
namespace folio::inline v0::kernels::cuda::sm90::decode {

/// Of the 16 components of a product of values a lane has two: rows g and g + 8 of the product, see widen_values.
template <Fp8 kFp8>
__device__ __forceinline__ int32_t first_component(int32_t lane) {
  return kFp8 == Fp8::kNone ? lane / 4 : lane / 4 * 2;
}
template <Fp8 kFp8>
constexpr int32_t kSecondComponent = kFp8 == Fp8::kNone ? 8 : 1;

/// Values of one tile in shared memory, by a warp.
template <typename T, int32_t Dim, Fp8 kFp8>
struct ValueTile {
  uint32_t address;
  int32_t box;
  int32_t lane;

  /// Tokens outside [begin, end), counted from the tile's first, become zeros.
  __device__ __forceinline__ void clear_unseen(int32_t begin, int32_t end) const {
#pragma unroll 1
    for (int32_t i = lane; i < kTileTokens * kPieces; i += 32) {
      const int32_t token = i / kPieces;
      if (token < begin || token >= end) ptx::st_shared_16(piece(token, i % kPieces), uint4{});
    }
    __syncwarp();
  }

  /// Whether there is an infinity or a NaN; the same in all lanes.
  __device__ __forceinline__ bool has_special() const {
    bool found = false;
#pragma unroll 1
    for (int32_t i = lane; i < kWords; i += 32)
      found = found || nonfinite_mask<T, kFp8>(ptx::ld_shared_4(word(i))) != 0;
    return __any_sync(kAllLanes, found);
  }

  /// Those become zeros.
  __device__ __forceinline__ void clear_special() const {
    __syncwarp();
#pragma unroll 1
    for (int32_t i = lane; i < kWords; i += 32) {
      const uint32_t all = ptx::ld_shared_4(word(i));
      const uint32_t special = nonfinite_mask<T, kFp8>(all);
      if (special != 0) ptx::st_shared_4(word(i), all & ~special);
    }
    __syncwarp();
  }

  /// Adds them to the rows that see them. `o`: of 16 components each, see MathWarp. `sums`: shared memory for a
  /// column's, the lane's floats, 32 apart.
  template <int32_t Columns>
  __device__ __forceinline__ void add_special(const AttentionParams& params, const ItemContext& context, int32_t first,
                                              float* sums, float (&o)[Dim / 16][Columns][4]) const {
    constexpr int32_t kSums = Dim / 16 * 4;
#pragma unroll 1
    for (int32_t column = 0; column < Columns; ++column) {
#pragma unroll
      for (int32_t i = 0; i < kSums * Columns; ++i) {
        if (i / kSums == column) sums[i % kSums * 32] = o[i % kSums / 4][i / kSums][i % 4];
      }
#pragma unroll 1
      for (int32_t i = 0; i < kTileTokens * (Dim / 8); ++i) {
        const int32_t token = i / (Dim / 8);
        const int32_t m = i % (Dim / 8) / 2;  // of 16 components, of which two are this lane's
        const int32_t h = i % 2;
        const int32_t byte = kBytes * (16 * m + first_component<kFp8>(lane) + h * kSecondComponent<kFp8>);
        const uint32_t all = ptx::ld_shared_4(piece(token, byte / 16) + static_cast<uint32_t>(byte % 16 / 4 * 4));
        const int32_t index = byte % 4 / kBytes;
        if ((nonfinite_mask<T, kFp8>(all) >> (8 * kBytes * index) & 1) == 0) continue;
        const float value = element_of<T, kFp8>(all, index);
#pragma unroll 1
        for (int32_t r = 0; r < 2; ++r) {
          if (!is_visible(params, context, column * 8 + lane % 4 * 2 + r, first + token)) continue;
          sums[(4 * m + 2 * h + r) * 32] += value;
        }
      }
#pragma unroll
      for (int32_t i = 0; i < kSums * Columns; ++i) {
        if (i / kSums == column) o[i % kSums / 4][i / kSums][i % 4] = sums[i % kSums * 32];
      }
    }
  }

 private:
  static constexpr int32_t kBytes = element_bytes(kFp8);
  static constexpr int32_t kPieces = Dim * kBytes / 16;
  static constexpr int32_t kWords = kTileTokens * Dim * kBytes / 4;

  __device__ __forceinline__ uint32_t piece(int32_t token, int32_t number) const {
    return address + static_cast<uint32_t>(piece_offset(Dim, kBytes, box, token, number));
  }
  /// Word `i` of the tile, in any order.
  __device__ __forceinline__ uint32_t word(int32_t i) const {
    return address + 4 * static_cast<uint32_t>(i);
  }
};

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
