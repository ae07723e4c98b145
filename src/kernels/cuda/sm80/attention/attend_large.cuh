#pragma once

#include "kernels/cuda/sm80/attention/attend.cuh"
#include "kernels/cuda/sm80/attention/large.cuh"

namespace folio::inline v0::kernels::cuda::sm80 {

/// The kernel of large head dimensions: all items go one way, in which a row's bits depend on tiles of 16 tokens at
/// absolute positions alone.
template <typename T>
__global__ void __launch_bounds__(kThreads, 2) attend_large_kernel(const __grid_constant__ AttentionParams params) {
  static_assert(kLargeBytes + static_cast<int32_t>(sizeof(RowInfo<kLargeRows>)) <= kSharedLimit);
  static_assert(4 * kLargeRows * result_stride(kLargeDims) <= kLargeBytes);
  extern __shared__ __align__(128) unsigned char memory[];
  auto& rows = *reinterpret_cast<RowInfo<kLargeRows>*>(memory + kLargeBytes);
  const uint32_t shared = ptx::shared_address(memory);
  const planner::PlanView& plan = params.plan->view;
  RunningState<kLargeRows*(kLargeDims.v / 4) / kThreads> running;
  float* const results = reinterpret_cast<float*>(memory);
  float* const scores = reinterpret_cast<float*>(memory + kLargeScores);
  const int32_t end = plan.worker_indptr[blockIdx.x + 1];
  int32_t i = plan.worker_indptr[blockIdx.x];
  if (threadIdx.x == 0 && i < end) rows.next = plan.items[i];
  for (; i < end; ++i) {
    if (threadIdx.x == 0) begin_item(params, plan, rows.next, rows.context);
    __syncthreads();
    if (i + 1 < end) fetch_item(plan.items[i + 1], rows);
    locate_queries(params, rows, kLargeRows);
    __syncthreads();
    copy_queries<T, kLargeDims.qk>(params, rows, shared, kLargeRows);
    ptx::commit_copies();
    bind_rows(params, plan, rows);
    LargeWay<T, kLargeRows>(params, rows.context, rows, shared, scores).run(results);
    __syncthreads();
    finish_rows<kLargeDims.v>(params, rows, results, 1, running);
    __syncthreads();
  }
}

template <typename T>
void launch_large(const AttentionParams& params, int32_t num_workers, Stream stream) {
  constexpr int32_t kBytes = kLargeBytes + static_cast<int32_t>(sizeof(RowInfo<kLargeRows>));
  launch_kernel<attend_large_kernel<T>>(params, num_workers, kBytes, stream);
}

}  // namespace folio::inline v0::kernels::cuda::sm80
