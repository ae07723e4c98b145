#pragma once

#include "folio/types/device.hpp"
#include "folio/types/tensor_view.hpp"

namespace folio::inline v0::backends {

/// Quantisation of the output inside the attention kernel.
struct OutputQuantization {
  const float* scale = nullptr;  ///< fp8: stored = real / scale. NVFP4: the global scale factor, which multiplies
  TensorView block_scale;        ///< NVFP4's factors, one e4m3 for every 16 values, as FP4Tensor::scale
  /// Where `scale` lies. kHost: it is read, and checked to be finite and positive, when the layer is called. kDevice,
  /// on a GPU: kernels read it, unchecked, when they run.
  Where scale_where = Where::kHost;
  bool wanted() const { return scale != nullptr || block_scale.data != nullptr; }
};

}  // namespace folio::inline v0::backends
