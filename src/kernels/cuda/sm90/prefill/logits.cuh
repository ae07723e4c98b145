#pragma once

#include "kernels/cuda/sm90/prefill/edge_values.cuh"
#include "kernels/cuda/sm90/prefill/launch.hpp"
#include "ptx/minimum.cuh"

/// Scores of a tile's tokens against two of a lane's rows, as a product leaves them (see ptx/wgmma.cuh): their way to
/// logits in base-2 units. Arithmetic is written out, so that every tile of every kernel goes the same way.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

/// -infinity, or `hidden`, where a row does not see the token. `first`: the lane's first token.
template <int32_t Count>
__device__ __forceinline__ void mask_scores(const RowInfo& rows, int32_t first_row, int32_t first, float hidden,
                                            float (&s)[Count]) {
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    const int32_t begin = rows.visible_begin[first_row + 8 * h] - first;
    const int32_t end = rows.visible_end[first_row + 8 * h] - first;
#pragma unroll
    for (int32_t i = 0; i < Count / 2; ++i) {
      const int32_t column = i / 2 * 8 + i % 2;
      if (column < begin || column >= end) s[i / 2 * 4 + 2 * h + i % 2] = hidden;
    }
  }
}

/// The same by bits of the tokens that rows see.
template <int32_t Words, int32_t Count>
__device__ __forceinline__ void mask_by_bits(const uint32_t (&sights)[2][Words], int32_t lane, float (&s)[Count]) {
  static_assert(Words * 16 == Count);
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
#pragma unroll
    for (int32_t w = 0; w < Words; ++w) {
      const uint32_t mine = sights[h][w] >> 2 * (lane % 4);
#pragma unroll
      for (int32_t i = 0; i < 8; ++i) {
        if ((mine >> (i / 2 * 8 + i % 2) & 1) == 0) s[16 * w + i / 2 * 4 + 2 * h + i % 2] = -INFINITY;
      }
    }
  }
}

/// A soft cap of logits in base-2 units, c * tanh(x / c) = c - 2 c r with r = 1 / (2^(a x) + 1): r takes the place of a
/// score until weights are made, since nothing else of it is needed. Less is more: a hidden score's r is infinite.
struct Cap {
  float cap;
  float slope;  ///< a
  __device__ __forceinline__ explicit Cap(float soft_cap) : cap(soft_cap * kLog2E), slope(2.0f / soft_cap) {}
  __device__ __forceinline__ float logit(float r) const { return __fmaf_rn(r, -2.0f * cap, cap); }
};

/// 2^x + 1 by multiplications, as exact as the approximate exponential. x: from -125 to 125, or NaN.
__device__ __forceinline__ float exp2_and_one(float x) {
  constexpr float kWhole = 0x1.8p23f;  // added to a number, leaves its whole part in the lowest bits
  const float shifted = __fadd_rn(x, kWhole);
  const float part = __fadd_rn(x, -__fadd_rn(shifted, -kWhole));  // -0.5 to 0.5
  float power = 0.0013276472f;  // the polynomial of degree 5 with the least relative error, 8e-8
  power = __fmaf_rn(power, part, 0.0096755413f);
  power = __fmaf_rn(power, part, 0.055507133f);
  power = __fmaf_rn(power, part, 0.2402212f);
  power = __fmaf_rn(power, part, 0.69314697f);
  power = __fmaf_rn(power, part, 1.0f);
  return __fmaf_rn(power, __uint_as_float((__float_as_uint(shifted) << 23) + 0x3f800000u), 1.0f);
}

/// 1 / (2^x + 1) of scores of one row, four of which share a reciprocal: exponentials and reciprocals take the time
/// that there is. Where x is 30 or more, r is 0 to every logit; four sums' product is a float32 number then.
template <int32_t Count>
__device__ __forceinline__ void cap_scores(const Cap& cap, const float (&scale)[2], float (&s)[Count]) {
  const float by[2] = {__fmul_rn(scale[0], cap.slope), __fmul_rn(scale[1], cap.slope)};
  static_assert(Count % 8 == 0);
#pragma unroll
  for (int32_t n = 0; n < Count / 4; ++n) {
    const int32_t i = n / 2 * 8 + n % 2 * 2;
    float* const four[4] = {&s[i], &s[i + 1], &s[i + 4], &s[i + 5]};
    float sums[4];
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) {
      const float x = ptx::least(__fmul_rn(*four[j], by[n % 2]), 30.0f);
#ifdef FOLIO_EMU
      if (j < FOLIO_EMU) {
        sums[j] = exp2_and_one(ptx::most(x, -100.0f));
        continue;
      }
#endif
      sums[j] = __fadd_rn(ptx::exp2_approximate(x), 1.0f);
    }
    const float two[2] = {__fmul_rn(sums[0], sums[1]), __fmul_rn(sums[2], sums[3])};
    const float all = ptx::reciprocal_approximate(__fmul_rn(two[0], two[1]));
#pragma unroll
    for (int32_t j = 0; j < 4; j += 2) {
      const float both = __fmul_rn(all, two[1 - j / 2]);
      *four[j] = __fmul_rn(both, sums[j + 1]);
      *four[j + 1] = __fmul_rn(both, sums[j]);
    }
  }
}

/// ALiBi of keys whose positions follow each other, in the units of scores: `apart` is how far a row is behind the
/// lane's first token, `slope` in these units.
template <int32_t Count>
__device__ __forceinline__ void add_bias(const float (&slope)[2], const int32_t (&apart)[2], float (&s)[Count]) {
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    const float first = static_cast<float>(apart[h]);
#pragma unroll
    for (int32_t i = 0; i < Count / 2; ++i) {
      float& x = s[i / 2 * 4 + 2 * h + i % 2];
      const float distance = fabsf(__fadd_rn(first, -static_cast<float>(i / 2 * 8 + i % 2)));
      x = __fmaf_rn(-slope[h], distance, x);
    }
  }
}

/// Scaled, with ALiBi of keys wherever they stand: those of shards do not follow each other.
template <int32_t Count>
__device__ __forceinline__ void add_bias_of_shard(const ItemContext& context, const RowInfo& rows, int32_t first_row,
                                                  int32_t first, const float (&scale)[2], const float (&slope)[2],
                                                  float (&s)[Count]) {
#pragma unroll
  for (int32_t i = 0; i < Count; ++i) {
    const auto token = static_cast<uint32_t>(first + i / 4 * 8 + i % 2);
    const int64_t key = context.first_pos + position_offset(context.shard, token);
    const int64_t apart = rows.position[first_row + i / 2 % 2 * 8] - key;
    s[i] =
        __fmaf_rn(s[i], scale[i / 2 % 2], -__fmul_rn(slope[i / 2 % 2], static_cast<float>(apart < 0 ? -apart : apart)));
  }
}

/// Scale, cap and ALiBi, as there are.
template <int32_t Count>
__device__ __forceinline__ void to_any_logits(const AttentionParams& params, const Cap& cap, const ItemContext& context,
                                              const RowInfo& rows, int32_t first_row, int32_t first,
                                              const float (&scale)[2], const float (&slope)[2], float (&s)[Count]) {
  float left[2] = {scale[0], scale[1]};
  if (params.soft_cap != 0.0f) {
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) {
      const float e = ptx::exp2_approximate(__fmul_rn(s[i], __fmul_rn(scale[i / 2 % 2], cap.slope)));
      s[i] = cap.logit(ptx::reciprocal_approximate(__fadd_rn(e, 1.0f)));
    }
    left[0] = left[1] = 1.0f;
  }
  if (params.alibi_slopes != nullptr) {
    add_bias_of_shard(context, rows, first_row, first, left, slope, s);
  } else {
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) s[i] = __fmul_rn(s[i], left[i / 2 % 2]);
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
