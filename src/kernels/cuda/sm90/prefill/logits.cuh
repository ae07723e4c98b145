#pragma once

#include "kernels/cuda/sm90/prefill/edge_values.cuh"
#include "kernels/cuda/sm90/prefill/launch.hpp"
#include "ptx/math.cuh"

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

/// The same where no row begins behind the lane's first token.
template <int32_t Count>
__device__ __forceinline__ void mask_ends(const RowInfo& rows, int32_t first_row, int32_t first, float (&s)[Count]) {
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    const int32_t end = rows.visible_end[first_row + 8 * h] - first;
#pragma unroll
    for (int32_t i = 0; i < Count / 2; ++i) {
      if (i / 2 * 8 + i % 2 >= end) s[i / 2 * 4 + 2 * h + i % 2] = -INFINITY;
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

/// A soft cap of logits in base-2 units, c * tanh(x / c) = c - 2 c r with r = 1 / (2^(a x) + 1): r, in units of
/// 2^-kMost, takes the place of a score until weights are made, since nothing else of it is needed. Less is more: a
/// hidden score's r is infinite.
struct Cap {
  static constexpr float kMost = 30.0f;
  static constexpr float kUnit = 0x1p-30f;
  float cap;
  float slope;  ///< a
  __device__ __forceinline__ explicit Cap(float soft_cap) : cap(soft_cap * kLog2E), slope(2.0f / soft_cap) {}
  /// A logit and `add`.
  __device__ __forceinline__ float logit_and(float add, float r) const {
    return __fmaf_rn(r, -2.0f * kUnit * cap, __fadd_rn(cap, add));
  }
  /// (2^(a x) + 1) * kUnit, or 1 where it is more: r is nothing to a logit there. Saturation makes 0 of NaN. `zero` is
  /// waited for.
  template <bool Saturate>
  __device__ __forceinline__ float part(float score, float by, float zero = 0.0f) const {
    const float x = __fmaf_rn(score, by, zero);
    if constexpr (Saturate) {
      return ptx::fma_sat(ptx::ex2_approx(x), kUnit, kUnit);
    } else {
      return __fmaf_rn(ptx::ex2_approx(ptx::min_nan(x, kMost)), kUnit, kUnit);
    }
  }
};

/// Scores become r. Four of a row share a reciprocal: exponentials and reciprocals take the time that there is. Where
/// saturation hides a NaN, r of its neighbour is NaN: so where tokens may be hidden (`Masked`), exponents
/// are limited instead of parts, which comes to the same bits.
template <bool Masked, int32_t Count>
__device__ __forceinline__ void cap_scores(const Cap& cap, const float (&scale)[2], float (&s)[Count]) {
  static_assert(Count % 8 == 0);
  const float by[2] = {__fmul_rn(scale[0], cap.slope), __fmul_rn(scale[1], cap.slope)};
#pragma unroll
  for (int32_t n = 0; n < Count / 4; ++n) {
    const int32_t i = n / 2 * 8 + n % 2 * 2;
    float parts[4];
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) parts[j] = cap.part<!Masked>(s[i + j / 2 * 4 + j % 2], by[n % 2]);
    const float low = __fmul_rn(parts[0], parts[1]);
    const float high = __fmul_rn(parts[2], parts[3]);
    const float all = ptx::rcp_approx(__fmul_rn(low, high));
    const float of_low = __fmul_rn(all, high);
    const float of_high = __fmul_rn(all, low);
    s[i] = __fmul_rn(of_low, parts[1]);
    s[i + 1] = __fmul_rn(of_low, parts[0]);
    s[i + 4] = __fmul_rn(of_high, parts[3]);
    s[i + 5] = __fmul_rn(of_high, parts[2]);
  }
}

/// ALiBi of keys whose positions follow each other, in two parts. `apart` is how far a row is behind the lane's first
/// token. Up to the lane's last token, or from the row on where it stands before that, the distance is one number of
/// the row: `bias`, in the units of logits. The rest of it is taken from scores, by `slope` in their units; where all
/// of the lane's tokens stand at or before the row, as they do where no tile is masked, by a constant of the token.
/// Both parts are at most the distance, so that neither rounds more than it. Which way a score goes depends on its row
/// and its token alone, and both ways come to the same bits.
template <bool Masked, int32_t Count>
__device__ __forceinline__ void add_bias(const float (&slope)[2], const float (&logit_slope)[2],
                                         const int32_t (&apart)[2], float (&s)[Count], float (&bias)[2]) {
  constexpr int32_t kLast = Count / 4 * 8 - 7;
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    const int32_t end = Masked ? min(apart[h], kLast) : kLast;
    bias[h] = -__fmul_rn(logit_slope[h], static_cast<float>(apart[h] - end));
    const float from = static_cast<float>(end);
#pragma unroll
    for (int32_t i = 0; i < Count / 2; ++i) {
      float& x = s[i / 2 * 4 + 2 * h + i % 2];
      const int32_t column = i / 2 * 8 + i % 2;
      const float distance =
          Masked ? fabsf(__fadd_rn(from, -static_cast<float>(column))) : static_cast<float>(kLast - column);
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
      const float e = ptx::ex2_approx(__fmul_rn(s[i], __fmul_rn(scale[i / 2 % 2], cap.slope)));
      s[i] = __fmaf_rn(ptx::rcp_approx(__fadd_rn(e, 1.0f)), -2.0f * cap.cap, cap.cap);
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
