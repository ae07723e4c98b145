#include <cuda_runtime.h>

#include "core/error.hpp"
#include "scheduler/cuda/plan_kernel.hpp"

namespace folio::inline v0::scheduler {
namespace {

constexpr int32_t kThreads = 1024;
constexpr int32_t kWarps = kThreads / 32;

__device__ uint64_t sum_of_warp(uint64_t value) {
  for (int32_t distance = 16; distance > 0; distance /= 2) value += __shfl_down_sync(0xffffffff, value, distance);
  return value;
}

/// One CTA: schedules are a few hundred KB, and several CTAs would have to synchronize.
__global__ void __launch_bounds__(kThreads)
    checksum_kernel(const uint64_t* schedule, const ChecksumRecord* record, int32_t* changed) {
  __shared__ uint64_t sums[kWarps];
  const uint64_t num_words = record->num_words;
  uint64_t sum = 0;
#pragma unroll 8
  for (uint64_t i = threadIdx.x; i < num_words; i += kThreads) sum += checksum_term(schedule[i], i);
  sum = sum_of_warp(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  sum = sum_of_warp(sums[threadIdx.x]);
  if (threadIdx.x > 0 || sum == record->checksum) return;
  for (int32_t i = 0; i < record->num_images; ++i) *record->images[i] = record->emptied[i];
  *changed = 1;
}

}  // namespace

void launch_checksum_check(const uint64_t* schedule, const ChecksumRecord* record, int32_t* changed, Stream stream) {
  checksum_kernel<<<1, kThreads, 0, static_cast<cudaStream_t>(stream.handle)>>>(schedule, record, changed);
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) {
    core::fail(ErrorCode::kDeviceError, "launching the comparison of a schedule: ", cudaGetErrorString(status));
  }
}

}  // namespace folio::inline v0::scheduler
