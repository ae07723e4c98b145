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

/// Where a position lies: on which page of all ranks' together, and where on this rank's, if it is this rank's at all.
struct Position {
  uint32_t page = 0;
  int32_t in_page = 0;
  bool here = false;

  Position() = default;
  __device__ Position(const SlotParams& params, int32_t position) {
    if (position < 0) return;
    page = params.span.quotient(position);
    const uint32_t in_span = position - page * params.span.divisor();
    const uint32_t turn = params.cycle.quotient(in_span);
    const uint32_t in_turn = in_span - turn * params.cycle.divisor();
    here = params.interleave.quotient(in_turn) == static_cast<uint32_t>(params.shard.rank);
    in_page = static_cast<int32_t>(turn) * params.shard.interleave +
              static_cast<int32_t>(params.interleave.remainder(in_turn));
  }
};

/// Four tokens a thread at a time: what is looked up for one does not wait for another.
__global__ void __launch_bounds__(kThreads) slots_kernel(const __grid_constant__ SlotParams params) {
  constexpr int32_t kUnroll = 4;
  const int64_t step = int64_t{gridDim.x} * kThreads * kUnroll;
  for (int64_t first = int64_t{blockIdx.x} * kThreads * kUnroll + threadIdx.x; first < params.num_tokens;
       first += step) {
    Position positions[kUnroll];
    int32_t rows[kUnroll];
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      const int64_t t = min(first + u * kThreads, params.num_tokens - 1);
      positions[u] = Position(params, params.positions[t]);
      rows[u] = params.token_row[t];
    }
    int64_t pages[kUnroll];
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      pages[u] = -1;
      if (positions[u].here) pages[u] = table_entry(params.table, rows[u], positions[u].page);
    }
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      const int64_t t = first + u * kThreads;
      if (t >= params.num_tokens) break;
      if (positions[u].here && pages[u] < 0) report(params.status);
      params.slots[t] = pages[u] < 0 ? -1 : pages[u] * params.page_size + positions[u].in_page;
    }
  }
}

__global__ void __launch_bounds__(kThreads) expand_kernel(const __grid_constant__ ExpandParams params) {
  const auto total = static_cast<uint32_t>(params.n * params.ratio);
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < total; i += gridDim.x * kThreads) {
    const int64_t page = params.pages[params.pieces.quotient(i)];
    const bool fits = page >= 0 && (page + 1) * params.ratio - 1 <= INT_MAX;
    if (!fits) report(params.status);
    params.out[i] = fits ? static_cast<int32_t>(page * params.ratio + params.pieces.remainder(i)) : -1;
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

void enqueue(const SlotParams& given, Stream stream) {
  if (given.num_tokens == 0) return;
  SlotParams params = given;
  params.span = FastDiv(params.page_size * params.shard.world);
  params.cycle = FastDiv(params.shard.interleave * params.shard.world);
  params.interleave = FastDiv(params.shard.interleave);
  slots_kernel<<<grid_for(params.num_tokens, 4 * kThreads), kThreads, 0, native(stream)>>>(params);
  check_launch("the slot mapping");
}

void enqueue(const ExpandParams& whole, Stream stream) {
  ExpandParams params = whole;
  params.pieces = FastDiv(params.ratio);
  for_slices(whole.n, whole.ratio, [&](int64_t first, int64_t count) {
    params.pages = whole.pages + first;
    params.n = count;
    params.out = whole.out + first * whole.ratio;
    expand_kernel<<<grid_for(count * params.ratio, kThreads), kThreads, 0, native(stream)>>>(params);
    check_launch("the expansion of pages");
  });
}

void enqueue(const ShardLensParams& params, Stream stream) {
  if (params.n == 0) return;
  shard_lens_kernel<<<grid_for(params.n, kThreads), kThreads, 0, native(stream)>>>(params);
  check_launch("a shard's lengths");
}

}  // namespace folio::inline v0::kernels::cuda
