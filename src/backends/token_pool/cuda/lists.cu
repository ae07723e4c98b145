#include <cuda_runtime.h>

#include <algorithm>
#include <new>

#include "backends/token_pool/cuda/report.cuh"
#include "backends/token_pool/gpu.hpp"
#include "core/error.hpp"
#include "platform/cuda/device.hpp"
#include "platform/cuda/memory.hpp"

namespace folio::inline v0::backends::token_pool::gpu {
namespace {

constexpr int32_t kRangeThreads = 256;
constexpr int32_t kGatherThreads = 256;
constexpr int32_t kMostGatherBlocks = 32;  ///< a request
constexpr int64_t kListEntriesPerBlock = 4096;

/// One CTA: lengths, positions and both indptrs.
__global__ void __launch_bounds__(kRangeThreads) ranges_kernel(const __grid_constant__ ListsJob job) {
  __shared__ int64_t sums[kRangeThreads];
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t num_requests = job.ranges.num_requests;
  const bool bounded = job.given_kv_indptr == nullptr;
  int64_t queries_before = 0;
  int64_t entries_before = 0;
  int64_t seq_lens_before = 0;
  if (thread == 0) {
    job.cu_q[0] = 0;
    if (job.kv_indptr != nullptr) job.kv_indptr[0] = 0;
  }
  // All threads: the sum up to and including each, and that of all.
  const auto sum_up = [&](int64_t value, int64_t& before) {
    const int64_t to = before + inclusive_sum(value, sums);
    __syncthreads();
    before += sums[kRangeThreads - 1];
    __syncthreads();
    return to;
  };
  for (int32_t first = 0; first < num_requests; first += kRangeThreads) {
    const int32_t r = first + thread;
    ListedRange listed;
    if (r < num_requests) listed = listed_range(job, r);
    KvRange& range = listed.range;
    const int64_t queries_to = sum_up(range.q_len, queries_before);
    int64_t entries_to = sum_up((int64_t{range.len} + job.ranges.page_size - 1) / job.ranges.page_size, entries_before);
    if (job.seq_lens_sum >= 0) sum_up(r < num_requests ? job.ranges.seq_lens[r] : 0, seq_lens_before);
    if (r >= num_requests) continue;
    if (bounded && entries_to > job.capacity) {  // what does not fit is not read either
      if (range.len > 0) {
        listed.found = {0, KvRangeFault::kCapacity, r, 0, entries_to, job.capacity};
      }
      range.len = range.whole_len = 0;
      entries_to = job.capacity;
    }
    if (listed.found.fault != KvRangeFault::kNone) report_to(job.report, listed.found);
    job.cu_q[r + 1] = static_cast<int32_t>(queries_to);
    if (job.kv_indptr != nullptr) job.kv_indptr[r + 1] = static_cast<int32_t>(entries_to);
    job.kv_lens[r] = range.len;
    if (job.whole_lens != nullptr) job.whole_lens[r] = range.whole_len;
    job.first_pos[r] = range.first_pos;
    job.table_starts[r] = range.table_start;
    if (job.kv_last_page_len != nullptr) job.kv_last_page_len[r] = last_page_len(range.len, job.ranges.page_size);
  }
  if (thread == 0 && job.seq_lens_sum >= 0 && seq_lens_before != job.seq_lens_sum) {
    report_to(job.report, {0, KvRangeFault::kSum, 0, 0, seq_lens_before, job.seq_lens_sum});
  }
}

/// A column of CTAs a request: its entries.
__global__ void __launch_bounds__(kGatherThreads) gather_kernel(const __grid_constant__ ListsJob job) {
  const auto request = static_cast<int32_t>(blockIdx.x);
  const auto lane = static_cast<int32_t>(blockIdx.y * blockDim.x + threadIdx.x);
  write_listed(job, request, lane, static_cast<int32_t>(gridDim.y * blockDim.x),
               [&](const ListReport& found) { report_to(job.report, found); });
}

/// Likewise, where offsets are given.
__global__ void __launch_bounds__(kGatherThreads)
    create_kernel(const __grid_constant__ KvIndicesJob job, ListReport* const to) {
  const auto request = static_cast<int32_t>(blockIdx.x);
  const auto lane = static_cast<int32_t>(blockIdx.y * blockDim.x + threadIdx.x);
  create_entries(job, request, lane, static_cast<int32_t>(gridDim.y * blockDim.x),
                 [&](const ListReport& found) { report_to(to, found); });
}

dim3 gather_grid(int32_t num_requests, int64_t num_columns, int32_t page_size) {
  const int64_t columns = num_columns / page_size;
  const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(columns / kListEntriesPerBlock, 1, kMostGatherBlocks));
  return {static_cast<unsigned>(num_requests), blocks};
}

}  // namespace

std::shared_ptr<ListReport> make_report(int32_t device) {
  const platform::cuda::DeviceScope scope(device);
  auto memory = std::make_shared<platform::cuda::PinnedMemory>(sizeof(ListReport));
  return {memory, new (memory->data()) ListReport()};
}

void build_lists(int32_t device, const ListsJob& job, Stream stream) {
  const platform::cuda::DeviceScope scope(device);
  auto* const cuda_stream = static_cast<cudaStream_t>(stream.handle);
  ranges_kernel<<<1, kRangeThreads, 0, cuda_stream>>>(job);
  platform::cuda::check(cudaGetLastError(), "launching the lengths' kernel");
  if (job.given_kv_indptr != nullptr || job.ranges.num_requests == 0) return;
  const dim3 grid = gather_grid(job.ranges.num_requests, job.table.num_columns, job.ranges.page_size);
  gather_kernel<<<grid, kGatherThreads, 0, cuda_stream>>>(job);
  platform::cuda::check(cudaGetLastError(), "launching the gathering of slots");
}

void create_kv_indices(int32_t device, const KvIndicesJob& job, int32_t num_requests, ListReport* report,
                       Stream stream) {
  if (num_requests == 0) return;
  const platform::cuda::DeviceScope scope(device);
  const dim3 grid = gather_grid(num_requests, job.table.num_columns, job.page_size);
  create_kernel<<<grid, kGatherThreads, 0, static_cast<cudaStream_t>(stream.handle)>>>(job, report);
  platform::cuda::check(cudaGetLastError(), "launching the gathering of slots");
}

}  // namespace folio::inline v0::backends::token_pool::gpu
