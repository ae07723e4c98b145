#pragma once

#include <cuda_runtime.h>

#include "core/error.hpp"
#include "kernels/cuda/common/allow_shared_memory.hpp"
#include "kernels/cuda/sm90/mla/launch.hpp"
#include "kernels/cuda/sm90/mla/thread_block.cuh"
#include "ptx/control.cuh"

/// The kernel and its launch.
namespace folio::inline v0::kernels::cuda::sm90::mla {

template <typename T, bool General>
__global__ void __launch_bounds__(kThreads, 1) mla_kernel(const __grid_constant__ MlaParams params) {
  extern __shared__ __align__(16) unsigned char raw[];
  ptx::griddep_launch_dependents();
  run_thread_block<T, General>(params, raw + (1024 - ptx::shared_address(raw) % 1024) % 1024);
}

/// Enqueues a kernel. See allow_shared_memory.
template <auto Kernel>
void launch_kernel(const MlaParams& params, int32_t num_workers, Stream stream) {
  cudaError_t status = allow_shared_memory<Kernel>(kSharedBytes, false);
  if (status == cudaSuccess) {
    Kernel<<<num_workers, kThreads, kSharedBytes, static_cast<cudaStream_t>(stream.handle)>>>(params);
    status = cudaGetLastError();
  }
  if (status != cudaSuccess) {
    core::fail(ErrorCode::kDeviceError, "launching cuda-sm90-mla: ", cudaGetErrorString(status));
  }
}

/// Enqueues the kernel of one element type.
template <typename T>
void launch_class(const AttentionParams& attention, bool general, int32_t num_workers, Stream stream) {
  MlaParams params{};
  params.attention = attention;
  describe(params);
  if (general) {
    launch_kernel<mla_kernel<T, true>>(params, num_workers, stream);
  } else {
    launch_kernel<mla_kernel<T, false>>(params, num_workers, stream);
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
