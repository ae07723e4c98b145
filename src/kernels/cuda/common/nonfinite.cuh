#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

/// NaN and Inf among 16-bit elements.
namespace folio::inline v0::kernels::cuda {

/// The exponent's bits of a 16-bit type. All of them are set in a NaN and in an Inf.
template <typename T>
constexpr uint32_t kExponentBits = 0x7f80u;
template <>
inline constexpr uint32_t kExponentBits<__half> = 0x7c00u;

/// The lower or the upper of two 16-bit elements.
template <typename T>
__device__ __forceinline__ float element_of_pair(uint32_t pair, bool high) {
  const auto bits = static_cast<uint16_t>(high ? pair >> 16 : pair);
  if constexpr (kExponentBits<T> == 0x7c00u) {
    return __half2float(__ushort_as_half(bits));
  } else {
    return __bfloat162float(__ushort_as_bfloat16(bits));
  }
}

}  // namespace folio::inline v0::kernels::cuda
