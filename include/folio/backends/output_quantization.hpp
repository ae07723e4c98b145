#pragma once

#include "folio/types/tensor_view.hpp"

namespace folio::inline v0::backends {

/// Quantisation of the output inside the attention kernel.
struct OutputQuantization {
  const float* scale = nullptr;  ///< stored = real / scale
  TensorView block_scale;        ///< NVFP4's scale factors
  bool wanted() const { return scale != nullptr || block_scale.data != nullptr; }
};

}  // namespace folio::inline v0::backends
