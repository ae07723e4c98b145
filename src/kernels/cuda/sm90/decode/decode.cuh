#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "core/error.hpp"
#include "kernels/cuda/sm90/decode/launch.hpp"
#include "kernels/cuda/sm90/decode/thread_block.cuh"
#include "ptx/grid_dependency.cuh"

/// The kernel and its launch.
namespace folio::inline v0::kernels::cuda::sm90 {

template <int32_t DimQk, int32_t DimV>
constexpr int32_t kThreads = threads(HeadDims{DimQk, DimV});

template <typename T, int32_t DimQk, int32_t DimV, Codes kCodes>
__global__ void __launch_bounds__((kThreads<DimQk, DimV>), 1)
    decode_kernel(const __grid_constant__ DecodeParams params) {
  static_assert(shared_bytes<DimQk, DimV, kCodes>() <= kSharedLimit);
  extern __shared__ __align__(16) unsigned char raw[];
  ptx::let_next_kernel_begin();
  run_thread_block<T, DimQk, DimV, kCodes>(params, raw + (1024 - ptx::shared_address(raw) % 1024) % 1024);
}

/// Enqueues the kernel of one element type and head dimensions.
template <typename T, int32_t DimQk, int32_t DimV, Codes kCodes = Codes::kNone>
void launch_class(const AttentionParams& attention, int32_t num_workers, Stream stream) {
  constexpr int32_t kBytes = shared_bytes<DimQk, DimV, kCodes>();
  auto* const kernel = decode_kernel<T, DimQk, DimV, kCodes>;
  static std::atomic<uint64_t> allowed{0};  // a bit for each of the first 64 devices
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (status == cudaSuccess && (allowed.load(std::memory_order_relaxed) & bit) == 0) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (status == cudaSuccess) allowed.fetch_or(bit, std::memory_order_relaxed);
  }
  if (status == cudaSuccess) {
    DecodeParams params{};
    params.attention = attention;
    describe_segments(params, {DimQk, DimV, element_bytes(kCodes)});
    kernel<<<num_workers, kThreads<DimQk, DimV>, kBytes, static_cast<cudaStream_t>(stream.handle)>>>(params);
    status = cudaGetLastError();
  }
  if (status != cudaSuccess) {
    core::fail(ErrorCode::kDeviceError, "launching cuda-sm90-decode: ", cudaGetErrorString(status));
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90
