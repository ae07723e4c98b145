#include "scheduler/cuda/plan_kernel.hpp"

#include <cuda_runtime.h>

#include <algorithm>

#include "core/error.hpp"
#include "ptx/control.cuh"
#include "scheduler/cuda/cta_group.cuh"
#include "scheduler/cuda/few_requests.cuh"
#include "scheduler/device/scheduler.hpp"
#include "scheduler/device/single_tiles.hpp"
#include "scheduler/device_scheduler.hpp"

namespace folio::inline v0::scheduler {
namespace {

constexpr int32_t kScheduleThreads = 256;
constexpr int32_t kSingleThreads = 256;
constexpr int32_t kMaxSingleCtas = 16;
constexpr int32_t kEmitThreads = 128;
constexpr int32_t kMaxEmitCtas = 132;
/// Shared memory that every supported GPU grants a CTA. Larger scratch lies in the image.
constexpr int64_t kSharedScratchBytes = 96 * 1024;
constexpr int64_t kSharedWithoutAsking = 40 * 1024;

/// One CTA: everything but the work tiles.
__global__ void __launch_bounds__(kScheduleThreads)
    schedule_kernel(const __grid_constant__ device::PlanInput input, std::byte* image, bool shared_scratch,
                    PlanStatus* sticky) {
  extern __shared__ int4 dynamic[];
  __shared__ cuda::CtaGroup::Shared scans;
  std::byte* const in_image = image + input.layout.scratch;
  const device::Job job(input, image, shared_scratch ? reinterpret_cast<std::byte*>(dynamic) : in_image);
  cuda::CtaGroup block(scans);
  device::schedule_batch(job, sticky, block);
  if (!shared_scratch) return;
  const auto kept = static_cast<int32_t>(input.scratch.kept_bytes() / int64_t{sizeof(int4)});
  for (int32_t i = block.rank(); i < kept; i += block.size()) reinterpret_cast<int4*>(in_image)[i] = dynamic[i];
}

/// Many CTAs: the work tiles.
__global__ void __launch_bounds__(kEmitThreads)
    emit_kernel(const __grid_constant__ device::PlanInput input, std::byte* image) {
  const device::Job job(input, image, image + input.layout.scratch);
  device::emit_work_tiles(job, static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x),
                          static_cast<int32_t>(gridDim.x * blockDim.x));
}

constexpr int32_t kWorkTileWords = sizeof(WorkTile) / sizeof(uint32_t);

/// Stores work tiles [first, first + 32) of `num_work_tiles`, one per lane of the calling warp. They are staged in
/// shared memory, so that stores fill whole sectors.
__device__ __forceinline__ void store_work_tiles(const device::SingleInput& in, const WorkTile& work_tile,
                                                 int32_t first, int32_t num_work_tiles, uint32_t* stage) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  if (first + lane < num_work_tiles) reinterpret_cast<WorkTile*>(stage)[lane] = work_tile;
  __syncwarp();
  auto* const out = reinterpret_cast<uint32_t*>(in.work_tiles + first);
  const int32_t words = min(num_work_tiles - first, 32) * kWorkTileWords;
#pragma unroll
  for (int32_t i = lane; i < 32 * kWorkTileWords; i += 32) {
    if (i < words) out[i] = stage[i];
  }
  __syncwarp();
}

/// The fast path (single_tiles.hpp) in one kernel. kFew: every warp divides the batch for itself (few_requests.cuh)
/// instead of every CTA. Registers are bounded so that CTAs of the next kernel fit beside these.
template <bool kFew>
__global__ void __launch_bounds__(kSingleThreads, kFew ? 4 : 1)
    single_tile_kernel(const __grid_constant__ device::SingleInput in, const __grid_constant__ device::PlanInput input,
                       std::byte* image, PlanStatus* sticky) {
  extern __shared__ int4 dynamic[];
  constexpr int32_t kWarps = kSingleThreads / 32;
  __shared__ cuda::CtaGroup::Shared scans;
  __shared__ uint32_t stages[kWarps][32 * kWorkTileWords];
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  cuda::CtaGroup block(scans);
  // A warp with few work tiles to make, or none, writes the header.
  const bool writes = blockIdx.x == 0 && (!kFew || warp == kWarps - 1);
  if (writes && threadIdx.x == kSingleThreads - 1) {
    const device::Job job(input, image, nullptr);
    job.header->view = device::outline(job);
    job.segments[0] = device::segment_lengths(job, 0);
  }
  const auto first_work_tile = static_cast<int32_t>(blockIdx.x * blockDim.x) + 32 * warp;
  const auto step = static_cast<int32_t>(gridDim.x * blockDim.x);
  int32_t num_work_tiles = 0;
  if constexpr (kFew) {
    __shared__ __align__(8) std::byte rules[kWarps][sizeof(device::SingleRule)];
    cuda::FewRequests requests(in, reinterpret_cast<device::SingleRule&>(rules[warp]));
    num_work_tiles = requests.divide(writes);
    // Programmatic dependent launch: from here on the next kernel runs its prologue. Triggered at this kernel's first
    // instruction, a step would take 2 us more.
    ptx::griddep_launch_dependents();
    for (int32_t i = first_work_tile; i < num_work_tiles; i += step) {
      store_work_tiles(in, requests.work_tile(i + lane, num_work_tiles), i, num_work_tiles, stages[warp]);
    }
  } else {
    auto& tiles = *reinterpret_cast<device::SingleTiles*>(dynamic);
    num_work_tiles = device::schedule_single_tiles(in, tiles, writes, block);
    for (int32_t i = first_work_tile; i < num_work_tiles; i += step) {
      WorkTile work_tile{};
      if (i + lane < num_work_tiles) work_tile = device::make_single_work_tile(in, tiles, i + lane);
      store_work_tiles(in, work_tile, i, num_work_tiles, stages[warp]);
    }
  }
  if (num_work_tiles >= 0 || blockIdx.x > 0) return;
  __syncthreads();  // the fast path's writes come before those of schedule_batch
  const device::Job job(input, image, image + input.layout.scratch);
  device::schedule_batch(job, sticky, block);
  device::emit_work_tiles(job, block.rank(), block.size());
}

void check(cudaError_t status) {
  if (status != cudaSuccess) {
    core::fail(ErrorCode::kDeviceError, "the plan kernel could not be launched: ", cudaGetErrorString(status));
  }
}

}  // namespace

void launch_plan(const SchedulerConfig& config, const BatchView& batch, void* image, PlanStatus* sticky,
                 Stream stream) {
  const device::PlanInput input = device_plan_input(config, batch);
  auto* const bytes = static_cast<std::byte*>(image);
  auto* const cuda_stream = static_cast<cudaStream_t>(stream.handle);
  const int64_t max_work_tiles = (input.layout.scratch - input.layout.work_tiles) / int64_t{sizeof(WorkTile)};
  const bool few = input.num_requests <= cuda::FewRequests::kMax;
  const int64_t single_bytes = few ? 0 : device::SingleTiles::bytes(input.num_requests);
  const auto single = single_tiles_input(input, bytes);
  if (single && single_bytes <= kSharedScratchBytes) {
    auto* const kernel = few ? single_tile_kernel<true> : single_tile_kernel<false>;
    // The same carveout as attention kernels use, so that their CTAs fit beside these.
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
    if (single_bytes > kSharedWithoutAsking / 2) {
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedScratchBytes));
    }
    const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(max_work_tiles / kSingleThreads, 1, kMaxSingleCtas));
    kernel<<<blocks, kSingleThreads, static_cast<size_t>(single_bytes), cuda_stream>>>(*single, input, bytes, sticky);
    check(cudaGetLastError());
    return;
  }
  const int64_t scratch_bytes = input.scratch.bytes();
  const bool shared_scratch = scratch_bytes <= kSharedScratchBytes;
  if (shared_scratch && scratch_bytes > kSharedWithoutAsking) {
    check(cudaFuncSetAttribute(schedule_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedScratchBytes));
  }
  schedule_kernel<<<1, kScheduleThreads, shared_scratch ? static_cast<size_t>(scratch_bytes) : 0, cuda_stream>>>(
      input, bytes, shared_scratch, sticky);
  check(cudaGetLastError());
  const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(max_work_tiles / kEmitThreads, 1, kMaxEmitCtas));
  emit_kernel<<<blocks, kEmitThreads, 0, cuda_stream>>>(input, bytes);
  check(cudaGetLastError());
}

}  // namespace folio::inline v0::scheduler
