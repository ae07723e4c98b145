#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/common/divisor.hpp"
#include "kernels/cuda/common/elements.cuh"

/// Values in blocks of 16 as codes of four bits (e2m1) with a scale factor (e4m3): NVFP4.
namespace folio::inline v0::kernels::cuda {

constexpr float kLargestE2m1 = 6.0f;

/// The scale factor of a block whose largest magnitude, before the global scale, that is; NaN for NaN.
__device__ inline uint8_t e2m1_scale(float largest, float global_scale) {
  float wanted = global_scale * largest;
  Divisor(kLargestE2m1).divide<1>(&wanted);
  return static_cast<uint8_t>(narrow::floats_to_e4m3(wanted, 0.0f));
}

/// What magnitudes times a block's scale lie at or above for each code from 1 on, as bits, which are ordered as the
/// values are. Midpoints of codes times a scale of four bits are exact, so that comparing with them decides as dividing
/// and rounding does; a tie belongs to the even code, so that for odd codes the limit is the next number above.
struct E2m1Limits {
  uint32_t from[8];
  __device__ explicit E2m1Limits(float scale) {
    constexpr float kMidpoints[8] = {0.0f, 0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
#pragma unroll
    for (int32_t code = 1; code < 8; ++code) {
      from[code] = __float_as_uint(__fmul_rn(kMidpoints[code], scale)) + code % 2;
    }
  }
  /// The code of a value, no NaN, that is still to be divided by the scale.
  __device__ uint32_t code(float value) const {
    const uint32_t magnitude = __float_as_uint(value) & 0x7fffffffu;
    const bool four = magnitude >= from[4];
    const bool two = magnitude >= (four ? from[6] : from[2]);
    const uint32_t low = two ? from[3] : from[1];
    const uint32_t high = two ? from[7] : from[5];
    const bool one = magnitude >= (four ? high : low);
    return (four ? 4u : 0u) + (two ? 2u : 0u) + (one ? 1u : 0u) + (__float_as_uint(value) >> 28 & 8u);
  }
};

}  // namespace folio::inline v0::kernels::cuda
