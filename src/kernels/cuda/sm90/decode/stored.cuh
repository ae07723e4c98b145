#pragma once

#include "kernels/cuda/sm90/common/fp8.cuh"
#include "kernels/cuda/sm90/common/nonfinite.cuh"
#include "kernels/cuda/sm90/decode/shared_state.cuh"

/// fp8 operands of the MMA, dequantized to float16 between shared memory and registers.
namespace folio::inline v0::kernels::cuda::sm90::decode {

/// Keys of 16 tokens and 32 components as first operands of two products, from what a load of four matrices gave:
/// tokens and tokens + 8 of one piece of 16 codes, then of the next. A lane's four codes are neighbours, where a
/// product wants two pairs that are eight apart: queries are read in the same order.
template <Fp8 kFp8>
__device__ __forceinline__ void widen_keys(const uint32_t (&m)[4], uint32_t (&a)[2][4]) {
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    upcast_fp8x4<kFp8>(m[2 * i], a[i][0], a[i][2]);
    upcast_fp8x4<kFp8>(m[2 * i + 1], a[i][1], a[i][3]);
  }
}

/// The same of values, transposed: of 16 components, even ones are a product's rows 0 to 7, odd ones its rows 8 to 15.
/// A word has two neighbouring components of two tokens; a product wants two tokens of one component.
template <Fp8 kFp8>
__device__ __forceinline__ void widen_values(const uint32_t (&m)[4], uint32_t (&a)[2][4]) {
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    upcast_fp8x4<kFp8>(__byte_perm(m[2 * i], 0, 0x3120), a[i][0], a[i][1]);
    upcast_fp8x4<kFp8>(__byte_perm(m[2 * i + 1], 0, 0x3120), a[i][2], a[i][3]);
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
