#pragma once

#include <cstddef>

#include "kernels/cuda/attention_kernel.hpp"
#include "kernels/cuda/sm90/common/config.hpp"
#include "ptx/memory.cuh"

/// What a kernel asks for before it knows what it needs. Each step from the plan to the first copy of keys is a read
/// that waits for the one before: a microsecond each where caches are cold.
namespace folio::inline v0::kernels::cuda::sm90 {

/// Indptr of segment 0's first 32 rows, one per lane. It is loaded before the warp knows which row it needs. All lanes
/// of a warp call it.
class IndptrCache {
 public:
  __device__ __forceinline__ IndptrCache(const AttentionParams& params, int32_t lane) {
    const SegmentParams& segment = params.segments[0];
    if (segment.indptr != nullptr && lane < segment.num_rows) begin_ = segment.indptr[lane];
  }
  __device__ __forceinline__ int32_t begin_of(const AttentionParams& params, const scheduler::WorkTile& tile) const {
    const bool cached = tile.segment == 0 && tile.kv_row < min(params.segments[0].num_rows, 32);
    return cached ? __shfl_sync(0xffffffffu, begin_, tile.kv_row) : params.segments[tile.segment].indptr[tile.kv_row];
  }

 private:
  int32_t begin_ = 0;
};

/// Prefetches the beginning of segment 0's page table to L2, one cache line per thread of the grid. It runs before
/// griddep_wait, when the table may not be read yet: L2 is coherent.
__device__ __forceinline__ void prefetch_page_table(const AttentionParams& params, int32_t threads) {
  constexpr int32_t kLine = 128 / sizeof(int32_t);
  const SegmentParams& segment = params.segments[0];
  if (!segment.paged) return;
  const int32_t line = static_cast<int32_t>(blockIdx.x) * threads + static_cast<int32_t>(threadIdx.x);
  if (line < segment.num_indices / kLine + 1 && line * kLine < segment.num_indices) {
    ptx::prefetch_l2(segment.indices + line * kLine);
  }
  if (line == 0 && segment.indptr != nullptr) ptx::prefetch_l2(segment.indptr);
}

}  // namespace folio::inline v0::kernels::cuda::sm90
