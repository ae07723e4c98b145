#include "kernels/cuda/common/merge_states/merge_states.hpp"

#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/common/merge_states/merge_row.cuh"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kMergeThreads = 256;

/// kLanes lanes a row, each kElements neighbours at a time.
template <int32_t kLanes, int32_t kElements>
__global__ void __launch_bounds__(kMergeThreads) combine_kernel(const __grid_constant__ CombineParams params) {
  constexpr int32_t kRows = kMergeThreads / kLanes;
  const int64_t rows = params.num_tokens * params.num_heads;
  for (int64_t first = int64_t{blockIdx.x} * kRows; first < rows; first += int64_t{gridDim.x} * kRows) {
    merge_row<kLanes, kElements>(params, first + threadIdx.x / kLanes, rows);
  }
}

template <int32_t kLanes, int32_t kElements>
void launch(const CombineParams& params, Stream stream) {
  const uint32_t grid = grid_for(params.num_tokens * params.num_heads, kMergeThreads / kLanes);
  combine_kernel<kLanes, kElements><<<grid, kMergeThreads, 0, native(stream)>>>(params);
}

}  // namespace

void enqueue(const CombineParams& params, Stream stream) {
  if (params.num_tokens == 0) return;
  const bool wide = is_wide(params);
  if (enqueue_few_states(params, wide, stream)) return;
  if (wide) {
    launch<32, kWide>(params, stream);
  } else {
    launch<32, 1>(params, stream);
  }
  check_launch("the merge of states");
}

}  // namespace folio::inline v0::kernels::cuda
