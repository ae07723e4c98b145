#include <climits>

#include "kernels/cuda/common/block_sum.cuh"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/common/table_entry.cuh"
#include "kernels/cuda/common/tables/tables.hpp"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kThreads = 256;
constexpr int64_t kEntriesPerBlock = 4096;
constexpr int32_t kMaxRows = 65535;  // of a grid

__device__ void report(int32_t* status) {
  if (status != nullptr) *status = 1;
}

__device__ int64_t units_of(int64_t length, int32_t unit) {
  return (length + unit - 1) / unit;
}

/// One thread block.
__global__ void __launch_bounds__(kThreads) indptr_kernel(const __grid_constant__ IndptrParams params) {
  __shared__ int64_t sums[kThreads / 32 + 1];
  if (threadIdx.x == 0) params.indptr[0] = 0;
  int64_t before = 0;
  for (int32_t first = 0; first < params.n; first += kThreads) {
    const int32_t i = first + static_cast<int32_t>(threadIdx.x);
    const int32_t given = i < params.n ? params.lens[i] : 0;
    if (given < 0) report(params.status);
    const int64_t length = max(0, given);
    const int64_t units = units_of(length, params.unit);
    const BlockSum<kThreads> sum(units, sums);
    if (i < params.n) {
      const int64_t to = before + sum.to;
      if (to > INT_MAX) report(params.status);
      params.indptr[i + 1] = static_cast<int32_t>(min(to, int64_t{INT_MAX}));
      if (params.last_unit_len != nullptr) {
        params.last_unit_len[i] = units == 0 ? 0 : static_cast<int32_t>(length - (units - 1) * params.unit);
      }
    }
    before += sum.all;
  }
}

__global__ void __launch_bounds__(kThreads) lens_kernel(const __grid_constant__ LensParams params) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < params.n; i += int64_t{gridDim.x} * kThreads) {
    const int64_t units = int64_t{params.indptr[i + 1]} - params.indptr[i];
    const int32_t last = params.last_unit_len[i];
    const bool fits = params.indptr[i] >= 0 && units >= 0 && last >= (units == 0 ? 0 : 1) && last <= params.unit;
    const int64_t length = fits && units > 0 ? (units - 1) * params.unit + last : 0;
    if (!fits || length > INT_MAX) report(params.status);
    params.lens[i] = length > INT_MAX ? 0 : static_cast<int32_t>(length);
  }
}

/// Column y of thread blocks: row y's entries.
__global__ void __launch_bounds__(kThreads) list_kernel(const __grid_constant__ ListParams params) {
  for (int64_t row = blockIdx.y; row < params.n; row += gridDim.y) {
    const int64_t length = max(0, params.lens[row]);
    const int64_t entries = params.tokens ? length : units_of(length, params.page_size);
    const int64_t begin = params.indptr[row];
    const int64_t step = int64_t{gridDim.x} * kThreads;
    for (int64_t j = int64_t{blockIdx.x} * kThreads + threadIdx.x; j < entries; j += step) {
      const int64_t at = begin + j;
      if (at < 0 || at >= params.capacity) {
        report(params.status);
        break;
      }
      const int64_t column = params.tokens ? j / params.page_size : j;
      const bool exists = has_entry(params.table, row, column);
      const int64_t page = exists ? table_entry(params.table, row, column) : 0;
      const int64_t value =
          exists ? page * params.page_stride + (j - column * params.page_size) * params.token_stride : 0;
      const bool fits = params.out64 != nullptr || (value >= INT_MIN && value <= INT_MAX);
      if (!exists || !fits) report(params.status);
      if (params.out64 != nullptr) {
        params.out64[at] = value;
      } else {
        params.out32[at] = fits ? static_cast<int32_t>(value) : 0;
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads) dense_kernel(const __grid_constant__ DenseParams params) {
  for (int64_t row = blockIdx.y; row < params.n; row += gridDim.y) {
    const int32_t length = params.lens[row];
    const int64_t pages = units_of(max(0, length), params.page_size);
    if (threadIdx.x == 0 && blockIdx.x == 0 && (length < 0 || pages > params.columns)) report(params.status);
    const int64_t step = int64_t{gridDim.x} * kThreads;
    for (int64_t column = int64_t{blockIdx.x} * kThreads + threadIdx.x; column < params.columns; column += step) {
      int32_t value = params.fill;
      if (column < pages) {
        const bool exists = has_entry(params.table, row, column);
        if (!exists) report(params.status);
        value = exists ? static_cast<int32_t>(table_entry(params.table, row, column)) : 0;
      }
      params.out[row * params.columns + column] = value;
    }
  }
}

dim3 rows_grid(int32_t rows, int64_t entries_per_row) {
  return {grid_for(entries_per_row, kEntriesPerBlock, 64), static_cast<uint32_t>(std::min(rows, kMaxRows))};
}

}  // namespace

void enqueue(const IndptrParams& params, Stream stream) {
  indptr_kernel<<<1, kThreads, 0, native(stream)>>>(params);
  check_launch("a list's beginnings");
}

void enqueue(const LensParams& params, Stream stream) {
  if (params.n == 0) return;
  lens_kernel<<<grid_for(params.n, kThreads), kThreads, 0, native(stream)>>>(params);
  check_launch("lengths from pages");
}

void enqueue(const ListParams& params, Stream stream) {
  if (params.n == 0 || params.capacity == 0) return;
  list_kernel<<<rows_grid(params.n, params.capacity / params.n), kThreads, 0, native(stream)>>>(params);
  check_launch("a list of pages or tokens");
}

void enqueue(const DenseParams& params, Stream stream) {
  if (params.n == 0 || params.columns == 0) return;
  dense_kernel<<<rows_grid(params.n, params.columns), kThreads, 0, native(stream)>>>(params);
  check_launch("a dense table");
}

}  // namespace folio::inline v0::kernels::cuda
