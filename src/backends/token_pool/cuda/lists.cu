#include <cuda_runtime.h>

#include <algorithm>

#include "backends/token_pool/gpu.hpp"
#include "core/error.hpp"
#include "platform/cuda/device.hpp"

namespace folio::inline v0::backends::token_pool::gpu {
namespace {

constexpr int32_t kRangeThreads = 256;
constexpr int32_t kGatherThreads = 256;
constexpr int32_t kMostGatherBlocks = 32;  ///< a request
constexpr int64_t kEntriesPerBlock = 4096;

/// The sums of `value` over the threads up to and including this one (Hillis and Steele).
__device__ int64_t inclusive_sum(int64_t value, int64_t* shared) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  shared[thread] = value;
  __syncthreads();
  for (int32_t distance = 1; distance < kRangeThreads; distance *= 2) {
    const int64_t before = thread >= distance ? shared[thread - distance] : 0;
    __syncthreads();
    shared[thread] += before;
    __syncthreads();
  }
  return shared[thread];
}

/// A request whose rows, positions or entries do not exist is left without keys: nothing is read or written for it.
__device__ bool is_possible(const ListsJob& job, int32_t request, const KvRange& range) {
  if (range.len < 0 || range.first_pos < 0 || range.table_start < 0) return false;
  if (range.table_start % job.ranges.page_size != 0) return false;
  const int32_t row = job.rows[request];
  return job.table.has_row(row) && int64_t{range.table_start} + range.len <= job.table.columns_of(row);
}

/// One CTA: lengths, positions and both indptrs.
__global__ void __launch_bounds__(kRangeThreads) ranges_kernel(const __grid_constant__ ListsJob job) {
  __shared__ int64_t sums[kRangeThreads];
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t num_requests = job.ranges.num_requests;
  const bool given = job.given_kv_indptr != nullptr;
  int64_t queries_before = 0;
  int64_t entries_before = 0;
  if (thread == 0) {
    job.cu_q[0] = 0;
    if (!given) job.kv_indptr[0] = 0;
  }
  for (int32_t first = 0; first < num_requests; first += kRangeThreads) {
    const int32_t r = first + thread;
    KvRange range;
    if (r < num_requests) {
      if (given) {
        range.q_len = 1;
        range.len = max(0, job.given_kv_indptr[r + 1] - job.given_kv_indptr[r]);
      } else {
        range = kv_range(job.ranges, r);
        if (range.q_len < 0) range.q_len = 0;
        if (!is_possible(job, r, range)) range.len = range.first_pos = range.table_start = 0;
      }
    }
    int64_t entries = (int64_t{range.len} + job.ranges.page_size - 1) / job.ranges.page_size;
    const int64_t queries_to = queries_before + inclusive_sum(range.q_len, sums);
    __syncthreads();
    const int64_t queries_all = sums[kRangeThreads - 1];
    __syncthreads();
    int64_t entries_to = entries_before + inclusive_sum(entries, sums);
    __syncthreads();
    const int64_t entries_all = sums[kRangeThreads - 1];
    __syncthreads();
    if (!given && entries_to > job.capacity) {  // what does not fit is not read either
      range.len = 0;
      entries_to = job.capacity;
    }
    if (r < num_requests) {
      job.cu_q[r + 1] = static_cast<int32_t>(queries_to);
      if (!given) job.kv_indptr[r + 1] = static_cast<int32_t>(entries_to);
      job.kv_lens[r] = range.len;
      job.first_pos[r] = range.first_pos;
      job.table_starts[r] = range.table_start;
      if (job.kv_last_page_len != nullptr) job.kv_last_page_len[r] = last_page_len(range.len, job.ranges.page_size);
    }
    queries_before += queries_all;
    entries_before += entries_all;
  }
}

/// A column of CTAs a request: its entries.
__global__ void __launch_bounds__(kGatherThreads) gather_kernel(const __grid_constant__ ListsJob job) {
  const auto request = static_cast<int32_t>(blockIdx.x);
  KvIndicesJob entries;
  entries.table = job.table;
  entries.rows = job.rows;
  entries.lens = job.kv_lens;
  entries.indptr = job.kv_indptr;
  entries.starts = job.table_starts;
  entries.page_size = job.ranges.page_size;
  entries.out = job.kv_indices;
  entries.capacity = job.capacity;
  if (job.kv_lens[request] == 0) return;
  const auto lane = static_cast<int32_t>(blockIdx.y * blockDim.x + threadIdx.x);
  write_entries(entries, request, lane, static_cast<int32_t>(gridDim.y * blockDim.x));
}

}  // namespace

void build_lists(int32_t device, const ListsJob& job, Stream stream) {
  const platform::cuda::DeviceScope scope(device);
  auto* const cuda_stream = static_cast<cudaStream_t>(stream.handle);
  ranges_kernel<<<1, kRangeThreads, 0, cuda_stream>>>(job);
  platform::cuda::check(cudaGetLastError(), "launching the lengths' kernel");
  if (job.given_kv_indptr != nullptr || job.ranges.num_requests == 0) return;
  const int64_t columns = job.table.num_columns / job.ranges.page_size;
  const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(columns / kEntriesPerBlock, 1, kMostGatherBlocks));
  const dim3 grid(static_cast<unsigned>(job.ranges.num_requests), blocks);
  gather_kernel<<<grid, kGatherThreads, 0, cuda_stream>>>(job);
  platform::cuda::check(cudaGetLastError(), "launching the gathering of slots");
}

}  // namespace folio::inline v0::backends::token_pool::gpu
