#include "kernels/cuda/common/merge.hpp"

#include <cuda_runtime.h>

#include "core/error.hpp"
#include "kernels/cuda/common/merge_row.cuh"
#include "ptx/grid_dependency.cuh"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kWarps = kThreads / 32;

/// Folds partial results. A warp takes a row, its lanes the components.
template <int32_t Parts>
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ AttentionParams params) {
  const planner::PlanView& plan = params.plan->view;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t num_merges = plan.num_merges;  // the plan was there before the kernel whose results are merged
  ptx::wait_for_kernels_before();              // by all: a graph's next kernel waits for this one alone
  for (int32_t m = blockIdx.x; m < num_merges; m += gridDim.x) {
    const planner::MergeItem item = plan.merges[m];
    merge_item<Parts>(params, plan, item, static_cast<int32_t>(threadIdx.x) / 32, kWarps, lane);
  }
}

}  // namespace

void launch_merge(const AttentionParams& params, int32_t num_workers, Stream stream, bool overlaps) {
  auto* const kernel = params.head_dim_v <= kMergePart       ? merge_kernel<1>
                       : params.head_dim_v <= 2 * kMergePart ? merge_kernel<2>
                                                             : merge_kernel<4>;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(num_workers));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream.handle);
  config.attrs = &attribute;
  config.numAttrs = overlaps ? 1 : 0;
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, params);
  if (status != cudaSuccess) {
    core::fail(ErrorCode::kDeviceError, "launching the merge of partial results: ", cudaGetErrorString(status));
  }
}

}  // namespace folio::inline v0::kernels::cuda
