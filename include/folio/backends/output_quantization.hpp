#pragma once

#include "folio/types/tensor_view.hpp"

namespace folio::inline v0::backends {

/// Quantisation of the output inside the attention kernel.
struct OutputQuantization {
  const float* scale = nullptr;  ///< fp8: stored = real / scale. NVFP4: the global scale factor, which multiplies
  TensorView block_scale;        ///< NVFP4's factors, one e4m3 for every 16 values, as FP4Tensor::scale
  bool wanted() const { return scale != nullptr || block_scale.data != nullptr; }
};

}  // namespace folio::inline v0::backends
