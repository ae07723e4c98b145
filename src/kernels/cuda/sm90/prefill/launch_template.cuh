#pragma once

#include <cuda_runtime.h>

#include "core/error.hpp"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/sm90/prefill/kernel.cuh"
#include "ptx/control.cuh"

/// The kernel and its launch, for the generated instantiations.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

template <typename T, int32_t DimQk, int32_t DimV, Variant kVariant, Fp8 kFp8, bool kFp8Mma>
__global__ void __launch_bounds__(kThreads, 1) prefill_kernel(const __grid_constant__ PrefillParams params) {
  static_assert(smem_bytes<DimQk, DimV, dequantizes(kFp8, kFp8Mma)>() <= kMaxSmemBytes);
  extern __shared__ __align__(16) unsigned char raw[];
  ptx::griddep_launch_dependents();
  run_cta<T, DimQk, DimV, kVariant, kFp8, kFp8Mma>(params, raw + (1024 - ptx::shared_address(raw) % 1024) % 1024);
}

/// Enqueues a kernel. See allow_shared_memory.
template <auto Kernel>
void launch_kernel(const PrefillParams& params, int32_t num_workers, int32_t bytes, Stream stream) {
  cudaError_t status = allow_shared_memory<Kernel>(bytes, false);
  if (status == cudaSuccess) {
    Kernel<<<num_workers, kThreads, bytes, static_cast<cudaStream_t>(stream.handle)>>>(params);
    status = cudaGetLastError();
  }
  if (status != cudaSuccess) {
    core::fail(ErrorCode::kDeviceError, "launching cuda-sm90-prefill: ", cudaGetErrorString(status));
  }
}

template <typename T, int32_t DimQk, int32_t DimV, Fp8 kFp8, bool kFp8Mma>
void launch_prefill(const AttentionParams& attention, Variant variant, int32_t num_workers, Stream stream) {
  const PrefillParams params = make_params(attention, {DimQk, DimV}, element_bytes(kFp8));
  constexpr int32_t kBytes = smem_bytes<DimQk, DimV, dequantizes(kFp8, kFp8Mma)>();
  if constexpr (kFp8Mma) {
    launch_kernel<prefill_kernel<T, DimQk, DimV, Variant::kPlain, kFp8, true>>(params, num_workers, kBytes, stream);
  } else {
    switch (variant) {
      case Variant::kPlain:
        launch_kernel<prefill_kernel<T, DimQk, DimV, Variant::kPlain, kFp8, false>>(params, num_workers, kBytes,
                                                                                    stream);
        break;
      case Variant::kCap:
        launch_kernel<prefill_kernel<T, DimQk, DimV, Variant::kCap, kFp8, false>>(params, num_workers, kBytes, stream);
        break;
      case Variant::kAlibi:
        launch_kernel<prefill_kernel<T, DimQk, DimV, Variant::kAlibi, kFp8, false>>(params, num_workers, kBytes,
                                                                                    stream);
        break;
      case Variant::kMask:
        launch_kernel<prefill_kernel<T, DimQk, DimV, Variant::kMask, kFp8, false>>(params, num_workers, kBytes, stream);
        break;
      case Variant::kAny:
        launch_kernel<prefill_kernel<T, DimQk, DimV, Variant::kAny, kFp8, false>>(params, num_workers, kBytes, stream);
        break;
    }
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
