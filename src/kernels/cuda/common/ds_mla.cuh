#pragma once

#include <cfloat>
#include <cmath>

#include "folio/types/ds_mla.hpp"
#include "kernels/cuda/common/numeric_conversion.cuh"

/// Rows of KvFormat::kFp8DsMla (folio/types/ds_mla.hpp) to floats and back.
namespace folio::inline v0::kernels::cuda {

/// Component `d` of a row.
__device__ inline float load_ds_mla(const std::byte* row, int32_t d) {
  float value;
  if (d >= kDsMlaLatentDim) {
    load_floats<1>(row + kDsMlaRopeOffset + 2 * (d - kDsMlaLatentDim), DType::kBFloat16, &value);
    return value;
  }
  load_floats<1>(row + d, DType::kFloat8E4M3, &value);
  return value * reinterpret_cast<const float*>(row + kDsMlaScalesOffset)[d / kDsMlaBlockDim];
}

/// By a warp: a row of 576 elements of `dtype`, times `factor`, becomes such a row. A block's scale is its largest
/// finite magnitude / 448, at least the smallest normal float; values are saturated.
__device__ inline void encode_ds_mla(const std::byte* from, DType dtype, float factor, std::byte* row) {
  constexpr int32_t kMine = kDsMlaBlockDim / 32;
  constexpr float kLargestE4M3 = 448.0f;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
#pragma unroll 1
  for (int32_t block = 0; block < kDsMlaBlocks; ++block) {
    const int32_t d = block * kDsMlaBlockDim + lane;
    float values[kMine];
    float most = 0.0f;
#pragma unroll
    for (int32_t i = 0; i < kMine; ++i) {
      load_floats<1>(from + (d + 32 * i) * size_of(dtype), dtype, &values[i]);
      values[i] *= factor;
      if (isfinite(values[i])) most = fmaxf(most, fabsf(values[i]));
    }
#pragma unroll
    for (int32_t lanes = 16; lanes > 0; lanes /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, lanes));
    const float scale = fmaxf(__fdiv_rn(most, kLargestE4M3), FLT_MIN);
#pragma unroll
    for (int32_t i = 0; i < kMine; ++i) {
      store_one(row + d + 32 * i, DType::kFloat8E4M3, __fdiv_rn(values[i], scale));
    }
    if (lane == 0) reinterpret_cast<float*>(row + kDsMlaScalesOffset)[block] = scale;
  }
  for (int32_t d = lane; d < kDsMlaRopeDim; d += 32) {
    float value;
    load_floats<1>(from + (kDsMlaLatentDim + d) * size_of(dtype), dtype, &value);
    store_one(row + kDsMlaRopeOffset + 2 * d, DType::kBFloat16, value * factor);
  }
}

/// By a warp: the first `head_dim` components of such a row become elements of `dtype`, divided by `divisor`.
__device__ inline void decode_ds_mla(const std::byte* row, std::byte* to, DType dtype, int32_t head_dim,
                                     float divisor) {
  for (int32_t d = static_cast<int32_t>(threadIdx.x % 32); d < head_dim; d += 32) {
    store_one(to + d * size_of(dtype), dtype, __fdiv_rn(load_ds_mla(row, d), divisor));
  }
}

}  // namespace folio::inline v0::kernels::cuda
