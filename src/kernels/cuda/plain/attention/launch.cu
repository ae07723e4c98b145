#include "kernels/cuda/plain/attention/launch.hpp"

#include <cuda_runtime.h>

#include "core/error.hpp"
#include "kernels/cuda/common/merge.hpp"
#include "kernels/cuda/plain/attention/attend.cuh"

namespace folio::inline v0::kernels::cuda::plain {
namespace {

template <int32_t Parts>
__global__ void __launch_bounds__(kThreads, 2) attend_kernel(const __grid_constant__ AttentionParams params) {
  extern __shared__ __align__(16) unsigned char dynamic[];
  __shared__ RowInfo rows;
  Worker<Parts>(params, DynamicMemory(dynamic, params), rows).run(static_cast<int32_t>(blockIdx.x));
}

void check(cudaError_t status) {
  if (status != cudaSuccess) {
    core::fail(ErrorCode::kDeviceError, "launching cuda-plain: ", cudaGetErrorString(status));
  }
}

}  // namespace

void launch(const AttentionParams& params, const LaunchShape& shape, Stream stream) {
  auto* const kernel = params.head_dim_v <= kThreads ? attend_kernel<1> : attend_kernel<2>;
  const int32_t bytes = dynamic_bytes(params);
  constexpr int32_t kAlwaysGranted = 48 * 1024;
  if (bytes + static_cast<int32_t>(sizeof(RowInfo)) > kAlwaysGranted) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  }
  kernel<<<shape.num_workers, kThreads, bytes, static_cast<cudaStream_t>(stream.handle)>>>(params);
  check(cudaGetLastError());
  if (shape.combine) launch_merge(params, shape.num_workers, stream);
}

}  // namespace folio::inline v0::kernels::cuda::plain
