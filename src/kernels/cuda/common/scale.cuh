#pragma once

#include "folio/types/kv_cache.hpp"

namespace folio::inline v0::kernels::cuda {

/// The factor of a request and a head.
template <typename Index>
__device__ inline float scale_at(const Scale& scale, Index request, Index head) {
  if (scale.data == nullptr) return scale.value;
  switch (scale.granularity) {
    case ScaleGranularity::kPerHead: return scale.data[head];
    case ScaleGranularity::kPerRequest: return scale.data[request];
    case ScaleGranularity::kPerRequestAndHead: return scale.data[request * scale.request_stride + head];
    case ScaleGranularity::kPerTensor: break;
  }
  return scale.data[0];
}

}  // namespace folio::inline v0::kernels::cuda
