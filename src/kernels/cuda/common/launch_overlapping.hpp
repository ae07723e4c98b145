#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "folio/types/device.hpp"

namespace folio::inline v0::kernels::cuda {

/// Enqueues a kernel. `overlaps`: it may begin under the end of the kernel before it in the stream, for which it waits
/// by itself (ptx/control.cuh); of use, and allowed, from compute capability 9.0 on.
template <typename Params>
cudaError_t launch_overlapping(void (*kernel)(Params), const dim3& grid, int32_t threads, int32_t shared_bytes,
                               Stream stream, bool overlaps, const Params& params) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream.handle);
  config.attrs = &attribute;
  config.numAttrs = overlaps ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace folio::inline v0::kernels::cuda
