#pragma once

#include "kernels/cuda/sm90/common/copy.cuh"
#include "kernels/cuda/sm90/common/nonfinite.cuh"
#include "kernels/cuda/sm90/prefill/shared_state.cuh"

/// fp8 codes on their way to tiles of float16, by one loading warp: widening is exact. A warp has 32 tokens of a tile
/// at once, 16 bytes of codes at a time: of each eight tokens, a lane has one token's components 16 * piece to 16 *
/// piece + 15 and those 64 further on.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

constexpr int32_t kCodeDim = 128;     ///< components of a token: their codes are a row of 128 bytes
constexpr int32_t kWarpEights = 4;    ///< of a tile, that a loading warp has
constexpr int32_t kCodePieces = 8;    ///< of a lane
constexpr int32_t kCodeEight = 1024;  ///< bytes of eight tokens' codes
static_assert(kLargestCodeBox == kEight * kWarpEights && kCodeSpan == kCodeDim);

/// What a lane has of each eight tokens. Eight lanes, which share an access to shared memory, have tokens whose numbers
/// differ in the first and the last bit: so they meet neither where codes are read (see code_offset) nor where they
/// are written, every other piece of a token.
struct CodePlace {
  int32_t token;
  int32_t piece;
  __device__ __forceinline__ explicit CodePlace(int32_t lane)
      : token((lane / 8) ^ (lane / 4 % 2 * 5)), piece(lane % 4) {}
};

/// Byte offset of a lane's piece among eight tokens' codes, as a box leaves them: `half` 0, or 1 for the one 64
/// components further on.
__device__ __forceinline__ uint32_t code_offset(const CodePlace& place, int32_t half) {
  return static_cast<uint32_t>(place.token * 128 + ((4 * half + place.piece) ^ place.token) * 16);
}

template <Fp8 kFp8>
__device__ __forceinline__ bool has_special(const uint4& codes) {
  return (nonfinite_mask<__half, kFp8>(codes.x) | nonfinite_mask<__half, kFp8>(codes.y) |
          nonfinite_mask<__half, kFp8>(codes.z) | nonfinite_mask<__half, kFp8>(codes.w)) != 0;
}

/// Writes a lane's piece, widened, among the eight tokens of a tile that begin at `eight`: see tile_offset.
template <Fp8 kFp8>
__device__ __forceinline__ void store_widened(uint32_t eight, const CodePlace& place, int32_t half,
                                              const uint4& codes) {
  uint4 first;
  uint4 second;
  upcast_fp8x4<kFp8>(codes.x, first.x, first.y);
  upcast_fp8x4<kFp8>(codes.y, first.z, first.w);
  upcast_fp8x4<kFp8>(codes.z, second.x, second.y);
  upcast_fp8x4<kFp8>(codes.w, second.z, second.w);
  const uint32_t row = eight + static_cast<uint32_t>(half * span_step(kCodeDim) + place.token * 128);
  const auto at = static_cast<uint32_t>(((2 * place.piece) ^ place.token) * 16);
  ptx::st_shared_16(row + at, first);
  ptx::st_shared_16(row + (at ^ 16u), second);
}

/// Eight codes that begin at a multiple of eight, widened to shared memory; zeros where not valid.
template <typename T>
__device__ __forceinline__ void copy_eight_codes(uint32_t shared, const uint8_t* from, DType dtype, bool valid) {
  const uint2 codes = valid ? *reinterpret_cast<const uint2*>(from) : uint2{};
  const __nv_fp8_interpretation_t kind = dtype == DType::kFloat8E5M2 ? __NV_E5M2 : __NV_E4M3;
  ptx::st_shared_16(shared, uint4{upcast_fp8x2<T>(codes.x & 0xffffu, kind), upcast_fp8x2<T>(codes.x >> 16, kind),
                                  upcast_fp8x2<T>(codes.y & 0xffffu, kind), upcast_fp8x2<T>(codes.y >> 16, kind)});
}

/// Queries of a bfloat16 row as float16: its largest power of two becomes 2^14, so that what is 2^-28 of it or more
/// stays exact (but where all of it is below 2^-46). Returns what the row's scale is to be multiplied with. By the 16
/// lanes that have the row's pieces.
__device__ __forceinline__ float to_float16(uint4& piece) {
  constexpr int32_t kTopExponent = 14;
  uint32_t* const pairs[4] = {&piece.x, &piece.y, &piece.z, &piece.w};
  uint32_t most = 0;  // magnitude; infinities and NaN count as 0
#pragma unroll
  for (uint32_t* pair : pairs) {
    const uint32_t low = *pair & 0x7fffu;
    const uint32_t high = *pair >> 16 & 0x7fffu;
    most = max(most, max(low < 0x7f80u ? low : 0u, high < 0x7f80u ? high : 0u));
  }
#pragma unroll
  for (int32_t lanes = 1; lanes < kCodeDim / kPiece; lanes *= 2) {
    most = max(most, __shfl_xor_sync(kAllLanes, most, lanes));
  }
  const int32_t exponent =
      most == 0 ? 0 : min(max(static_cast<int32_t>(most >> 7) - 127 - kTopExponent, kLeastQueries), 120);
  const float by = __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23);
#pragma unroll
  for (uint32_t* pair : pairs) {
    *pair = ptx::pack_two<__half>(__uint_as_float(*pair << 16) * by, __uint_as_float(*pair & 0xffff0000u) * by);
  }
  return __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
