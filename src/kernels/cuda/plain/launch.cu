#include <cuda_runtime.h>

#include "core/error.hpp"
#include "kernels/cuda/common/combine.hpp"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/plain/kernel.cuh"
#include "kernels/cuda/plain/plain_kernel.hpp"

namespace folio::inline v0::kernels::cuda::plain {
namespace {

template <int32_t Parts>
__global__ void __launch_bounds__(kThreads, 2) attention_kernel(const __grid_constant__ AttentionParams params) {
  extern __shared__ __align__(16) unsigned char dynamic[];
  __shared__ SharedStorage storage;
  PlainCta<Parts>(params, DynamicMemory(dynamic, params), storage).run(static_cast<int32_t>(blockIdx.x));
}

void check(cudaError_t status) {
  if (status != cudaSuccess) {
    core::fail(ErrorCode::kDeviceError, "launching cuda-plain: ", cudaGetErrorString(status));
  }
}

void launch(const AttentionParams& params, const LaunchShape& shape, Stream stream) {
  auto* const kernel = params.head_dim_v <= kThreads ? attention_kernel<1> : attention_kernel<2>;
  const int32_t bytes = dynamic_bytes(params);
  constexpr int32_t kAlwaysGranted = 48 * 1024;
  if (bytes + static_cast<int32_t>(sizeof(SharedStorage)) > kAlwaysGranted) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  }
  kernel<<<shape.num_workers, kThreads, bytes, native(stream)>>>(params);
  check(cudaGetLastError());
}

void combine(const AttentionParams& params, const LaunchShape& shape, Stream stream) {
  launch_combine(params, shape.num_workers, stream);
}

}  // namespace

const AttentionKernel kPlainKernel{.name = "cuda-plain",
                                   .min_compute_capability = 80,
                                   .refusal = refusal,
                                   .tile = tile,
                                   .p_dtype = p_dtype,
                                   .workers_per_sm = 2,
                                   .tile_cost = 16,
                                   .row_cost = 1,
                                   .launch = launch,
                                   .combine = combine};

}  // namespace folio::inline v0::kernels::cuda::plain
