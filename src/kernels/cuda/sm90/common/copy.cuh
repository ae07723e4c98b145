#pragma once

#include "kernels/cuda/attention_kernel.hpp"
#include "kernels/cuda/sm90/common/config.hpp"
#include "kernels/cuda/sm90/common/fp8.cuh"
#include "ptx/memory.cuh"
#include "scheduler/mask_bounds.hpp"

/// Copies to shared memory by threads, for data that no tensor map describes or that must be upcast on the way.
namespace folio::inline v0::kernels::cuda::sm90 {

/// Copies kElementsPer16B elements as `T`, one by one, from any dtype and address; zeros where not valid. Slow: not for
/// inner loops.
template <typename T>
__device__ __forceinline__ void copy_upcast_16B(uint32_t smem, const void* data, DType dtype, int64_t at, bool valid) {
  uint32_t pairs[kElementsPer16B / 2] = {};
  if (valid && is_fp8(dtype)) {
    const auto* const from = static_cast<const uint8_t*>(data) + at;
    const __nv_fp8_interpretation_t kind = dtype == DType::kFloat8E5M2 ? __NV_E5M2 : __NV_E4M3;
#pragma unroll
    for (int32_t i = 0; i < kElementsPer16B; i += 2) {
      pairs[i / 2] = upcast_fp8x2<T>(from[i] | uint32_t{from[i + 1]} << 8, kind);
    }
  } else if (valid) {
    const auto* const from = static_cast<const uint16_t*>(data) + at;
#pragma unroll
    for (int32_t i = 0; i < kElementsPer16B; ++i) pairs[i / 2] |= uint32_t{from[i]} << (i % 2 * 16);
  }
  ptx::st_shared_16(smem, uint4{pairs[0], pairs[1], pairs[2], pairs[3]});
}

/// Copies sixteen fp8 values as they are, from any address; zeros where not valid.
__device__ __forceinline__ void copy_fp8_16B(uint32_t smem, const uint8_t* from, bool valid) {
  uint32_t words[4] = {};
#pragma unroll
  for (int32_t i = 0; valid && i < 16; ++i) words[i / 4] |= uint32_t{from[i]} << (i % 4 * 8);
  ptx::st_shared_16(smem, uint4{words[0], words[1], words[2], words[3]});
}

}  // namespace folio::inline v0::kernels::cuda::sm90
