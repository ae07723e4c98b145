#include <climits>

#include "kernels/cuda/common/block_sum.cuh"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/common/table_entry.cuh"
#include "kernels/cuda/common/tables/tables.hpp"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kSumThreads = 1024;
constexpr int64_t kEntriesPerBlock = 8192;
constexpr int32_t kMaxRows = 65535;  // of a grid

__device__ void report(int32_t* status) {
  if (status != nullptr) *status = 1;
}

/// `length` is at most INT_MAX.
__device__ int64_t units_of(int64_t length, int32_t unit) {
  return (static_cast<uint32_t>(length) + static_cast<uint32_t>(unit) - 1) / static_cast<uint32_t>(unit);
}

/// One thread block. A thread takes kPerThread neighbours, so that few barriers are met.
__global__ void __launch_bounds__(kSumThreads) indptr_kernel(const __grid_constant__ IndptrParams params) {
  constexpr int32_t kPerThread = 4;
  __shared__ int64_t sums[kSumThreads / 32 + 1];
  if (threadIdx.x == 0) params.indptr[0] = 0;
  int64_t before = 0;
  for (int64_t block = 0; block < params.n; block += int64_t{kSumThreads} * kPerThread) {
    const int64_t first = block + int64_t{threadIdx.x} * kPerThread;
    int64_t lengths[kPerThread], units[kPerThread];
    int64_t mine = 0;
#pragma unroll
    for (int32_t k = 0; k < kPerThread; ++k) {
      const int32_t given = first + k < params.n ? params.lens[first + k] : 0;
      if (given < 0) report(params.status);
      lengths[k] = max(0, given);
      units[k] = units_of(lengths[k], params.unit);
      mine += units[k];
    }
    const BlockSum<kSumThreads> sum(mine, sums);
    int64_t to = before + sum.to - mine;
#pragma unroll
    for (int32_t k = 0; k < kPerThread; ++k) {
      const int64_t i = first + k;
      if (i >= params.n) break;
      to += units[k];
      if (to > INT_MAX) report(params.status);
      params.indptr[i + 1] = static_cast<int32_t>(min(to, int64_t{INT_MAX}));
      if (params.last_unit_len != nullptr) {
        params.last_unit_len[i] = units[k] == 0 ? 0 : static_cast<int32_t>(lengths[k] - (units[k] - 1) * params.unit);
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

constexpr int32_t kNeighbours = 4;  // of a list, written at once

/// Entries j .. j + 3 of a row's list, the first of which may lie before the row and the last beyond it.
struct Neighbours {
  int64_t j = 0;
  uint32_t column = 0;   ///< of the first that the row has
  uint32_t in_page = 0;  ///< its place there
  int32_t first = 0;     ///< of the row's among the four
  int32_t end = 0;
  int32_t pages[kNeighbours] = {};  ///< this column's and those behind it, as far as they are needed and exist

  Neighbours() = default;
  __device__ Neighbours(const ListParams& params, const RowEntries& row, int64_t entries, int64_t at) : j(at) {
    first = static_cast<int32_t>(min(max(-j, int64_t{0}), int64_t{kNeighbours}));
    end = static_cast<int32_t>(min(max(entries - j, int64_t{0}), int64_t{kNeighbours}));
    if (first >= end) return;
    const auto place = static_cast<uint32_t>(j + first);
    column = params.tokens ? params.pages.quotient(place) : place;
    in_page = params.tokens ? place - column * params.pages.divisor() : 0;
    const int64_t last = in_page + static_cast<int64_t>(end - first) - 1;
#pragma unroll
    for (int32_t k = 0; k < kNeighbours; ++k) {
      if (last >= k * int64_t{params.pages.divisor()} && column + k < row.count) pages[k] = row.first[column + k];
    }
  }
  __device__ void next_page() {
    in_page = 0;
    ++column;
#pragma unroll
    for (int32_t k = 1; k < kNeighbours; ++k) pages[k - 1] = pages[k];
  }
};

/// `to` is aligned to four values, or 16 bytes.
template <typename Value>
__device__ void store_neighbours(Value* to, const Value (&values)[kNeighbours]) {
  if constexpr (sizeof(Value) == 4) {
    *reinterpret_cast<int4*>(to) = make_int4(values[0], values[1], values[2], values[3]);
  } else {
    reinterpret_cast<longlong2*>(to)[0] = make_longlong2(values[0], values[1]);
    reinterpret_cast<longlong2*>(to)[1] = make_longlong2(values[2], values[3]);
  }
}

/// Column y of thread blocks: row y's entries, kUnroll groups of four neighbours a thread. Groups begin where four
/// values can be stored at once.
template <typename Value>
__global__ void __launch_bounds__(kThreads) list_kernel(const __grid_constant__ ListParams params) {
  constexpr int32_t kUnroll = 2;
  Value* const out = reinterpret_cast<Value*>(sizeof(Value) == 4 ? static_cast<void*>(params.out32) : params.out64);
  const auto misplaced = static_cast<int32_t>(reinterpret_cast<uintptr_t>(out) / sizeof(Value) % kNeighbours);
  const int64_t step = int64_t{gridDim.x} * kThreads * kUnroll * kNeighbours;
  for (int64_t row = blockIdx.y; row < params.n; row += gridDim.y) {
    const int64_t length = max(0, params.lens[row]);
    const int64_t entries = params.tokens ? length : units_of(length, params.page_size);
    const int64_t begin = params.indptr[row];
    const RowEntries pages(params.table, row);
    const int64_t before = (begin + misplaced) & (kNeighbours - 1);  // of the first group, before the row
    for (int64_t block = (int64_t{blockIdx.x} * kThreads * kUnroll + threadIdx.x) * kNeighbours - before;
         block < entries; block += step) {
      Neighbours groups[kUnroll];
#pragma unroll
      for (int32_t u = 0; u < kUnroll; ++u) {
        groups[u] = Neighbours(params, pages, entries, block + u * kThreads * kNeighbours);
      }
#pragma unroll
      for (int32_t u = 0; u < kUnroll; ++u) {
        Neighbours& group = groups[u];
        Value values[kNeighbours] = {};
        bool good = true;
#pragma unroll
        for (int32_t k = 0; k < kNeighbours; ++k) {
          if (k < group.first || k >= group.end) continue;
          const bool exists = group.column < pages.count;
          const int64_t value =
              exists ? group.pages[0] * params.page_stride + group.in_page * params.token_stride : 0;
          values[k] = static_cast<Value>(value);
          if (values[k] != value) values[k] = 0, good = false;
          good = good && exists;
          if (++group.in_page == params.pages.divisor()) group.next_page();
        }
        const int64_t at = begin + group.j;
        if (group.first == 0 && group.end == kNeighbours && at >= 0 && at + kNeighbours <= params.capacity) {
          store_neighbours(out + at, values);
        } else {
#pragma unroll
          for (int32_t k = 0; k < kNeighbours; ++k) {
            if (k < group.first || k >= group.end) continue;
            const bool has_room = at + k >= 0 && at + k < params.capacity;
            if (has_room) out[at + k] = values[k];
            good = good && has_room;
          }
        }
        if (!good) report(params.status);
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
  indptr_kernel<<<1, kSumThreads, 0, native(stream)>>>(params);
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
  params.pages = FastDiv(params.tokens ? params.page_size : 1);
  auto* const kernel = params.out64 != nullptr ? list_kernel<int64_t> : list_kernel<int32_t>;
  kernel<<<rows_grid(params.n, params.capacity / params.n), kThreads, 0, native(stream)>>>(params);
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
