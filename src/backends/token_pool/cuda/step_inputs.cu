#include <cuda_runtime.h>

#include <algorithm>

#include "backends/token_pool/cuda/report.cuh"
#include "backends/token_pool/gpu.hpp"
#include "platform/cuda/device.hpp"

/// What a step puts into memory that stays: slots into the request table, a captured batch's inputs.
namespace folio::inline v0::backends::token_pool::gpu {
namespace {

constexpr int32_t kWriteThreads = 256;
constexpr int32_t kMostWriteBlocks = 32;  ///< a request
constexpr int64_t kSlotsPerBlock = 4096;
constexpr int32_t kInputThreads = 64;

/// A CTA, or a few, a request.
__global__ void __launch_bounds__(kWriteThreads)
    write_kernel(const __grid_constant__ TableWriteJob job, ListReport* const to) {
  __shared__ int64_t sums[kWriteThreads];
  const auto request = static_cast<int32_t>(blockIdx.x);
  const int64_t offset = job.offsets != nullptr ? int64_t{job.offsets[request]}
                         : job.lens == nullptr  ? int64_t{request} * job.tokens_per_request
                                                : sum_of(request, sums, [&](int32_t r) { return job.taken(r); });
  write_request(job, request, offset, static_cast<int32_t>(blockIdx.y * blockDim.x + threadIdx.x),
                static_cast<int32_t>(gridDim.y * blockDim.x), [&](const ListReport& found) { report_to(to, found); });
}

/// A CTA a request of the batch or of the padding.
__global__ void __launch_bounds__(kInputThreads) inputs_kernel(const __grid_constant__ GraphInputsJob job) {
  fill_graph_request(job, static_cast<int32_t>(blockIdx.x), static_cast<int32_t>(threadIdx.x), kInputThreads);
}

}  // namespace

void write_request_table(int32_t device, const TableWriteJob& job, ListReport* report, Stream stream) {
  if (job.num_requests == 0) return;
  const platform::cuda::DeviceScope scope(device);
  const int64_t each = job.num_slots / job.num_requests;
  const dim3 grid(static_cast<unsigned>(job.num_requests),
                  static_cast<unsigned>(std::clamp<int64_t>(each / kSlotsPerBlock, 1, kMostWriteBlocks)));
  write_kernel<<<grid, kWriteThreads, 0, static_cast<cudaStream_t>(stream.handle)>>>(job, report);
  platform::cuda::check(cudaGetLastError(), "launching a write of the request table");
}

void fill_graph_inputs(int32_t device, const GraphInputsJob& job, Stream stream) {
  if (job.padded == 0) return;
  const platform::cuda::DeviceScope scope(device);
  inputs_kernel<<<static_cast<unsigned>(job.padded), kInputThreads, 0, static_cast<cudaStream_t>(stream.handle)>>>(job);
  platform::cuda::check(cudaGetLastError(), "launching the filling of a captured batch's inputs");
}

}  // namespace folio::inline v0::backends::token_pool::gpu
