#pragma once

#include <cuda_runtime.h>

#include "core/error.hpp"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/sm90/decode/kernel.cuh"

/// The __global__ function and its launch, for the generated instantiations.
namespace folio::inline v0::kernels::cuda::sm90::decode {

template <int32_t DimQk, int32_t DimV, int32_t kRows>
constexpr int32_t kLaunchBound = launch_bound_threads(HeadDims{DimQk, DimV}, kRows);

template <typename T, int32_t DimQk, int32_t DimV, Fp8 kFp8, int32_t kRows>
__global__ void __launch_bounds__((kLaunchBound<DimQk, DimV, kRows>), 1)
    decode_kernel(const __grid_constant__ DecodeParams params) {
  static_assert(smem_bytes<DimQk, DimV, kFp8, kRows>() <= kMaxSmemBytes);
  extern __shared__ __align__(16) unsigned char raw[];
  run_cta<T, DimQk, DimV, kFp8, kRows>(params, raw + (1024 - ptx::shared_address(raw) % 1024) % 1024);
}

/// Launches with programmatic dependent launch: the kernel starts under the end of the one before.
template <typename T, int32_t DimQk, int32_t DimV, Fp8 kFp8, int32_t kRows>
cudaError_t launch_kernel(const DecodeParams& params, int32_t num_workers, Stream stream) {
  constexpr int32_t kBytes = smem_bytes<DimQk, DimV, kFp8, kRows>();
  constexpr auto* kKernel = decode_kernel<T, DimQk, DimV, kFp8, kRows>;
  const cudaError_t status = allow_shared_memory<kKernel>(kBytes, true);
  if (status != cudaSuccess) return status;
  return launch_overlapping(kKernel, dim3(static_cast<unsigned>(num_workers)), cta_threads({DimQk, DimV}), kBytes,
                            stream, true, params);
}

template <DType kType, int32_t kDimQk, int32_t kDimV>
void launch_instantiation(const AttentionParams& attention, const LaunchShape& shape, Stream stream) {
  using T = typename ElementOf<kType>::Type;
  constexpr Fp8 kFp8 = ElementOf<kType>::kFp8;
  DecodeParams params{};
  params.attention = attention;
  set_copies(params, {kDimQk, kDimV, element_bytes(kFp8)});
  const auto launch = shape.max_rows <= kTileRows ? launch_kernel<T, kDimQk, kDimV, kFp8, kTileRows>
                                                  : launch_kernel<T, kDimQk, kDimV, kFp8, kMaxRows>;
  const cudaError_t status = launch(params, shape.num_workers, stream);
  if (status != cudaSuccess) {
    core::fail(ErrorCode::kDeviceError, "launching cuda-sm90-decode: ", cudaGetErrorString(status));
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
