#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ptx/math.cuh"

/// Warp-level MMA (compute capability 8.0): PTX `ldmatrix`, `stmatrix`, `movmatrix` and `mma.sync.m16n8k16`. With
/// g = lane / 4 and t = lane % 4, a lane's accumulators 0 to 3 are elements (g, 2t), (g, 2t + 1), (g + 8, 2t) and
/// (g + 8, 2t + 1).
namespace folio::inline v0::ptx {

/// Loads four 8 x 8 matrices of 16-bit elements. Lanes 8i to 8i + 7 give the addresses of matrix i's rows of 16 bytes.
/// A lane gets elements (g, 2t) and (g, 2t + 1) of each.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&out)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared)
               : "memory");
}

/// ldmatrix_x4 with each matrix transposed: a lane gets elements (2t, g) and (2t + 1, g).
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&out)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared)
               : "memory");
}

/// The inverse of ldmatrix_x4 (compute capability 9.0): stores word i of all lanes as matrix i. Lanes 8i to 8i + 7 give
/// the addresses of its rows.
__device__ __forceinline__ void stmatrix_x4(uint32_t shared, const uint32_t (&in)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(in[0]), "r"(in[1]),
               "r"(in[2]), "r"(in[3])
               : "memory");
}

/// stmatrix_x4 with each matrix transposed: a lane's word has elements (2t, g) and (2t + 1, g) of what is stored.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t shared, const uint32_t (&in)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(in[0]),
               "r"(in[1]), "r"(in[2]), "r"(in[3])
               : "memory");
}

/// Transposes an 8 x 8 matrix of 16-bit elements in the warp's registers: a lane gives elements (g, 2t) and (g, 2t + 1)
/// and gets (2t, g) and (2t + 1, g).
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t two) {
  uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(two));
  return out;
}

/// acc += A (16 x 16, row-major) * B (16 x 8, column-major), with float32 accumulators.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0,
                                                            uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0,
                                                     uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace folio::inline v0::ptx
