#include "planner/cuda/plan_kernel.hpp"

#include <cuda_runtime.h>

#include <algorithm>

#include "core/error.hpp"
#include "planner/cuda/thread_block.cuh"
#include "planner/device/planning.hpp"
#include "planner/device_plan.hpp"

namespace folio::inline v0::planner {
namespace {

constexpr int32_t kDivideThreads = 256;
constexpr int32_t kEmitThreads = 128;
constexpr int32_t kMostEmitBlocks = 132;
/// Shared memory that every supported GPU grants a thread block; scratch that is larger lies in the image.
constexpr int64_t kSharedScratchBytes = 96 * 1024;
constexpr int64_t kSharedWithoutAsking = 40 * 1024;

/// One thread block: everything but the items.
__global__ void __launch_bounds__(kDivideThreads)
    divide_kernel(const __grid_constant__ device::PlanInput input, std::byte* image, bool shared_scratch,
                  PlanStatus* sticky) {
  extern __shared__ int4 dynamic[];
  __shared__ cuda::ThreadBlock::Shared scans;
  std::byte* const in_image = image + input.layout.scratch;
  const device::Job job(input, image, shared_scratch ? reinterpret_cast<std::byte*>(dynamic) : in_image);
  cuda::ThreadBlock block(scans);
  device::divide_batch(job, sticky, block);
  if (!shared_scratch) return;
  const auto kept = static_cast<int32_t>(input.scratch.kept_bytes() / int64_t{sizeof(int4)});
  for (int32_t i = block.rank(); i < kept; i += block.size()) reinterpret_cast<int4*>(in_image)[i] = dynamic[i];
}

/// Many thread blocks: the items.
__global__ void __launch_bounds__(kEmitThreads)
    emit_kernel(const __grid_constant__ device::PlanInput input, std::byte* image) {
  const device::Job job(input, image, image + input.layout.scratch);
  device::emit_items(job, static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x),
                     static_cast<int32_t>(gridDim.x * blockDim.x));
}

void check(cudaError_t status) {
  if (status != cudaSuccess) {
    core::fail(ErrorCode::kDeviceError, "the plan kernel could not be launched: ", cudaGetErrorString(status));
  }
}

}  // namespace

void launch_plan(const PlannerConfig& config, const BatchView& batch, void* image, PlanStatus* sticky, Stream stream) {
  const device::PlanInput input = device_plan_input(config, batch);
  auto* const bytes = static_cast<std::byte*>(image);
  auto* const cuda_stream = static_cast<cudaStream_t>(stream.handle);
  const int64_t scratch_bytes = input.scratch.bytes();
  const bool shared_scratch = scratch_bytes <= kSharedScratchBytes;
  if (shared_scratch && scratch_bytes > kSharedWithoutAsking) {
    check(cudaFuncSetAttribute(divide_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedScratchBytes));
  }
  divide_kernel<<<1, kDivideThreads, shared_scratch ? static_cast<size_t>(scratch_bytes) : 0, cuda_stream>>>(
      input, bytes, shared_scratch, sticky);
  check(cudaGetLastError());
  const int64_t most_items = (input.layout.scratch - input.layout.items) / int64_t{sizeof(WorkItem)};
  const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(most_items / kEmitThreads, 1, kMostEmitBlocks));
  emit_kernel<<<blocks, kEmitThreads, 0, cuda_stream>>>(input, bytes);
  check(cudaGetLastError());
}

}  // namespace folio::inline v0::planner
