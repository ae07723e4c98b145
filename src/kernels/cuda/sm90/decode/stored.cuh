#pragma once

#include "kernels/cuda/sm90/decode/shared_state.cuh"
#include "ptx/math.cuh"

/// Keys and values as they stand in shared memory: of the 16-bit type `T` that products take, or fp8 codes, which are
/// widened to float16 between there and the product.
namespace folio::inline v0::kernels::cuda::sm90 {

enum class Codes : int32_t { kNone, kE4M3, kE5M2 };

constexpr int32_t element_bytes(Codes codes) {
  return codes == Codes::kNone ? 2 : 1;
}

/// Four codes of a word, widened.
template <Codes kCodes>
__device__ __forceinline__ void widen_four(uint32_t word, uint32_t& low, uint32_t& high) {
  if constexpr (kCodes == Codes::kE4M3) {
    ptx::upcast_e4m3x4(word, low, high);
  } else {
    ptx::upcast_e5m2x4(word, low, high);
  }
}

/// Keys of 16 tokens and 32 components as first operands of two products, from what a load of four matrices gave:
/// tokens and tokens + 8 of one piece of 16 codes, then of the next. A lane's four codes are neighbours, where a
/// product wants two pairs that are eight apart: queries are read in the same order.
template <Codes kCodes>
__device__ __forceinline__ void widen_keys(const uint32_t (&m)[4], uint32_t (&a)[2][4]) {
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    widen_four<kCodes>(m[2 * i], a[i][0], a[i][2]);
    widen_four<kCodes>(m[2 * i + 1], a[i][1], a[i][3]);
  }
}

/// The same of values, transposed: of 16 components, even ones are a product's rows 0 to 7, odd ones its rows 8 to 15.
/// A word has two neighbouring components of two tokens; a product wants two tokens of one component.
template <Codes kCodes>
__device__ __forceinline__ void widen_values(const uint32_t (&m)[4], uint32_t (&a)[2][4]) {
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    widen_four<kCodes>(__byte_perm(m[2 * i], 0, 0x3120), a[i][0], a[i][1]);
    widen_four<kCodes>(__byte_perm(m[2 * i + 1], 0, 0x3120), a[i][2], a[i][3]);
  }
}

/// What of a word is infinite or NaN, as a mask.
template <typename T, Codes kCodes>
__device__ __forceinline__ uint32_t special_bits(uint32_t word) {
  if constexpr (kCodes == Codes::kNone) {
    constexpr uint32_t kExponent = kIsHalf<T> ? 0x7c00u : 0x7f80u;
    return ((word & kExponent) == kExponent ? 0xffffu : 0u) |
           ((word >> 16 & kExponent) == kExponent ? 0xffff0000u : 0u);
  } else if constexpr (kCodes == Codes::kE4M3) {
    return (((word & 0x7f7f7f7fu) + 0x01010101u) >> 7 & 0x01010101u) * 0xffu;
  } else {
    return (((word & 0x7c7c7c7cu) + 0x04040404u) >> 7 & 0x01010101u) * 0xffu;
  }
}

/// One of a word's elements.
template <typename T, Codes kCodes>
__device__ __forceinline__ float element_of(uint32_t word, int32_t index) {
  if constexpr (kCodes != Codes::kNone) {
    uint32_t low;
    uint32_t high;
    widen_four<kCodes>(word >> 8 * index & 0xffu, low, high);
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

}  // namespace folio::inline v0::kernels::cuda::sm90
