#pragma once

#include <cuda_runtime.h>

#include <functional>
#include <type_traits>
#include <utility>

#include "warp_emulator.hpp"

/// Launches of kernels that are compiled for the host. Kernels' `kernel<<<grid, threads, bytes, stream>>>(arguments)`
/// are rewritten to `emulation::launch(kernel, grid, threads, bytes, stream)(arguments)`.
namespace folio::emulation {

/// Enqueues a grid; `body` is a thread. An error where `kernel` may not use that much shared memory.
cudaError_t enqueue_grid(const void* kernel, const dim3& grid, uint32_t threads, size_t shared_bytes,
                         cudaStream_t stream, std::function<void()> body);

template <typename... Params>
auto launch(void (*kernel)(Params...), const dim3& grid, const dim3& threads, size_t shared_bytes = 0,
            cudaStream_t stream = nullptr) {
  return [=](const std::remove_cv_t<Params>&... params) {
    return enqueue_grid(reinterpret_cast<const void*>(kernel), grid, threads.x, shared_bytes, stream,
                        [=] { kernel(params...); });
  };
}

template <typename... Params>
cudaError_t launch_config(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                          const std::remove_cv_t<Params>&... params) {
  return launch(kernel, config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream)(params...);
}

}  // namespace folio::emulation

#define cudaLaunchKernelEx ::folio::emulation::launch_config
#undef __shared__
#define __shared__ static
template <typename... Params>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Params...), cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}
// Empty, since the standard library writes __attribute__((__noinline__)).
#undef __noinline__
#define __noinline__
#undef __launch_bounds__
#define __launch_bounds__(...)
