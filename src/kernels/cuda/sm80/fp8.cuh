#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "kernels/cuda/sm80/smem.cuh"
#include "ptx/mma.cuh"

/// fp8 keys and values: upcasts to 16-bit types, and the staging of tiles that are dequantized between shared memory
/// and the MMA.
namespace folio::inline v0::kernels::cuda::sm80 {

/// Two fp8 codes widened: exactly, NaN and infinities too.
template <typename T>
__device__ __forceinline__ uint32_t upcast_fp8x2(uint32_t fp8, __nv_fp8_interpretation_t kind) {
  const __half2 values = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(fp8), kind);
  const float2 wide = __half22float2(values);
  return ptx::pack_two<T>(wide.x, wide.y);
}

/// Eight codes widened.
template <typename T>
__device__ __forceinline__ uint4 upcast_fp8x8(const uint2& fp8, DType dtype) {
  if (dtype == DType::kFloat8E5M2) {
    return {upcast_fp8x2<T>(fp8.x & 0xffffu, __NV_E5M2), upcast_fp8x2<T>(fp8.x >> 16, __NV_E5M2),
            upcast_fp8x2<T>(fp8.y & 0xffffu, __NV_E5M2), upcast_fp8x2<T>(fp8.y >> 16, __NV_E5M2)};
  }
  return {upcast_fp8x2<T>(fp8.x & 0xffffu, __NV_E4M3), upcast_fp8x2<T>(fp8.x >> 16, __NV_E4M3),
          upcast_fp8x2<T>(fp8.y & 0xffffu, __NV_E4M3), upcast_fp8x2<T>(fp8.y >> 16, __NV_E4M3)};
}

/// Two e4m3 codes, which stand in the upper bytes of the halves, as float16. A code's exponent and mantissa are those
/// of a float16 that is 2^8 scaled smaller, subnormal numbers included; of NaN that is 480, which no code means.
__device__ __forceinline__ uint32_t upcast_e4m3x2_by_hand(uint32_t spread) {
  const uint32_t small = (spread & 0x80008000u) | (spread >> 1 & 0x3f803f80u);
  const __half2 value = __hmul2(*reinterpret_cast<const __half2*>(&small), __float2half2_rn(256.0f));
  uint32_t wide = *reinterpret_cast<const uint32_t*>(&value);
  if ((spread & 0x7f00u) == 0x7f00u) wide |= 0x7fffu;
  if ((spread & 0x7f000000u) == 0x7f000000u) wide |= 0x7fff0000u;
  return wide;
}

/// The four codes of a word as two pairs of float16.
__device__ __forceinline__ void upcast_e4m3x4(uint32_t fp8, uint32_t& low, uint32_t& high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm("{.reg .b16 first, second; mov.b32 {first, second}, %2; cvt.rn.f16x2.e4m3x2 %0, first; "
      "cvt.rn.f16x2.e4m3x2 %1, second;}"
      : "=r"(low), "=r"(high)
      : "r"(fp8));
#else
  low = upcast_e4m3x2_by_hand(__byte_perm(fp8, 0, 0x1404));
  high = upcast_e4m3x2_by_hand(__byte_perm(fp8, 0, 0x3424));
#endif
}

/// Keys or values of a tile that warps share, on their way through shared memory: copied as e4m3 codes to a place
/// where nobody else looks, while products are under way, and widened to float16 into the tile by the thread that asked
/// for them. So no thread waits for memory, and a code is widened once, not by every warp.
template <int32_t Dim, int32_t Tokens>
class Fp8Stage {
  static constexpr int32_t kBytes = 16;             ///< of a piece
  static constexpr int32_t kChunks = Dim / kBytes;  ///< of a token
  static constexpr int32_t kMine = Tokens * kChunks / kThreads;
  static constexpr int32_t kTokenThreads = 8;
  static_assert(kMine * kThreads == Tokens * kChunks && kThreads == 16 * kTokenThreads);

  /// Pieces of a thread's tokens, one token after the other, are dealt to its eight threads.
  __device__ __forceinline__ static int32_t chunk_of(int32_t i, int32_t thread) {
    return i * kTokenThreads + thread % kTokenThreads;
  }

 public:
  /// Begins the copies of this thread's pieces. `places`: of the tokens of which eight threads, this one among them,
  /// have all pieces: one of each 16. Of those that are null, zeros.
  __device__ __forceinline__ static void copy(uint32_t stage, const std::byte* const (&addresses)[kKvTile / 16],
                                              int32_t thread) {
    const std::byte* from[kMine];  // read at once, not one behind each copy
#pragma unroll
    for (int32_t i = 0; i < kMine; ++i) from[i] = addresses[chunk_of(i, thread) / kChunks];
#pragma unroll
    for (int32_t i = 0; i < kMine; ++i) {
      ptx::cp_async_16(stage + kBytes * (i * kThreads + thread), from[i] + chunk_of(i, thread) % kChunks * kBytes,
                       from[i] != nullptr);
    }
  }

  /// Widens this thread's pieces, whose copies have ended. Threads with neighbouring pieces store halves of different
  /// parity at a time, which lie in different banks.
  __device__ __forceinline__ static void widen(uint32_t stage, uint32_t tile, int32_t thread) {
#pragma unroll
    for (int32_t i = 0; i < kMine; ++i) {
      const int32_t chunk = chunk_of(i, thread);
      const int32_t token = chunk / kChunks * 16 + thread / kTokenThreads;
      const int32_t in_token = chunk % kChunks;
      const uint4 fp8 = ptx::ld_shared_16(stage + kBytes * (i * kThreads + thread));
      uint4 low;
      uint4 high;
      upcast_e4m3x4(fp8.x, low.x, low.y);
      upcast_e4m3x4(fp8.y, low.z, low.w);
      upcast_e4m3x4(fp8.z, high.x, high.y);
      upcast_e4m3x4(fp8.w, high.z, high.w);
      const bool turned = (in_token & 4) != 0;
      ptx::st_shared_16(tile + swizzled_offset(Dim, token, 2 * in_token + (turned ? 1 : 0)), turned ? high : low);
      ptx::st_shared_16(tile + swizzled_offset(Dim, token, 2 * in_token + (turned ? 0 : 1)), turned ? low : high);
    }
  }
};

}  // namespace folio::inline v0::kernels::cuda::sm80
