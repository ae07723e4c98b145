#include "planner/cuda/plan_kernel.hpp"

#include <cuda_runtime.h>

#include "core/error.hpp"
#include "planner/cuda/thread_block.cuh"
#include "planner/device/planning.hpp"
#include "planner/device_plan.hpp"

namespace folio::inline v0::planner {
namespace {

constexpr int32_t kThreads = 512;
/// Shared memory that every supported GPU grants a thread block; scratch that is larger lies in the image.
constexpr int64_t kSharedScratchBytes = 96 * 1024;
constexpr int64_t kSharedWithoutAsking = 40 * 1024;

__global__ void __launch_bounds__(kThreads) plan_kernel(const __grid_constant__ device::PlanInput input,
                                                        std::byte* image, bool shared_scratch, PlanStatus* sticky) {
  extern __shared__ int64_t dynamic[];
  __shared__ cuda::ThreadBlock::Shared scans;
  std::byte* const scratch = shared_scratch ? reinterpret_cast<std::byte*>(dynamic) : image + input.layout.scratch;
  cuda::ThreadBlock block(scans);
  device::plan_batch(input, image, scratch, sticky, block);
}

void check(cudaError_t status) {
  if (status != cudaSuccess) {
    core::fail(ErrorCode::kDeviceError, "the plan kernel could not be launched: ", cudaGetErrorString(status));
  }
}

}  // namespace

void launch_plan(const PlannerConfig& config, const BatchView& batch, void* image, PlanStatus* sticky, Stream stream) {
  const device::PlanInput input = device_plan_input(config, batch);
  const bool shared_scratch = input.scratch_bytes <= kSharedScratchBytes;
  const size_t shared_bytes = shared_scratch ? static_cast<size_t>(input.scratch_bytes) : 0;
  if (input.scratch_bytes > kSharedWithoutAsking && shared_scratch) {
    check(cudaFuncSetAttribute(plan_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedScratchBytes));
  }
  plan_kernel<<<1, kThreads, shared_bytes, static_cast<cudaStream_t>(stream.handle)>>>(
      input, static_cast<std::byte*>(image), shared_scratch, sticky);
  check(cudaGetLastError());
}

}  // namespace folio::inline v0::planner
