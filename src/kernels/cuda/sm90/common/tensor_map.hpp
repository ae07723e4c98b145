#pragma once

#include <cuda.h>

#include "kernels/cuda/attention_kernel.hpp"

/// Tensor maps of keys, values, queries and outputs for TMA.
namespace folio::inline v0::kernels::cuda::sm90 {

using TensorMapEncoder = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                      const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                      CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/// The driver's cuTensorMapEncodeTiled; null where the driver has none.
TensorMapEncoder tensor_map_encoder();

/// A 5D tensor and its box, innermost dimension first.
struct TensorMapShape {
  const void* data;
  int32_t element_bytes;  ///< 1 or 2: TMA only moves data, so any type of this size does
  int64_t dims[5];        ///< globalDim
  int64_t strides[4];     ///< globalStrides, in bytes
  int32_t box[5];         ///< boxDim
  int32_t swizzle_bytes;  ///< 128, 64, or 0: none
  CUtensorMapL2promotion l2_promotion;
};
/// False where the driver cannot encode it; the map must not be used then.
bool encode_tensor_map(CUtensorMap& map, const TensorMapShape& shape);

/// Whether every head of every token begins at a multiple of 16 bytes.
bool is_aligned_16B(const void* data, const KvStrides& strides, int32_t element_bytes);

}  // namespace folio::inline v0::kernels::cuda::sm90
