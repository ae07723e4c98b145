#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "kernels/cuda/sm80/smem.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"

/// fp8 keys and values: exact upcasts to 16-bit types, and the staging of tiles that are dequantized between shared
/// memory and the MMA.
namespace folio::inline v0::kernels::cuda::sm80 {

/// Two fp8 values. Exact, NaN and Inf included.
template <typename T>
__device__ __forceinline__ uint32_t upcast_fp8x2(uint32_t fp8, __nv_fp8_interpretation_t kind) {
  const __half2 values = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(fp8), kind);
  const float2 wide = __half22float2(values);
  return ptx::pack_two<T>(wide.x, wide.y);
}

/// Eight fp8 values.
template <typename T>
__device__ __forceinline__ uint4 upcast_fp8x8(const uint2& fp8, DType dtype) {
  if (dtype == DType::kFloat8E5M2) {
    return {upcast_fp8x2<T>(fp8.x & 0xffffu, __NV_E5M2), upcast_fp8x2<T>(fp8.x >> 16, __NV_E5M2),
            upcast_fp8x2<T>(fp8.y & 0xffffu, __NV_E5M2), upcast_fp8x2<T>(fp8.y >> 16, __NV_E5M2)};
  }
  return {upcast_fp8x2<T>(fp8.x & 0xffffu, __NV_E4M3), upcast_fp8x2<T>(fp8.x >> 16, __NV_E4M3),
          upcast_fp8x2<T>(fp8.y & 0xffffu, __NV_E4M3), upcast_fp8x2<T>(fp8.y >> 16, __NV_E4M3)};
}

/// Two e4m3 values, in the upper bytes of the halves, as float16: before compute capability 8.9. The exponent and
/// mantissa of e4m3 are those of a float16 that is 2^8 times smaller, subnormals included. NaN would be 480, which no
/// e4m3 is.
__device__ __forceinline__ uint32_t upcast_e4m3x2_by_hand(uint32_t spread) {
  const uint32_t small = (spread & 0x80008000u) | (spread >> 1 & 0x3f803f80u);
  const __half2 value = __hmul2(*reinterpret_cast<const __half2*>(&small), __float2half2_rn(256.0f));
  uint32_t wide = *reinterpret_cast<const uint32_t*>(&value);
  if ((spread & 0x7f00u) == 0x7f00u) wide |= 0x7fffu;
  if ((spread & 0x7f000000u) == 0x7f000000u) wide |= 0x7fff0000u;
  return wide;
}

/// The four e4m3 values of a word as two pairs of float16.
__device__ __forceinline__ void upcast_e4m3x4(uint32_t fp8, uint32_t& low, uint32_t& high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  ptx::upcast_e4m3x4(fp8, low, high);
#else
  low = upcast_e4m3x2_by_hand(__byte_perm(fp8, 0, 0x1404));
  high = upcast_e4m3x2_by_hand(__byte_perm(fp8, 0, 0x3424));
#endif
}

/// Staging of an fp8 K or V tile of the prefill path. Each thread copies its chunks to a private place with cp.async
/// while MMAs run, and later dequantizes the same chunks to float16 into the tile. So no thread waits for memory, and
/// each value is dequantized once, not by every warp.
template <int32_t Dim, int32_t Tokens>
class Fp8Stage {
  static constexpr int32_t kBytes = 16;             ///< of a chunk
  static constexpr int32_t kChunks = Dim / kBytes;  ///< of a token
  static constexpr int32_t kMine = Tokens * kChunks / kThreads;
  static constexpr int32_t kTokenThreads = 8;
  static_assert(kMine * kThreads == Tokens * kChunks && kThreads == 16 * kTokenThreads);

  /// The chunks of eight threads' tokens, token by token, are dealt to these threads.
  __device__ __forceinline__ static int32_t chunk_of(int32_t i, int32_t thread) {
    return i * kTokenThreads + thread % kTokenThreads;
  }

 public:
  /// Issues the copies of this thread's chunks. `addresses`: of the tokens whose chunks its eight threads share, one of
  /// each 16; zeros where null.
  __device__ __forceinline__ static void copy(uint32_t stage, const std::byte* const (&addresses)[kKvTile / 16],
                                              int32_t thread) {
    const std::byte* from[kMine];  // all read before the first copy, which is a compiler barrier
#pragma unroll
    for (int32_t i = 0; i < kMine; ++i) from[i] = addresses[chunk_of(i, thread) / kChunks];
#pragma unroll
    for (int32_t i = 0; i < kMine; ++i) {
      ptx::cp_async_16(stage + kBytes * (i * kThreads + thread), from[i] + chunk_of(i, thread) % kChunks * kBytes,
                       from[i] != nullptr);
    }
  }

  /// Dequantizes this thread's chunks, whose copies have completed. Threads with neighbouring chunks store halves of
  /// different parity at a time, which lie in different banks.
  __device__ __forceinline__ static void dequantize(uint32_t stage, uint32_t tile, int32_t thread) {
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
      const bool swap_halves = (in_token & 4) != 0;
      ptx::st_shared_16(tile + swizzled_offset(Dim, token, 2 * in_token + (swap_halves ? 1 : 0)),
                        swap_halves ? high : low);
      ptx::st_shared_16(tile + swizzled_offset(Dim, token, 2 * in_token + (swap_halves ? 0 : 1)),
                        swap_halves ? low : high);
    }
  }
};

}  // namespace folio::inline v0::kernels::cuda::sm80
