#pragma once

#include "kernels/cuda/common/mask.cuh"
#include "kernels/cuda/sm90/common/nonfinite.cuh"
#include "kernels/cuda/sm90/decode/smem.cuh"

/// Masks of a KV tile: logits, and values that must not enter GEMM1. A masked key has p = 0, and 0 * NaN is NaN. So the
/// values of tokens that no row sees become zeros. Where some rows see a token and others do not, its NaN and Inf are
/// added to the rows that see it and become zeros, too. Only tiles in which that can happen are scanned.
namespace folio::inline v0::kernels::cuda::sm90::decode {

/// Sets the logits of tokens that a lane's rows do not see to -infinity.
template <int32_t Columns>
__device__ __forceinline__ void mask_logits(const WorkTileContext& context, int32_t first, int32_t lane,
                                            float (&s)[Columns][4]) {
#pragma unroll
  for (int32_t n = 0; n < Columns; ++n) {
#pragma unroll
    for (int32_t j = 0; j < 2; ++j) {
      const int32_t row = 8 * n + lane % 4 * 2 + j;
      const int32_t begin = context.visible_begin[row] - first - lane / 4;
      const int32_t end = context.visible_end[row] - first - lane / 4;
      if (begin > 0 || end <= 0) s[n][j] = -INFINITY;
      if (begin > 8 || end <= 8) s[n][2 + j] = -INFINITY;
    }
  }
}

/// The values of one KV tile in shared memory, by a warp.
template <typename T, int32_t Dim, Fp8 kFp8>
struct ValueTile {
  uint32_t address;
  int32_t copy_tokens;
  int32_t lane;

  /// Zeroes tokens outside of [begin, end), counted from the tile's first.
  __device__ __forceinline__ void zero_invisible(int32_t begin, int32_t end) const {
#pragma unroll 1
    for (int32_t i = lane; i < kTileTokens * kChunks; i += 32) {
      const int32_t token = i / kChunks;
      if (token < begin || token >= end) ptx::st_shared_16(chunk(token, i % kChunks), uint4{});
    }
    __syncwarp();
  }

  /// Whether the tile has NaN or Inf; the same in all lanes.
  __device__ __forceinline__ bool scan_nonfinite() const {
    bool found = false;
#pragma unroll 1
    for (int32_t i = lane; i < kWords; i += 32)
      found = found || nonfinite_mask<T, kFp8>(ptx::ld_shared_4(word(i))) != 0;
    return __any_sync(kAllLanes, found);
  }

  /// Zeroes NaN and Inf.
  __device__ __forceinline__ void zero_nonfinite() const {
    __syncwarp();
#pragma unroll 1
    for (int32_t i = lane; i < kWords; i += 32) {
      const uint32_t all = ptx::ld_shared_4(word(i));
      const uint32_t nonfinite = nonfinite_mask<T, kFp8>(all);
      if (nonfinite != 0) ptx::st_shared_4(word(i), all & ~nonfinite);
    }
    __syncwarp();
  }

  /// Adds NaN and Inf to `o` of the rows that see them. `scratch`: the lane's floats in shared memory, 32 apart, for
  /// one column tile of O.
  template <int32_t Columns>
  __device__ __forceinline__ void add_nonfinite(const AttentionParams& params, const WorkTileContext& context,
                                                int32_t first, float* scratch, float (&o)[Dim / 16][Columns][4]) const {
    constexpr int32_t kFloats = Dim / 16 * 4;
#pragma unroll 1
    for (int32_t column = 0; column < Columns; ++column) {
#pragma unroll
      for (int32_t i = 0; i < kFloats * Columns; ++i) {
        if (i / kFloats == column) scratch[i % kFloats * 32] = o[i % kFloats / 4][i / kFloats][i % 4];
      }
#pragma unroll 1
      for (int32_t i = 0; i < kTileTokens * (Dim / 8); ++i) {
        const int32_t token = i / (Dim / 8);
        const int32_t m = i % (Dim / 8) / 2;  // of 16 components, of which two are this lane's
        const int32_t h = i % 2;
        const int32_t byte = kBytes * (16 * m + first_component<kFp8>(lane) + h * kSecondComponent<kFp8>);
        const uint32_t all = ptx::ld_shared_4(chunk(token, byte / 16) + static_cast<uint32_t>(byte % 16 / 4 * 4));
        const int32_t index = byte % 4 / kBytes;
        if ((nonfinite_mask<T, kFp8>(all) >> (8 * kBytes * index) & 1) == 0) continue;
        const float value = element_of<T, kFp8>(all, index);
#pragma unroll 1
        for (int32_t r = 0; r < 2; ++r) {
          if (!is_visible(params, context, column * 8 + lane % 4 * 2 + r, first + token)) continue;
          scratch[(4 * m + 2 * h + r) * 32] += value;
        }
      }
#pragma unroll
      for (int32_t i = 0; i < kFloats * Columns; ++i) {
        if (i / kFloats == column) o[i % kFloats / 4][i / kFloats][i % 4] = scratch[i % kFloats * 32];
      }
    }
  }

 private:
  static constexpr int32_t kBytes = element_bytes(kFp8);
  static constexpr int32_t kChunks = Dim * kBytes / 16;
  static constexpr int32_t kWords = kTileTokens * Dim * kBytes / 4;

  __device__ __forceinline__ uint32_t chunk(int32_t token, int32_t number) const {
    return address + static_cast<uint32_t>(swizzled_offset(Dim, kBytes, copy_tokens, token, number));
  }
  /// Word `i` of the tile, in any order.
  __device__ __forceinline__ uint32_t word(int32_t i) const {
    return address + 4 * static_cast<uint32_t>(i);
  }
};

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
