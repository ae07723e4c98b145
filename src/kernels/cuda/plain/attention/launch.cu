#include <cuda_runtime.h>

#include "core/error.hpp"
#include "kernels/cuda/common/merge.hpp"
#include "kernels/cuda/plain/attention/attend.cuh"
#include "kernels/cuda/plain/attention/launch.hpp"

namespace folio::inline v0::kernels::cuda::plain {
namespace {

template <typename T>
__global__ void __launch_bounds__(kThreads, 2) attend_kernel(const __grid_constant__ AttentionParams params) {
  extern __shared__ __align__(16) unsigned char dynamic[];
  __shared__ RowInfo rows;
  Worker<T>(params, dynamic, rows).run(static_cast<int32_t>(blockIdx.x));
}

void check(cudaError_t status) {
  if (status != cudaSuccess) {
    core::fail(ErrorCode::kDeviceError, "launching cuda-plain: ", cudaGetErrorString(status));
  }
}

}  // namespace

void launch(const AttentionParams& params, const LaunchShape& shape, Stream stream) {
  const auto native = static_cast<cudaStream_t>(stream.handle);
  const int32_t elements =
      (kRows + kTokens) * (params.head_dim_qk + kRowPadding) + kTokens * (params.head_dim_v + kRowPadding);
  const size_t shared_bytes = static_cast<size_t>(elements) * sizeof(__half);
  if (shape.q == DType::kFloat16) {
    attend_kernel<__half><<<shape.num_workers, kThreads, shared_bytes, native>>>(params);
  } else {
    attend_kernel<__nv_bfloat16><<<shape.num_workers, kThreads, shared_bytes, native>>>(params);
  }
  check(cudaGetLastError());
  if (shape.merge) launch_merge(params, shape.num_workers, stream);
}

}  // namespace folio::inline v0::kernels::cuda::plain
