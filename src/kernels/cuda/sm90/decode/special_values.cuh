#pragma once

#include "kernels/cuda/sm90/decode/scores.cuh"

/// What a tile's values hold that must not be multiplied. A weight of 0 times an infinity or a NaN is NaN: so tokens
/// that no row sees become zeros, and of tokens that some rows see and others do not, such values are added to the rows
/// that see them and become zeros too. Looked for only in tiles where that can be.
namespace folio::inline v0::kernels::cuda::sm90 {

/// Values of one tile in shared memory, by a warp.
template <typename T, int32_t Dim>
struct ValueTile {
  uint32_t address;
  int32_t box;
  int32_t lane;

  /// Tokens outside [begin, end), counted from the tile's first, become zeros.
  __device__ __forceinline__ void clear_unseen(int32_t begin, int32_t end) const {
#pragma unroll 1
    for (int32_t i = lane; i < kTileTokens * (Dim / kPiece); i += 32) {
      const int32_t token = i / (Dim / kPiece);
      if (token < begin || token >= end) ptx::store_16(piece(token, i % (Dim / kPiece)), uint4{});
    }
    __syncwarp();
  }

  /// Whether there is an infinity or a NaN; the same in all lanes.
  __device__ __forceinline__ bool has_special() const {
    bool found = false;
#pragma unroll 1
    for (int32_t i = lane; i < kWords; i += 32) found = found || special_halves(ptx::load_4(word(i))) != 0;
    return __any_sync(kAllLanes, found);
  }

  /// Those become zeros.
  __device__ __forceinline__ void clear_special() const {
    __syncwarp();
#pragma unroll 1
    for (int32_t i = lane; i < kWords; i += 32) {
      const uint32_t pair = ptx::load_4(word(i));
      const uint32_t special = special_halves(pair);
      if (special == 0) continue;
      ptx::store_4(word(i), pair & ((special & 1) != 0 ? 0xffff0000u : ~0u) & ((special & 2) != 0 ? 0xffffu : ~0u));
    }
    __syncwarp();
  }

  /// Adds them to the rows that see them. `o`: of 16 components each, see MathWarp.
  template <int32_t Columns>
  __device__ __forceinline__ void add_special(const AttentionParams& params, const ItemContext& context, int32_t first,
                                              float (&o)[Dim / 16][Columns][4]) const {
    constexpr int32_t kSums = Dim / 16 * Columns * 4;
    struct {
      float x[kSums];
    } local;
#pragma unroll
    for (int32_t i = 0; i < kSums; ++i) local.x[i] = o[i / 4 / Columns][i / 4 % Columns][i % 4];
    auto* address_of_sums = &local;
    asm volatile("" : "+l"(address_of_sums)::"memory");  // no registers
#pragma unroll 1
    for (int32_t i = 0; i < kTileTokens * (Dim / kPiece); ++i) {
      const int32_t token = i / (Dim / kPiece);
      const int32_t part = i % (Dim / kPiece);  // of eight components, of which lane / 4 is this lane's
      const uint32_t pair = ptx::load_4(piece(token, part) + 4 * static_cast<uint32_t>(lane / 8));
      const int32_t half = lane / 4 % 2;
      if ((special_halves(pair) >> half & 1) == 0) continue;
      const float value = half_of(pair, half);
#pragma unroll 1
      for (int32_t r = 0; r < 2 * Columns; ++r) {
        if (!sees(params, context, r / 2 * 8 + lane % 4 * 2 + r % 2, first + token)) continue;
        address_of_sums->x[(part / 2 * Columns + r / 2) * 4 + part % 2 * 2 + r % 2] += value;
      }
    }
    asm volatile("" ::: "memory");
#pragma unroll
    for (int32_t i = 0; i < kSums; ++i) o[i / 4 / Columns][i / 4 % Columns][i % 4] = address_of_sums->x[i];
  }

 private:
  static constexpr int32_t kWords = kTileTokens * Dim / 2;
  static constexpr bool kIsHalf = kWeightShift<T> != 0.0f;

  __device__ __forceinline__ uint32_t piece(int32_t token, int32_t number) const {
    return address + static_cast<uint32_t>(piece_offset(Dim, box, token, number));
  }
  /// Word `i` of the tile, in any order.
  __device__ __forceinline__ uint32_t word(int32_t i) const {
    return address + 4 * static_cast<uint32_t>(i);
  }

  /// Bits of the halves of `pair` that are infinite or NaN: 1 the lower, 2 the upper.
  __device__ __forceinline__ static uint32_t special_halves(uint32_t pair) {
    constexpr uint32_t kExponent = kIsHalf ? 0x7c00u : 0x7f80u;
    return ((pair & kExponent) == kExponent ? 1u : 0u) | ((pair >> 16 & kExponent) == kExponent ? 2u : 0u);
  }
  __device__ __forceinline__ static float half_of(uint32_t pair, int32_t half) {
    const auto bits = static_cast<uint16_t>(half == 0 ? pair : pair >> 16);
    if constexpr (kIsHalf) {
      return __half2float(__ushort_as_half(bits));
    } else {
      return __bfloat162float(__ushort_as_bfloat16(bits));
    }
  }
};

}  // namespace folio::inline v0::kernels::cuda::sm90
