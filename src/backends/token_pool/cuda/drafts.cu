#include <cuda_runtime.h>

#include <algorithm>

#include "backends/token_pool/cuda/report.cuh"
#include "backends/token_pool/gpu.hpp"
#include "platform/cuda/device.hpp"

/// Draft branches and trees. Bodies are the rules of device/; a kernel says which thread has what.
namespace folio::inline v0::backends::token_pool::gpu {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kMostColumnBlocks = 32;  ///< CTAs that share a request's entries or bytes
constexpr int64_t kDraftEntriesPerBlock = 4096;

unsigned column_blocks(int64_t entries) {
  return static_cast<unsigned>(std::clamp<int64_t>(entries / kDraftEntriesPerBlock, 1, kMostColumnBlocks));
}

/// CTAs for a thread each of `threads`.
unsigned blocks_for(int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

/// A CTA, or a few, for every branch at every step.
__global__ void __launch_bounds__(kThreads)
    draft_indices_kernel(const __grid_constant__ DraftIndicesJob job, ListReport* const to) {
  __shared__ int64_t sums[kThreads];
  const auto step = static_cast<int32_t>(blockIdx.y) + 1;
  if (job.num_requests == 0) {
    if (threadIdx.x == 0) job.indptr[(step - 1) * job.indptr_stride] = 0;
    return;
  }
  const auto request = static_cast<int32_t>(blockIdx.x / job.branches.topk);
  const auto branch = static_cast<int32_t>(blockIdx.x % job.branches.topk);
  const int64_t sum_before = sum_of(request, sums, [&](int32_t r) { return job.counted_len(r); });
  write_draft_branch(
      job, sum_before, request, branch, step, static_cast<int32_t>(blockIdx.z * blockDim.x + threadIdx.x),
      static_cast<int32_t>(gridDim.z * blockDim.x), [&](const ListReport& found) { report_to(to, found); });
}

/// A CTA a request: nodes are the selected candidates in order.
__global__ void __launch_bounds__(kThreads)
    select_kernel(const __grid_constant__ DraftSelectionJob job, ListReport* const to) {
  __shared__ int64_t sums[kThreads];
  const auto request = static_cast<int32_t>(blockIdx.x);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const float* const scores = job.scores + int64_t{request} * job.num_candidates;
  if (thread == 0) write_selected(job, request, 0, -1);
  int32_t nodes_before = 0;
  for (int32_t first = 0; first < job.num_candidates; first += kThreads) {
    const int32_t candidate = first + thread;
    const bool exists = candidate < job.num_candidates;
    if (exists && scores[candidate] != scores[candidate]) {
      report_to(to, {0, KvRangeFault::kScore, request, candidate, 0, 0});
    }
    const bool selected = exists && is_selected(scores, job.num_candidates, job.num_nodes - 1, candidate);
    const auto node = nodes_before + static_cast<int32_t>(inclusive_sum(selected ? 1 : 0, sums));
    if (selected) write_selected(job, request, node, candidate);
    nodes_before += static_cast<int32_t>(sums[kThreads - 1]);
    __syncthreads();
  }
}

/// A thread a node.
__global__ void __launch_bounds__(kThreads)
    parents_kernel(const __grid_constant__ DraftParentsJob job, ListReport* const to) {
  const int64_t node = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (node >= int64_t{job.num_requests} * job.num_nodes) return;
  write_parent(job, static_cast<int32_t>(node / job.num_nodes), static_cast<int32_t>(node % job.num_nodes),
               [&](const ListReport& found) { report_to(to, found); });
}

__global__ void __launch_bounds__(kThreads)
    nodes_kernel(const __grid_constant__ DraftNodesJob job, ListReport* const to) {
  const int64_t node = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (node >= int64_t{job.num_requests} * job.num_nodes) return;
  write_node(job, static_cast<int32_t>(node / job.num_nodes), static_cast<int32_t>(node % job.num_nodes),
             [&](const ListReport& found) { report_to(to, found); });
}

/// A CTA, or a few, a request; a thread a byte.
__global__ void __launch_bounds__(kThreads) mask_kernel(const __grid_constant__ TreeMaskJob job, ListReport* const to) {
  __shared__ int64_t sums[kThreads];
  const auto request = static_cast<int32_t>(blockIdx.x);
  const int64_t offset = sum_of(request, sums, [&](int32_t r) { return job.bounded_bytes(r); });
  write_mask(job, request, offset, static_cast<int32_t>(blockIdx.y * blockDim.x + threadIdx.x),
             static_cast<int32_t>(gridDim.y * blockDim.x), [&](const ListReport& found) { report_to(to, found); });
}

cudaStream_t native(Stream stream) {
  return static_cast<cudaStream_t>(stream.handle);
}

}  // namespace

void generate_draft_kv_indices(int32_t device, const DraftIndicesJob& job, ListReport* report, Stream stream) {
  const platform::cuda::DeviceScope scope(device);
  const int64_t branches = int64_t{job.num_requests} * job.branches.topk;
  const dim3 grid(static_cast<unsigned>(std::max<int64_t>(branches, 1)), static_cast<unsigned>(job.num_iterations),
                  column_blocks(job.table.num_columns));
  draft_indices_kernel<<<grid, kThreads, 0, native(stream)>>>(job, report);
  platform::cuda::check(cudaGetLastError(), "launching the lists of draft branches");
}

void select_draft_tokens(int32_t device, const DraftSelectionJob& job, ListReport* report, Stream stream) {
  if (job.num_requests == 0) return;
  const platform::cuda::DeviceScope scope(device);
  select_kernel<<<static_cast<unsigned>(job.num_requests), kThreads, 0, native(stream)>>>(job, report);
  platform::cuda::check(cudaGetLastError(), "launching the selection of draft tokens");
}

void write_parents(int32_t device, const DraftParentsJob& job, ListReport* report, Stream stream) {
  if (job.num_requests == 0) return;
  const platform::cuda::DeviceScope scope(device);
  parents_kernel<<<blocks_for(int64_t{job.num_requests} * job.num_nodes), kThreads, 0, native(stream)>>>(job, report);
  platform::cuda::check(cudaGetLastError(), "launching the parents of draft tokens");
}

void write_nodes(int32_t device, const DraftNodesJob& job, ListReport* report, Stream stream) {
  if (job.num_requests == 0) return;
  const platform::cuda::DeviceScope scope(device);
  nodes_kernel<<<blocks_for(int64_t{job.num_requests} * job.num_nodes), kThreads, 0, native(stream)>>>(job, report);
  platform::cuda::check(cudaGetLastError(), "launching the positions and links of draft trees");
}

void fill_tree_mask(int32_t device, const TreeMaskJob& job, ListReport* report, Stream stream) {
  if (job.num_requests == 0) return;
  const platform::cuda::DeviceScope scope(device);
  const dim3 grid(static_cast<unsigned>(job.num_requests), column_blocks(job.capacity / job.num_requests));
  mask_kernel<<<grid, kThreads, 0, native(stream)>>>(job, report);
  platform::cuda::check(cudaGetLastError(), "launching the mask of draft trees");
}

}  // namespace folio::inline v0::backends::token_pool::gpu
