#pragma once

#include "kernels/cuda/sm80/attention/attend.cuh"
#include "kernels/cuda/sm80/attention/large.cuh"

namespace folio::inline v0::kernels::cuda::sm80 {

/// The kernel of large head dimensions.
template <typename T>
__global__ void __launch_bounds__(kThreads, 2) attend_large_kernel(const __grid_constant__ AttentionParams params) {
  extern __shared__ __align__(128) unsigned char memory[];
  run_large_block<T>(params, memory);
}

template <typename T>
void launch_large(const AttentionParams& params, int32_t num_workers, Stream stream) {
  constexpr int32_t kBytes = kLargeBytes + static_cast<int32_t>(sizeof(RowInfo<kLargeRows>));
  launch_kernel<attend_large_kernel<T>>(params, num_workers, kBytes, stream);
}

}  // namespace folio::inline v0::kernels::cuda::sm80
