#include <climits>

#include "kernels/cuda/common/block_sum.cuh"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/common/table_entry.cuh"
#include "kernels/cuda/common/tables/tables.hpp"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kThreads = 256;
constexpr int64_t kEntriesPerBlock = 8192;
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

/// A value of a list: a page's, or a token's in it.
struct ListValue {
  int64_t value;
  bool exists;
};

/// Column y of thread blocks: row y's entries, four a thread at a time.
__global__ void __launch_bounds__(kThreads) list_kernel(const __grid_constant__ ListParams params) {
  constexpr int32_t kUnroll = 4;
  for (int64_t row = blockIdx.y; row < params.n; row += gridDim.y) {
    const int64_t length = max(0, params.lens[row]);
    const int64_t entries = params.tokens ? length : units_of(length, params.page_size);
    const int64_t begin = params.indptr[row];
    const RowEntries pages(params.table, row);
    const int64_t step = int64_t{gridDim.x} * kThreads * kUnroll;
    for (int64_t first = int64_t{blockIdx.x} * kThreads * kUnroll + threadIdx.x; first < entries; first += step) {
      ListValue values[kUnroll];
#pragma unroll
      for (int32_t u = 0; u < kUnroll; ++u) {
        const auto place = static_cast<uint32_t>(min(first + u * kThreads, entries - 1));
        const uint32_t column = params.tokens ? params.pages.quotient(place) : place;
        const uint32_t in_page = params.tokens ? params.pages.remainder(place) : 0;
        values[u] = {0, column < pages.count};
        if (!values[u].exists) continue;
        values[u].value = pages.first[column] * params.page_stride + in_page * params.token_stride;
      }
#pragma unroll
      for (int32_t u = 0; u < kUnroll; ++u) {
        const int64_t j = first + u * kThreads;
        const int64_t at = begin + j;
        if (j >= entries) break;
        const bool has_room = at >= 0 && at < params.capacity;
        const int64_t value = values[u].value;
        const bool fits = params.out64 != nullptr || (value >= INT_MIN && value <= INT_MAX);
        if (!has_room || !values[u].exists || !fits) report(params.status);
        if (!has_room) continue;
        if (params.out64 != nullptr) {
          params.out64[at] = value;
        } else {
          params.out32[at] = fits ? static_cast<int32_t>(value) : 0;
        }
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads) dense_kernel(const __grid_constant__ DenseParams params) {
  for (int64_t row = blockIdx.y; row < params.n; row += gridDim.y) {
    const int32_t length = params.lens[row];
    const int64_t pages = units_of(max(0, length), params.page_size);
    const RowEntries entries(params.table, row);
    if (threadIdx.x == 0 && blockIdx.x == 0 && (length < 0 || pages > params.columns)) report(params.status);
    const int64_t step = int64_t{gridDim.x} * kThreads;
    for (int64_t column = int64_t{blockIdx.x} * kThreads + threadIdx.x; column < params.columns; column += step) {
      int32_t value = params.fill;
      if (column < pages) {
        const bool exists = column < entries.count;
        if (!exists) report(params.status);
        value = exists ? entries.first[column] : 0;
      }
      params.out[row * params.columns + column] = value;
    }
  }
}

__global__ void __launch_bounds__(kThreads) validate_kernel(const __grid_constant__ ValidateParams params) {
  for (int64_t row = blockIdx.y; row < params.n; row += gridDim.y) {
    const int32_t length = params.lens[row];
    const int64_t pages = units_of(max(0, length), params.page_size);
    const RowEntries entries(params.table, row);
    if (length < 0 || pages > entries.count) report(params.status);
    const int64_t step = int64_t{gridDim.x} * kThreads;
    const int64_t end = min(pages, entries.count);
    for (int64_t column = int64_t{blockIdx.x} * kThreads + threadIdx.x; column < end; column += step) {
      const int32_t page = entries.first[column];
      if (page < 0 || page >= params.num_pages) report(params.status);
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

void enqueue(const ListParams& given, Stream stream) {
  if (given.n == 0 || given.capacity == 0) return;
  ListParams params = given;
  params.pages = FastDiv(params.page_size);
  list_kernel<<<rows_grid(params.n, params.capacity / params.n), kThreads, 0, native(stream)>>>(params);
  check_launch("a list of pages or tokens");
}

void enqueue(const DenseParams& params, Stream stream) {
  if (params.n == 0 || params.columns == 0) return;
  dense_kernel<<<rows_grid(params.n, params.columns), kThreads, 0, native(stream)>>>(params);
  check_launch("a dense table");
}

void enqueue(const ValidateParams& params, Stream stream) {
  if (params.n == 0) return;
  // How long rows are is known on the device only.
  constexpr int64_t kTypicalPages = 4096;
  validate_kernel<<<rows_grid(params.n, kTypicalPages), kThreads, 0, native(stream)>>>(params);
  check_launch("a table's check");
}

}  // namespace folio::inline v0::kernels::cuda
