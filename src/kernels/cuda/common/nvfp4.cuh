#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "folio/types/nvfp4.hpp"
#include "kernels/cuda/attention_kernel.hpp"
#include "kernels/cuda/common/division.hpp"
#include "kernels/cuda/common/kv_cache_views.cuh"
#include "kernels/cuda/common/numeric_conversion.cuh"
#include "ptx/math.cuh"

/// NVFP4: values in blocks of 16 as codes of four bits (e2m1) with a scale factor (e4m3).
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

/// Codes of 16-bit values, two at a time: what E2m1Limits finds by arithmetic for each value, found by comparing the
/// values' bits with limits that depend on the scale factor alone. For every scale factor, the least magnitude of a
/// 16-bit type, as bits, that each code from 1 on is for, in both halves of a word: a value's product with the global
/// scale grows with the value, so that there is one. Row 0 and the row of NaN have none.
struct E2m1Table {
  static constexpr int32_t kRows = 128;
  uint4 limits[kRows][2];  ///< codes 0 (nothing) to 3, 4 to 7
};

template <bool kBfloat>
__device__ inline float magnitude_value(uint32_t bits) {
  return kBfloat ? __uint_as_float(bits << 16) : ptx::upcast_f16(static_cast<uint16_t>(bits));
}

/// The least magnitude whose product with the global scale, rounded, is at least `limit`.
template <bool kBfloat>
__device__ inline uint32_t least_magnitude(float limit, float global_scale) {
  constexpr uint32_t kInfinity = kBfloat ? 0x7f80u : 0x7c00u;
  const float wanted = __fdividef(limit, global_scale);
  uint32_t bits = kBfloat ? __float_as_uint(wanted) >> 16 : narrow::floats_to_halves(wanted, 0.0f) & 0xffffu;
  bits = min(bits, kInfinity);
  // The quotient is near; the products decide.
  while (bits > 0 && magnitude_value<kBfloat>(bits - 1) * global_scale >= limit) --bits;
  while (bits < kInfinity && !(magnitude_value<kBfloat>(bits) * global_scale >= limit)) ++bits;
  return bits;
}

/// Threads of a block, at least kRows, each call with their number. A barrier is to follow.
template <bool kBfloat>
__device__ inline void fill_row(E2m1Table& table, int32_t row, float global_scale) {
  if (row >= E2m1Table::kRows) return;
  uint32_t limits[8] = {};
  const float scale = fp8_e4m3_to_float(static_cast<uint8_t>(row));
  if (row != 0 && !isnan(scale)) {
    const E2m1Limits products(scale);
#pragma unroll
    for (int32_t code = 1; code < 8; ++code) {
      limits[code] = least_magnitude<kBfloat>(__uint_as_float(products.from[code]), global_scale) * 0x10001u;
    }
  }
  table.limits[row][0] = make_uint4(0, limits[1], limits[2], limits[3]);
  table.limits[row][1] = make_uint4(limits[4], limits[5], limits[6], limits[7]);
}

__device__ inline uint32_t select_bits(uint32_t mask, uint32_t set, uint32_t clear) {
  return (mask & set) | (~mask & clear);
}

/// All bits of each half in which a magnitude, of a value that is no NaN, reaches its limit.
template <bool kBfloat>
__device__ inline uint32_t reaches(uint32_t pair, uint32_t limits) {
#if __CUDA_ARCH__ >= 900
  return ptx::set_abs_ge<std::conditional_t<kBfloat, __nv_bfloat16, __half>>(pair, limits);
#else
  // With its sign set each half is above any limit, so that no difference borrows from the other half, and its sign
  // says whether the limit is reached.
  return ptx::signs_of_halves((pair | 0x80008000u) - limits);
#endif
}

/// The codes of two values in the upper four bits of both halves; the bits below are undefined. `low` and `high` are a
/// row of the table.
template <bool kBfloat>
__device__ inline uint32_t e2m1_pair(uint32_t pair, const uint4& low, const uint4& high) {
  const uint32_t four = reaches<kBfloat>(pair, high.x);
  const uint32_t two = reaches<kBfloat>(pair, select_bits(four, high.z, low.z));
  const uint32_t limit = select_bits(two, select_bits(four, high.w, low.w), select_bits(four, high.y, low.y));
  const uint32_t one = reaches<kBfloat>(pair, limit);
  return select_bits(0x80008000u, pair, select_bits(0x40004000u, four, select_bits(0x20002000u, two, one)));
}

/// Four words of two values each: their eight codes.
template <bool kBfloat>
__device__ inline uint32_t e2m1_codes(const uint4& pairs, const uint4& low, const uint4& high) {
  const uint32_t first =
      __byte_perm(e2m1_pair<kBfloat>(pairs.x, low, high), e2m1_pair<kBfloat>(pairs.y, low, high), 0x7531);
  const uint32_t second =
      __byte_perm(e2m1_pair<kBfloat>(pairs.z, low, high), e2m1_pair<kBfloat>(pairs.w, low, high), 0x7531);
  const uint32_t even = __byte_perm(first, second, 0x6420);
  const uint32_t odd = __byte_perm(first, second, 0x7531);
  return select_bits(0x0f0f0f0fu, even >> 4, odd);
}

/// The larger magnitude in each half. A NaN's bits stand above all.
__device__ inline uint32_t larger_magnitudes(uint32_t one, uint32_t other) {
  return __vmaxu2(one & 0x7fff7fffu, other & 0x7fff7fffu);
}
__device__ inline uint32_t largest_magnitudes(const uint4& pairs) {
  return larger_magnitudes(larger_magnitudes(pairs.x, pairs.y), larger_magnitudes(pairs.z, pairs.w));
}

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
