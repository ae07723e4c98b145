#include "kernels/cuda/sm90/common/tensor_map.hpp"

#include <cuda_runtime_api.h>

namespace folio::inline v0::kernels::cuda::sm90 {

/// Found through the runtime, so that nothing links against the driver.
TensorMapEncoder tensor_map_encoder() {
  static const TensorMapEncoder found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
    const bool there = status == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return there ? reinterpret_cast<TensorMapEncoder>(function) : nullptr;
  }();
  return found;
}

}  // namespace folio::inline v0::kernels::cuda::sm90
