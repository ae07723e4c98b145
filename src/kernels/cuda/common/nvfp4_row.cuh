#pragma once

#include "folio/types/nvfp4.hpp"
#include "kernels/cuda/attention_kernel.hpp"
#include "kernels/cuda/common/e2m1.cuh"

namespace folio::inline v0::kernels::cuda {

/// Components [d, d + kMine) of a finished row, as NVFP4. A block of 16 components is 16 / kMine neighbouring lanes',
/// the first a multiple of that number; all of them call, and of no other block's lanes anything is asked. Not
/// inlined, as the callers have no registers to spare.
template <int32_t kMine>
__device__ __noinline__ void store_nvfp4(const AttentionParams& params, int32_t token, int32_t q_head, int32_t d,
                                         const float (&values)[kMine]) {
  constexpr int32_t kLanes = kNvfp4BlockSize / kMine;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const uint32_t mask = ((1u << kLanes) - 1u) << (lane / kLanes * kLanes);
  uint32_t largest = 0;  // of magnitudes' bits: a NaN's stand above all
#pragma unroll
  for (int32_t i = 0; i < kMine; ++i) largest = max(largest, __float_as_uint(values[i]) & 0x7fffffffu);
#pragma unroll
  for (int32_t step = 1; step < kLanes; step *= 2) largest = max(largest, __shfl_xor_sync(mask, largest, step));
  const float global_scale = scale_at(params.out_scale, 0, 0);
  const uint8_t stored = e2m1_scale(__uint_as_float(largest), global_scale);
  const int64_t per_head = params.head_dim_v / kNvfp4BlockSize;
  if (lane % kLanes == 0) {
    params.out_block_scales[nvfp4_scale_index(params.out_first_row + token, q_head * per_head + d / kNvfp4BlockSize,
                                              params.num_q_heads * per_head)] = stored;
  }
  const float scale = fp8_e4m3_to_float(stored);
  uint32_t codes = 0;
  if (isnan(scale)) {
    codes = 0x77777777u;
  } else if (scale != 0.0f) {
    const E2m1Limits limits(scale);
#pragma unroll
    for (int32_t i = 0; i < kMine; ++i) codes |= limits.code(values[i] * global_scale) << 4 * i;
  }
  auto* const to =
      static_cast<uint8_t*>(params.out) + token * params.out_token_stride + q_head * params.out_head_stride + d / 2;
  if constexpr (kMine == 1) {
    const uint32_t other = __shfl_xor_sync(mask, codes, 1);
    if (d % 2 == 0) to[0] = static_cast<uint8_t>((codes & 0xfu) | (other & 0xfu) << 4);
  } else {
#pragma unroll
    for (int32_t i = 0; i < kMine / 2; ++i) to[i] = static_cast<uint8_t>(codes >> 8 * i);
  }
}

}  // namespace folio::inline v0::kernels::cuda
