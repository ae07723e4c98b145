#include "kernels/cuda/common/combine/shift_lse.hpp"

#include "kernels/cuda/common/launch.hpp"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kThreads = 128;
constexpr double kLog2E = 1.442695040888963407360;

/// One block a request.
__global__ void __launch_bounds__(kThreads) shift_kernel(const __grid_constant__ ShiftLseParams params) {
  const auto request = static_cast<int32_t>(blockIdx.x);
  const double first_pos = params.first_pos[request];
  const int64_t end = int64_t{params.cu_q[request + 1]} * params.num_heads;
  for (int64_t i = int64_t{params.cu_q[request]} * params.num_heads + threadIdx.x; i < end; i += kThreads) {
    const double slope = params.slopes[i % params.num_heads];
    params.lse[i] = static_cast<float>(params.lse[i] + slope * first_pos * kLog2E);
  }
}

}  // namespace

void enqueue(const ShiftLseParams& params, Stream stream) {
  if (params.num_requests == 0) return;
  shift_kernel<<<static_cast<uint32_t>(params.num_requests), kThreads, 0, native(stream)>>>(params);
  check_launch("the shift of LSEs");
}

}  // namespace folio::inline v0::kernels::cuda
