#pragma once

#include "kernels/cuda/sm90/prefill/codes.cuh"
#include "kernels/cuda/sm90/prefill/edge_values.cuh"
#include "kernels/cuda/sm90/prefill/native_shape.hpp"
#include "ptx/wgmma.cuh"

/// Values as products of codes want them: a row for each component, a tile's tokens along it (see native_column).
namespace folio::inline v0::kernels::cuda::sm90::prefill {

/// Transposes a warp's 32 tokens of a tile, in sixteens. A load of matrices of 16 bits, transposed, gives a lane two
/// components of two tokens; from two loads' words come two of four tokens, and the rows of a matrix to be stored.
class NativeTransposer {
 public:
  __device__ __forceinline__ explicit NativeTransposer(int32_t lane)
      : load_(native_offset(lane % 16, 0) & ~0x70),
        load_piece_(lane / 16),
        row_(lane % 8),
        store_row_(lane / 16 * 16 + 2 * row_ + (lane / 8 % 2 ^ row_ / 4)),
        first_(lane < 16 ? 0x6420u : 0x7531u),
        pair_(2 * (lane % 4)) {}

  /// `from`: the warp's tokens; `to`: the tile's transposed values.
  __device__ __forceinline__ void transpose(uint32_t from, uint32_t to, int32_t warp) const {
#pragma unroll
    for (int32_t m = 0; m < 2; ++m) {
      uint32_t words[4][4];
#pragma unroll
      for (int32_t n = 0; n < 4; ++n) load(from, m, n, words[n]);
#pragma unroll
      for (int32_t n = 0; n < 4; ++n) store(to, 2 * warp + m, n, words[n]);
    }
  }

  /// The same of a tile at which rows look differently: of the warp's tokens, those outside of [begin, end) become
  /// zeros. Returns whether others hold NaN.
  __device__ __forceinline__ bool transpose_edge(uint32_t from, uint32_t to, int32_t warp, int32_t begin,
                                                 int32_t end) const {
    uint32_t special = 0;
#pragma unroll 1
    for (int32_t m = 0; m < 2; ++m) {
      uint32_t keep[2];
#pragma unroll
      for (int32_t i = 0; i < 2; ++i) {
        const int32_t token = 16 * m + 8 * i + pair_;
        keep[i] =
            (token >= begin && token < end ? 0xffffu : 0u) | (token + 1 >= begin && token + 1 < end ? 0xffff0000u : 0u);
      }
#pragma unroll 1
      for (int32_t n = 0; n < 4; ++n) {
        uint32_t words[4];
        load(from, m, n, words);
#pragma unroll
        for (int32_t i = 0; i < 4; ++i) {
          words[i] &= keep[i % 2];
          special |= nonfinite_mask<__half, Fp8::kE4M3>(words[i]);
        }
        store(to, 2 * warp + m, n, words);
      }
    }
    return special != 0;
  }

 private:
  /// Components 32n to 32n + 31 of the warp's tokens 16m to 16m + 15: eight tokens, the other eight, the same of the
  /// next sixteen components.
  __device__ __forceinline__ void load(uint32_t from, int32_t m, int32_t n, uint32_t (&words)[4]) const {
    ptx::ldmatrix_x4_trans(
        words, from + static_cast<uint32_t>(16 * kNativeRow * m + load_ + (((2 * n + load_piece_) ^ row_) & 7) * 16));
  }
  /// Rows of eight matrices' lines do not meet in a bank, since half of a matrix's components are even.
  __device__ __forceinline__ void store(uint32_t to, int32_t sixteen, int32_t n, const uint32_t (&words)[4]) const {
    const uint32_t second = first_ ^ 0x1111u;
    const uint32_t matrices[4] = {__byte_perm(words[0], words[1], first_), __byte_perm(words[0], words[1], second),
                                  __byte_perm(words[2], words[3], first_), __byte_perm(words[2], words[3], second)};
    ptx::stmatrix_x4(to + static_cast<uint32_t>(32 * kNativeRow * n + native_offset(store_row_, sixteen)), matrices);
  }

  const int32_t load_;        ///< offset of the token that the lane names
  const int32_t load_piece_;  ///< which of two
  const int32_t row_;         ///< of a matrix, that the lane names
  const int32_t store_row_;   ///< component that it stands for
  const uint32_t first_;      ///< which bytes of two words make the first matrix's; the second's are the others
  const int32_t pair_;        ///< token, of eight, of a word's first two bytes
};

/// Adds a tile's NaN to the sums of the rows that see them. `first_row`: the lane's first; `o`: see MathGroup.
__device__ __forceinline__ void add_special_codes(const AttentionParams& params, const RowInfo& rows, uint32_t tile,
                                                  int32_t first_token, int32_t first_row,
                                                  float (&o)[kNativeDims.v / 2]) {
  struct {
    float x[kNativeDims.v / 2];
  } local;
#pragma unroll
  for (int32_t i = 0; i < kNativeDims.v / 2; ++i) local.x[i] = o[i];
  auto* sums = &local;
  asm volatile("" : "+l"(sums)::"memory");  // no registers
  const auto pair = static_cast<int32_t>(2 * (threadIdx.x % 4));
#pragma unroll 1
  for (int32_t i = 0; i < kNativeDims.v / 4; ++i) {
    const int32_t component = i / 2 * 8 + pair + i % 2;
#pragma unroll 1
    for (int32_t at = 0; at < kNativeTokens; at += 4) {
      const uint32_t word = ptx::ld_shared_4(tile + static_cast<uint32_t>(native_offset(component, at / 16) + at % 16));
      const uint32_t special = nonfinite_mask<__half, Fp8::kE4M3>(word);
      if (special == 0) continue;
#pragma unroll 1
      for (int32_t n = 0; n < 4; ++n) {
        if ((special >> 8 * n & 1) == 0) continue;
        const int32_t token = first_token + at / 16 * 16 + at % 16 / 2 + n % 2 + n / 2 * 8;
#pragma unroll 1
        for (int32_t h = 0; h < 2; ++h) {
          if (is_visible(params, rows, first_row + 8 * h, token)) sums->x[i / 2 * 4 + 2 * h + i % 2] += NAN;
        }
      }
    }
  }
  asm volatile("" ::: "memory");
#pragma unroll
  for (int32_t i = 0; i < kNativeDims.v / 2; ++i) o[i] = sums->x[i];
}

/// By thread `thread` of all math threads: the tile's NaN become zeros.
__device__ __forceinline__ void clear_special_codes(uint32_t tile, int32_t thread) {
#pragma unroll 1
  for (int32_t i = thread; i < kNativeTile / 4; i += kMathGroups * kGroupThreads) {
    const uint32_t at = tile + 4 * static_cast<uint32_t>(i);
    const uint32_t word = ptx::ld_shared_4(at);
    const uint32_t special = nonfinite_mask<__half, Fp8::kE4M3>(word);
    if (special != 0) ptx::st_shared_4(at, word & ~special);
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
