#include "kernels/cuda/common/kv_cache_views.cuh"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/common/tables/tables.cuh"
#include "kernels/cuda/common/tables/tables.hpp"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kDenseThreads = 256;
constexpr int32_t kMaxDenseRows = 65535;  // of a grid
constexpr int32_t kFew = 4, kMany = 16;   ///< columns that a thread has in flight, of short rows and of long ones

/// Column y of CTAs: row y.
template <int32_t kUnroll>
__global__ void __launch_bounds__(kDenseThreads) dense_kernel(const __grid_constant__ DenseParams params) {
  for (int64_t row = blockIdx.y; row < params.n; row += gridDim.y) {
    const int32_t length = params.lens[row];
    const RowEntries entries(params.table, row);
    const int64_t pages = units_of(max(0, length), params.page_size);
    const auto wanted = static_cast<int32_t>(min(pages, int64_t{params.columns}));
    const auto sure = static_cast<int32_t>(max(min(entries.count, int64_t{wanted}), int64_t{0}));
    const bool fits = length >= 0 && pages <= params.columns && sure == wanted;
    if (threadIdx.x == 0 && blockIdx.x == 0 && !fits) report(params.status);
    int32_t* const out = params.out + row * params.columns;
    const int64_t step = int64_t{gridDim.x} * kDenseThreads * kUnroll;
    for (int64_t first = int64_t{blockIdx.x} * kDenseThreads * kUnroll; first < params.columns; first += step) {
      const auto mine = static_cast<uint32_t>(first) + threadIdx.x;
      int32_t values[kUnroll];
#pragma unroll
      for (int32_t u = 0; u < kUnroll; ++u) {
        const uint32_t column = mine + u * kDenseThreads;
        values[u] = column < static_cast<uint32_t>(wanted) ? 0 : params.fill;
        if (column < static_cast<uint32_t>(sure)) values[u] = __ldg(entries.first + column);
      }
#pragma unroll
      for (int32_t u = 0; u < kUnroll; ++u) {
        const uint32_t column = mine + u * kDenseThreads;
        if (column < static_cast<uint32_t>(params.columns)) out[column] = values[u];
      }
    }
  }
}

__global__ void __launch_bounds__(kDenseThreads) validate_kernel(const __grid_constant__ ValidateParams params) {
  for (int64_t row = blockIdx.y; row < params.n; row += gridDim.y) {
    const int32_t length = params.lens[row];
    const int64_t pages = units_of(max(0, length), params.page_size);
    const RowEntries entries(params.table, row);
    if (length < 0 || pages > entries.count) report(params.status);
    const int64_t step = int64_t{gridDim.x} * kDenseThreads;
    const int64_t end = min(pages, entries.count);
    for (int64_t column = int64_t{blockIdx.x} * kDenseThreads + threadIdx.x; column < end; column += step) {
      const int32_t page = entries.first[column];
      if (page < 0 || page >= params.num_pages) report(params.status);
    }
  }
}

dim3 rows_grid(int32_t rows, int64_t entries_per_row, int64_t entries_per_block) {
  return {grid_for(entries_per_row, entries_per_block, 64), static_cast<uint32_t>(std::min(rows, kMaxDenseRows))};
}

}  // namespace

void enqueue(const DenseParams& params, Stream stream) {
  if (params.n == 0 || params.columns == 0) return;
  const bool few = params.columns <= kDenseThreads * kFew;
  const dim3 grid = rows_grid(params.n, params.columns, kDenseThreads * (few ? kFew : kMany));
  (few ? dense_kernel<kFew> : dense_kernel<kMany>)<<<grid, kDenseThreads, 0, native(stream)>>>(params);
  check_launch("a dense table");
}

void enqueue(const ValidateParams& params, Stream stream) {
  if (params.n == 0) return;
  // How long rows are is known on the device only.
  validate_kernel<<<rows_grid(params.n, 4096, 4096), kDenseThreads, 0, native(stream)>>>(params);
  check_launch("a table's check");
}

}  // namespace folio::inline v0::kernels::cuda
