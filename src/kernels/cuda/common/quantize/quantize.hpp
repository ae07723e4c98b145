#pragma once

#include <cstddef>
#include <cstdint>

#include "folio/types/device.hpp"
#include "folio/types/kv_cache.hpp"
#include "folio/types/nvfp4.hpp"
#include "kernels/cuda/common/division.hpp"

/// Quantisation of tensors on a GPU, bit for bit that of kernels/cpu/generic/combine but for the sign and payload of
/// NaNs. All addresses are the device's. Every `enqueue` throws Error(kDeviceError) where the launch fails.
namespace folio::inline v0::kernels::cuda {

/// Rows of a tensor [tokens, heads, head_dim]; strides in elements.
struct TensorRows {
  std::byte* data = nullptr;
  DType dtype = DType::kUnset;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};

struct QuantizeSizes {
  int64_t num_tokens = 0;
  int32_t num_heads = 0;
  int32_t head_dim = 0;
  PieceSplit split;  ///< set by enqueue
};

/// out = fp8(in / scale).
struct QuantizeFp8Params {
  TensorRows in;
  TensorRows out;
  QuantizeSizes sizes;
  Scale scale;  ///< per tensor
};
void enqueue(const QuantizeFp8Params& params, Stream stream);

/// Wide values to NVFP4 or, with `inverse`, float32 values from it.
struct Nvfp4Params {
  TensorRows wide;
  TensorRows codes;  ///< strides in bytes
  QuantizeSizes sizes;
  uint8_t* scales = nullptr;  ///< of the matrix
  int64_t first_row = 0;
  float global_scale = 1.0f;
  bool inverse = false;
};
void enqueue(const Nvfp4Params& params, Stream stream);

/// The scale of a tensor's largest magnitude: max |x| / constant; 1 for a tensor of zeros or none, NaN with a NaN.
struct MaxScaleTensor {
  const std::byte* data = nullptr;
  DType dtype = DType::kUnset;
  int32_t rank = 0;
  int64_t shape[5] = {};
  int64_t strides[5] = {};
  int64_t num_elements = 0;
  float constant = 1.0f;
};
struct MaxScaleParams {
  MaxScaleTensor tensors[3];
  float* out = nullptr;  ///< [3]
};
void enqueue(const MaxScaleParams& params, Stream stream);

}  // namespace folio::inline v0::kernels::cuda
