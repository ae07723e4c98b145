#include <climits>

#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/common/table_entry.cuh"
#include "kernels/cuda/common/tables/tables.hpp"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kThreads = 256;

__device__ void report(int32_t* status) {
  if (status != nullptr) *status = 1;
}

/// A token's slot, -1 where it lies on another rank, -2 where it lies nowhere.
__device__ int64_t slot_of(const SlotParams& params, int64_t token) {
  const int64_t position = params.positions[token];
  if (position < 0) return -1;
  const int64_t span = int64_t{params.page_size} * params.shard.world;
  const int64_t cycle = int64_t{params.shard.interleave} * params.shard.world;
  const int64_t in_page = position % span;
  if (in_page / params.shard.interleave % params.shard.world != params.shard.rank) return -1;
  const int64_t page = table_entry(params.table, params.token_row[token], position / span);
  if (page < 0) return -2;
  return page * params.page_size + in_page / cycle * params.shard.interleave + in_page % params.shard.interleave;
}

__global__ void __launch_bounds__(kThreads) slots_kernel(const __grid_constant__ SlotParams params) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t t = int64_t{blockIdx.x} * kThreads + threadIdx.x; t < params.num_tokens; t += step) {
    const int64_t slot = slot_of(params, t);
    if (slot == -2) report(params.status);
    params.slots[t] = max(slot, int64_t{-1});
  }
}

__global__ void __launch_bounds__(kThreads) expand_kernel(const __grid_constant__ ExpandParams params) {
  const int64_t total = params.n * params.ratio;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < total; i += int64_t{gridDim.x} * kThreads) {
    const int64_t page = params.pages[i / params.ratio];
    const bool fits = page >= 0 && (page + 1) * params.ratio - 1 <= INT_MAX;
    if (!fits) report(params.status);
    params.out[i] = fits ? static_cast<int32_t>(page * params.ratio + i % params.ratio) : -1;
  }
}

__global__ void __launch_bounds__(kThreads) shard_lens_kernel(const __grid_constant__ ShardLensParams params) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < params.n; i += int64_t{gridDim.x} * kThreads) {
    const int32_t length = params.lens[i];
    if (length < 0) report(params.status);
    const int64_t cycle = int64_t{params.shard.world} * params.shard.interleave;
    const int64_t tokens = max(0, length);
    const int64_t rest = tokens % cycle - int64_t{params.shard.rank} * params.shard.interleave;
    const int64_t partial = min(max(rest, int64_t{0}), int64_t{params.shard.interleave});
    params.out[i] = static_cast<int32_t>(tokens / cycle * params.shard.interleave + partial);
  }
}

}  // namespace

void enqueue(const SlotParams& params, Stream stream) {
  if (params.num_tokens == 0) return;
  slots_kernel<<<grid_for(params.num_tokens, kThreads), kThreads, 0, native(stream)>>>(params);
  check_launch("the slot mapping");
}

void enqueue(const ExpandParams& params, Stream stream) {
  if (params.n == 0) return;
  expand_kernel<<<grid_for(params.n * params.ratio, kThreads), kThreads, 0, native(stream)>>>(params);
  check_launch("the expansion of pages");
}

void enqueue(const ShardLensParams& params, Stream stream) {
  if (params.n == 0) return;
  shard_lens_kernel<<<grid_for(params.n, kThreads), kThreads, 0, native(stream)>>>(params);
  check_launch("a shard's lengths");
}

}  // namespace folio::inline v0::kernels::cuda
