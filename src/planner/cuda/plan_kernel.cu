#include "planner/cuda/plan_kernel.hpp"

#include <cuda_runtime.h>

#include <algorithm>

#include "core/error.hpp"
#include "planner/cuda/thread_block.cuh"
#include "planner/cuda/warp.cuh"
#include "planner/device/planning.hpp"
#include "planner/device/single_tiles.hpp"
#include "planner/device_plan.hpp"
#include "ptx/grid_dependency.cuh"

namespace folio::inline v0::planner {
namespace {

constexpr int32_t kDivideThreads = 256;
constexpr int32_t kSingleThreads = 256;
constexpr int32_t kMostSingleBlocks = 16;
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

constexpr int32_t kItemWords = sizeof(WorkItem) / sizeof(uint32_t);

/// Items [first, first + 32) of a plan, as far as there are so many, by a warp: side by side in shared memory, so that
/// whole sectors are stored.
__device__ __forceinline__ void emit_single_items(const device::SingleInput& in, const device::SingleTiles& tiles,
                                                  int32_t first, int32_t num_items, uint32_t* stage) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  if (first + lane < num_items) {
    reinterpret_cast<WorkItem*>(stage)[lane] = device::make_single_item(in, tiles, first + lane);
  }
  __syncwarp();
  auto* const out = reinterpret_cast<uint32_t*>(in.items + first);
  const int32_t words = min(num_items - first, 32) * kItemWords;
#pragma unroll
  for (int32_t i = lane; i < 32 * kItemWords; i += 32) {
    if (i < words) out[i] = stage[i];
  }
  __syncwarp();
}

/// Whose batches a warp plans alone.
constexpr int32_t kRequestsOfWarp = 32;

/// The batches of single_tiles.hpp, whole. What the next kernel has to do before it needs the plan, it may do at once.
/// kByWarps: every warp divides the batch for itself instead of every thread block.
template <bool kByWarps>
__global__ void __launch_bounds__(kSingleThreads)
    single_kernel(const __grid_constant__ device::SingleInput in, const __grid_constant__ device::PlanInput input,
                  std::byte* image, PlanStatus* sticky) {
  extern __shared__ int4 dynamic[];
  __shared__ cuda::ThreadBlock::Shared scans;
  __shared__ uint32_t stages[kSingleThreads / 32][32 * kItemWords];
  ptx::let_next_kernel_begin();
  const auto warp = static_cast<int32_t>(threadIdx.x) / 32;
  auto& tiles = *reinterpret_cast<device::SingleTiles*>(
      reinterpret_cast<std::byte*>(dynamic) + (kByWarps ? warp * device::SingleTiles::bytes(kRequestsOfWarp) : 0));
  cuda::ThreadBlock block(scans);
  const bool writes = blockIdx.x == 0 && (!kByWarps || warp == 0);
  const auto plan = [&](auto& group) {
    if (writes && group.rank() == group.size() - 1) {
      const device::Job job(input, image, nullptr);
      job.header->view = device::outline(job);
      job.segments[0] = device::segment_lengths(job, 0);
    }
    return device::plan_single_tiles(in, tiles, writes, group);
  };
  int32_t num_items = 0;
  if constexpr (kByWarps) {
    __shared__ int32_t sums[kSingleThreads / 32][cuda::Warp::kMostSums];
    cuda::Warp group(sums[warp]);
    num_items = plan(group);
  } else {
    num_items = plan(block);
  }
  if (num_items < 0) {
    if (blockIdx.x > 0) return;
    __syncthreads();  // all have written what they write before it is written again
    const device::Job job(input, image, image + input.layout.scratch);
    device::divide_batch(job, sticky, block);
    device::emit_items(job, block.rank(), block.size());
    return;
  }
  for (int32_t i = static_cast<int32_t>(blockIdx.x * blockDim.x) + 32 * warp; i < num_items;
       i += static_cast<int32_t>(gridDim.x * blockDim.x)) {
    emit_single_items(in, tiles, i, num_items, stages[warp]);
  }
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
  const int64_t most_items = (input.layout.scratch - input.layout.items) / int64_t{sizeof(WorkItem)};
  const bool by_warps = input.num_requests <= kRequestsOfWarp;
  const int64_t single_bytes = by_warps ? kSingleThreads / 32 * device::SingleTiles::bytes(kRequestsOfWarp)
                                        : device::SingleTiles::bytes(input.num_requests);
  const auto single = single_tiles_input(input, bytes);
  if (single && single_bytes <= kSharedScratchBytes) {
    auto* const kernel = by_warps ? single_kernel<true> : single_kernel<false>;
    if (single_bytes > kSharedWithoutAsking / 2) {
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedScratchBytes));
    }
    const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(most_items / kSingleThreads, 1, kMostSingleBlocks));
    kernel<<<blocks, kSingleThreads, static_cast<size_t>(single_bytes), cuda_stream>>>(*single, input, bytes, sticky);
    check(cudaGetLastError());
    return;
  }
  const int64_t scratch_bytes = input.scratch.bytes();
  const bool shared_scratch = scratch_bytes <= kSharedScratchBytes;
  if (shared_scratch && scratch_bytes > kSharedWithoutAsking) {
    check(cudaFuncSetAttribute(divide_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedScratchBytes));
  }
  divide_kernel<<<1, kDivideThreads, shared_scratch ? static_cast<size_t>(scratch_bytes) : 0, cuda_stream>>>(
      input, bytes, shared_scratch, sticky);
  check(cudaGetLastError());
  const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(most_items / kEmitThreads, 1, kMostEmitBlocks));
  emit_kernel<<<blocks, kEmitThreads, 0, cuda_stream>>>(input, bytes);
  check(cudaGetLastError());
}

}  // namespace folio::inline v0::planner
