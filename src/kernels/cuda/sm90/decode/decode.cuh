#pragma once

#include <cuda_runtime.h>

#include "core/error.hpp"
#include "kernels/cuda/common/allow_shared_memory.hpp"
#include "kernels/cuda/sm90/decode/launch.hpp"
#include "kernels/cuda/sm90/decode/thread_block.cuh"

/// The kernel and its launch.
namespace folio::inline v0::kernels::cuda::sm90 {

template <int32_t DimQk, int32_t DimV>
constexpr int32_t kRegisterThreads = register_threads(HeadDims{DimQk, DimV});

template <typename T, int32_t DimQk, int32_t DimV, Codes kCodes>
__global__ void __launch_bounds__((kRegisterThreads<DimQk, DimV>), 1)
    decode_kernel(const __grid_constant__ DecodeParams params) {
  static_assert(shared_bytes<DimQk, DimV, kCodes>() <= kSharedLimit);
  extern __shared__ __align__(16) unsigned char raw[];
  run_thread_block<T, DimQk, DimV, kCodes>(params, raw + (1024 - ptx::shared_address(raw) % 1024) % 1024);
}

/// Enqueues the kernel of one element type and head dimensions.
template <typename T, int32_t DimQk, int32_t DimV, Codes kCodes = Codes::kNone>
void launch_class(const AttentionParams& attention, int32_t num_workers, Stream stream) {
  constexpr int32_t kBytes = shared_bytes<DimQk, DimV, kCodes>();
  auto* const kernel = decode_kernel<T, DimQk, DimV, kCodes>;
  cudaError_t status = allow_shared_memory<decode_kernel<T, DimQk, DimV, kCodes>>(kBytes, true);
  if (status == cudaSuccess) {
    DecodeParams params{};
    params.attention = attention;
    describe_segments(params, {DimQk, DimV, element_bytes(kCodes)});
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(num_workers));
    config.blockDim = dim3(static_cast<unsigned>(threads({DimQk, DimV})));
    config.dynamicSmemBytes = kBytes;
    config.stream = static_cast<cudaStream_t>(stream.handle);
    config.attrs = &attribute;
    config.numAttrs = 1;
    status = cudaLaunchKernelEx(&config, kernel, params);
  }
  if (status != cudaSuccess) {
    core::fail(ErrorCode::kDeviceError, "launching cuda-sm90-decode: ", cudaGetErrorString(status));
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90
