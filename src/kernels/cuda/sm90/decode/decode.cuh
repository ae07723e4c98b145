#pragma once

#include <cuda_runtime.h>

#include "core/error.hpp"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/sm90/decode/launch.hpp"
#include "kernels/cuda/sm90/decode/thread_block.cuh"

/// The kernel and its launch.
namespace folio::inline v0::kernels::cuda::sm90::decode {

template <int32_t DimQk, int32_t DimV, int32_t kRows>
constexpr int32_t kRegisterThreads = register_threads(HeadDims{DimQk, DimV}, kRows);

template <typename T, int32_t DimQk, int32_t DimV, Fp8 kFp8, int32_t kRows>
__global__ void __launch_bounds__((kRegisterThreads<DimQk, DimV, kRows>), 1)
    decode_kernel(const __grid_constant__ DecodeParams params) {
  static_assert(shared_bytes<DimQk, DimV, kFp8>() <= kSharedLimit);
  extern __shared__ __align__(16) unsigned char raw[];
  run_thread_block<T, DimQk, DimV, kFp8, kRows>(params, raw + (1024 - ptx::shared_address(raw) % 1024) % 1024);
}

/// Begins under the end of the kernel before, for which it waits before it reads anything.
template <typename T, int32_t DimQk, int32_t DimV, Fp8 kFp8, int32_t kRows>
cudaError_t launch_kernel(const DecodeParams& params, int32_t num_workers, Stream stream) {
  constexpr int32_t kBytes = shared_bytes<DimQk, DimV, kFp8>();
  constexpr auto* kKernel = decode_kernel<T, DimQk, DimV, kFp8, kRows>;
  const cudaError_t status = allow_shared_memory<kKernel>(kBytes, true);
  if (status != cudaSuccess) return status;
  return launch_overlapping(kKernel, dim3(static_cast<unsigned>(num_workers)), threads({DimQk, DimV}), kBytes, stream,
                            true, params);
}

/// Enqueues the kernel of one element type and head dimensions, for as many rows as the plan's items may have.
template <typename T, int32_t DimQk, int32_t DimV, Fp8 kFp8 = Fp8::kNone>
void launch_class(const AttentionParams& attention, const LaunchShape& shape, Stream stream) {
  DecodeParams params{};
  params.attention = attention;
  describe_segments(params, {DimQk, DimV, element_bytes(kFp8)});
  const auto launch = shape.max_rows <= kFewRows ? launch_kernel<T, DimQk, DimV, kFp8, kFewRows>
                                                 : launch_kernel<T, DimQk, DimV, kFp8, kMaxRows>;
  const cudaError_t status = launch(params, shape.num_workers, stream);
  if (status != cudaSuccess) {
    core::fail(ErrorCode::kDeviceError, "launching cuda-sm90-decode: ", cudaGetErrorString(status));
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
