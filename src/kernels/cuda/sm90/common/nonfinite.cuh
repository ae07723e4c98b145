#pragma once

#include "kernels/cuda/common/nonfinite.cuh"
#include "kernels/cuda/sm90/common/fp8.cuh"

/// Scan of values for NaN and Inf. A masked key has p = 0, and 0 * NaN and 0 * Inf are NaN: such values must not enter
/// GEMM1 for rows that do not see their token.
namespace folio::inline v0::kernels::cuda::sm90 {

template <typename T>
constexpr bool kIsHalf = false;
template <>
inline constexpr bool kIsHalf<__half> = true;

/// A mask of the bits of `word` that belong to NaN or Inf elements.
template <typename T, Fp8 kFp8>
__device__ __forceinline__ uint32_t nonfinite_mask(uint32_t word) {
  if constexpr (kFp8 == Fp8::kNone) {
    return ((word & kExponentBits<T>) == kExponentBits<T> ? 0xffffu : 0u) |
           ((word >> 16 & kExponentBits<T>) == kExponentBits<T> ? 0xffff0000u : 0u);
  } else if constexpr (kFp8 == Fp8::kE4M3) {
    return (((word & 0x7f7f7f7fu) + 0x01010101u) >> 7 & 0x01010101u) * 0xffu;
  } else {
    return (((word & 0x7c7c7c7cu) + 0x04040404u) >> 7 & 0x01010101u) * 0xffu;
  }
}

/// Whether any of sixteen fp8 values is NaN or Inf.
template <Fp8 kFp8>
__device__ __forceinline__ bool has_nonfinite(const uint4& fp8) {
  return (nonfinite_mask<__half, kFp8>(fp8.x) | nonfinite_mask<__half, kFp8>(fp8.y) |
          nonfinite_mask<__half, kFp8>(fp8.z) | nonfinite_mask<__half, kFp8>(fp8.w)) != 0;
}

/// Whether any 16-bit element of a dequantized chunk is.
template <typename T>
__device__ __forceinline__ bool has_nonfinite(const Dequantized& chunk) {
  uint32_t found = 0;
#pragma unroll
  for (const uint4& half : {chunk.first, chunk.second}) {
    found |= nonfinite_mask<T, Fp8::kNone>(half.x) | nonfinite_mask<T, Fp8::kNone>(half.y) |
             nonfinite_mask<T, Fp8::kNone>(half.z) | nonfinite_mask<T, Fp8::kNone>(half.w);
  }
  return found != 0;
}

/// A cheaper scan of two 16-bit elements: bits kNonfiniteLow and kNonfiniteHigh are set where the lower and the upper
/// one is NaN or Inf. The other bits mean nothing.
template <typename T>
__device__ __forceinline__ uint32_t nonfinite_signs(uint32_t pair) {
  constexpr uint32_t kBoth = kExponentBits<T> | kExponentBits<T> << 16;
  constexpr uint32_t kOne = (0x8000u - kExponentBits<T>) | (0x8000u - kExponentBits<T>) << 16;
  return (pair & kBoth) + kOne;
}
constexpr uint32_t kNonfiniteLow = 0x8000u;
constexpr uint32_t kNonfiniteHigh = 0x80000000u;

/// By thread `thread` of `Threads`: its chunks of a V tile of `BlockN` tokens that is complete and begins with token
/// `first`. Tokens that no row sees become zeros. If `scans`, returns whether it has found NaN or Inf among tokens that
/// some rows see and others do not.
/// `address(token, chunk)`: of one of the `Chunks` chunks of 16 bytes of a token. Loops stay loops: unrolled, they
/// make cuda-sm90-prefill slower, but for custom masks, whose tiles are all scanned (`Unroll`: of the scan).
template <typename T, int32_t BlockN, int32_t Chunks, int32_t Threads, Fp8 kFp8 = Fp8::kNone, int32_t Unroll = 1,
          typename Address>
__device__ __forceinline__ bool zero_and_scan(const VisibleRange& visible, int32_t first, bool scans, int32_t thread,
                                              Address address) {
  // Of the tile's tokens, some row sees those of [begin, end), and every row those of [all_begin, all_end).
  const int32_t begin = min(max(visible.any_begin - first, 0), BlockN);
  const int32_t end = min(max(visible.any_end - first, begin), BlockN);
  constexpr int32_t kStep = Threads / Chunks;  // tokens at once
  const int32_t chunk = thread % Chunks;
  const int32_t mine =
      thread / Chunks < kStep ? thread / Chunks : BlockN;  // of these tokens; none for the last threads
  const auto zero = [&](int32_t from, int32_t to) {
#pragma unroll 1
    for (int32_t token = from + mine; token < to; token += kStep) {
      ptx::st_shared_16(address(token, chunk), uint4{});
    }
  };
  zero(0, begin);
  zero(end, BlockN);
  if (!scans) return false;
  uint32_t found = 0;
  const auto scan = [&](int32_t from, int32_t to) {
#pragma unroll Unroll
    for (int32_t token = from + mine; token < to; token += kStep) {
      const uint4 loaded = ptx::ld_shared_16(address(token, chunk));
      if constexpr (kFp8 != Fp8::kNone) {
        found |= has_nonfinite<kFp8>(loaded) ? kNonfiniteLow : 0u;
      } else {
        found |= nonfinite_signs<T>(loaded.x) | nonfinite_signs<T>(loaded.y) | nonfinite_signs<T>(loaded.z) |
                 nonfinite_signs<T>(loaded.w);
      }
    }
  };
  const int32_t all_begin = min(max(visible.all_begin - first, begin), end);
  const int32_t all_end = min(max(visible.all_end - first, all_begin), end);
  scan(begin, all_begin);
  scan(all_end, end);
  return (found & (kNonfiniteLow | kNonfiniteHigh)) != 0;
}

/// Element `index` of a word of four fp8 values or two 16-bit ones.
template <typename T, Fp8 kFp8>
__device__ __forceinline__ float element_of(uint32_t word, int32_t index) {
  if constexpr (kFp8 != Fp8::kNone) {
    uint32_t low;
    uint32_t high;
    upcast_fp8x4<kFp8>(word >> 8 * index & 0xffu, low, high);
    return __half2float(__ushort_as_half(static_cast<uint16_t>(low)));
  } else {
    const auto bits = static_cast<uint16_t>(word >> 16 * index);
    if constexpr (kIsHalf<T>) {
      return __half2float(__ushort_as_half(bits));
    } else {
      return __bfloat162float(__ushort_as_bfloat16(bits));
    }
  }
}

/// Zeroes the NaN and Inf among `NumWords` words of 16-bit pairs, or of fp8 data, in shared memory; called by threads 0
/// to NumThreads - 1.
template <typename T, int32_t NumWords, int32_t NumThreads, Fp8 kFp8 = Fp8::kNone>
__device__ __forceinline__ void zero_nonfinite(uint32_t smem, int32_t thread) {
#pragma unroll 1
  for (int32_t i = thread; i < NumWords; i += NumThreads) {
    const uint32_t at = smem + 4 * static_cast<uint32_t>(i);
    const uint32_t word = ptx::ld_shared_4(at);
    const uint32_t mask = nonfinite_mask<T, kFp8>(word);
    if (mask != 0) ptx::st_shared_4(at, word & ~mask);
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90
