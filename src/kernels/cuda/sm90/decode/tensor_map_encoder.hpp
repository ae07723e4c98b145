#pragma once

#include "kernels/cuda/sm90/decode/params.hpp"

namespace folio::inline v0::kernels::cuda::sm90 {

using TensorMapEncoder = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                      const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                      CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/// The driver's cuTensorMapEncodeTiled; null in a driver that has none.
TensorMapEncoder tensor_map_encoder();

}  // namespace folio::inline v0::kernels::cuda::sm90
