#include "kernels/cuda/common/tables/table_check.hpp"

#include <cstddef>

#include "kernels/cuda/common/launch.hpp"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kCheckThreads = 512;

/// One CTA, so that the fault that is reported does not depend on which CTA comes first. A warp per work tile.
__global__ void __launch_bounds__(kCheckThreads) check_kernel(const __grid_constant__ TableCheckParams params) {
  __shared__ __align__(alignof(TableFault)) std::byte memory[kCheckThreads * sizeof(TableFault)];
  auto* const faults = reinterpret_cast<TableFault*>(memory);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  faults[thread] = check_tiles(params.segments, params.plan->view, thread / 32, kCheckThreads / 32, thread % 32, 32);
  __syncthreads();
  if (thread > 0) return;
  TableFault lowest;
  for (int32_t i = 0; i < kCheckThreads; ++i) {
    if (comes_before(faults[i], lowest)) lowest = faults[i];
  }
  volatile TableFault& out = *params.fault;
  // A fault that the host has not read yet stays.
  if (lowest.problem == TableProblem::kNone || out.problem != TableProblem::kNone) return;
  out.segment = lowest.segment;
  out.request = lowest.request;
  out.row = lowest.row;
  out.column = lowest.column;
  out.value = lowest.value;
  out.bound = lowest.bound;
  __threadfence_system();  // the host sees the problem only once the rest is there
  out.problem = lowest.problem;
}

}  // namespace

void enqueue(const TableCheckParams& params, Stream stream) {
  check_kernel<<<1, kCheckThreads, 0, native(stream)>>>(params);
  check_launch("the check of page tables");
}

}  // namespace folio::inline v0::kernels::cuda
