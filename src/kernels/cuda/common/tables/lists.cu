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

/// `length` is at most INT_MAX.
__device__ int64_t units_of(int64_t length, int32_t unit) {
  return (static_cast<uint32_t>(length) + static_cast<uint32_t>(unit) - 1) / static_cast<uint32_t>(unit);
}

/// One thread block. A thread takes kPerThread neighbours.
template <int32_t kPerThread>
__global__ void __launch_bounds__(kThreads) indptr_kernel(const __grid_constant__ IndptrParams params) {
  __shared__ int64_t sums[kThreads / 32 + 1];
  if (threadIdx.x == 0) params.indptr[0] = 0;
  int64_t before = 0;
  for (int64_t block = 0; block < params.n; block += int64_t{kThreads} * kPerThread) {
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
    const BlockSum<kThreads> sum(mine, sums);
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

/// A row's list, and where it goes.
template <typename Value>
struct RowList {
  RowEntries pages;
  int64_t entries;
  int64_t begin;  ///< of the list in `out`
  Value* out;
};

/// Entries [j, j + 4) of a row's list, as far as the row has them, one by one.
template <typename Value>
__device__ void list_singly(const ListParams& params, const RowList<Value>& list, int64_t j) {
  const int64_t end = min(j + kNeighbours, list.entries);
  for (int64_t i = max(j, int64_t{0}); i < end; ++i) {
    const int64_t at = list.begin + i;
    const bool has_room = at >= 0 && at < params.capacity;
    const uint32_t column = params.pages.quotient(static_cast<uint32_t>(i));
    const uint32_t in_page = static_cast<uint32_t>(i) - column * params.pages.divisor();
    const bool exists = column < list.pages.count;
    const int64_t value =
        exists ? list.pages.first[column] * params.page_stride + in_page * params.token_stride : 0;
    const auto stored = static_cast<Value>(value);
    if (!has_room || !exists || stored != value) report(params.status);
    if (has_room) list.out[at] = stored == value ? stored : 0;
  }
}

/// Four entries of a row's list that lie on two pages at most.
struct Neighbours {
  int64_t j = 0;
  uint32_t column = 0;  ///< of the first
  uint32_t here = 0;    ///< entries from the first one on that its page holds
  int32_t page = 0;
  int32_t next = 0;  ///< the next column's page, if it is needed

  Neighbours() = default;
  /// False for entries that are to be listed one by one.
  template <typename Value>
  __device__ bool read(const ListParams& params, const RowList<Value>& list, int64_t at) {
    j = at;
    const int64_t to = list.begin + j;
    if (j < 0 || j + kNeighbours > list.entries || to < 0 || to + kNeighbours > params.capacity) return false;
    column = params.pages.quotient(static_cast<uint32_t>(j));
    here = (column + 1) * params.pages.divisor() - static_cast<uint32_t>(j);
    const bool one_page = here >= kNeighbours;
    if (column + (one_page ? 0 : 1) >= list.pages.count) return false;
    page = list.pages.first[column];
    if (!one_page) next = list.pages.first[column + 1];
    return params.pages.divisor() + here >= kNeighbours;
  }
  /// False where a value does not fit: nothing is written.
  template <typename Value>
  __device__ bool write(const ListParams& params, const RowList<Value>& list) const {
    const int64_t in_page = int64_t{params.pages.divisor()} - here;
    const int64_t on_page = page * params.page_stride + in_page * params.token_stride;
    const int64_t on_next = next * params.page_stride - here * params.token_stride;
    Value values[kNeighbours];
    bool fits = true;
#pragma unroll
    for (uint32_t k = 0; k < kNeighbours; ++k) {
      const int64_t value = (k < here ? on_page : on_next) + k * params.token_stride;
      values[k] = static_cast<Value>(value);
      fits = fits && values[k] == value;
    }
    if (!fits) return false;
    Value* const to = list.out + list.begin + j;
    if constexpr (sizeof(Value) == 4) {
      *reinterpret_cast<int4*>(to) = make_int4(values[0], values[1], values[2], values[3]);
    } else {
      reinterpret_cast<longlong2*>(to)[0] = make_longlong2(values[0], values[1]);
      reinterpret_cast<longlong2*>(to)[1] = make_longlong2(values[2], values[3]);
    }
    return true;
  }
};

/// Column y of thread blocks: row y's entries, kUnroll groups of four neighbours a thread. Groups begin where four
/// values can be stored at once.
template <typename Value>
__global__ void __launch_bounds__(kThreads) list_kernel(const __grid_constant__ ListParams params) {
  constexpr int32_t kUnroll = 2;
  RowList<Value> list{{params.table, -1}, 0, 0, nullptr};
  if constexpr (sizeof(Value) == 4) {
    list.out = params.out32;
  } else {
    list.out = params.out64;
  }
  const auto misplaced = static_cast<int64_t>(reinterpret_cast<uintptr_t>(list.out) / sizeof(Value) % kNeighbours);
  const int64_t step = int64_t{gridDim.x} * kThreads * kUnroll * kNeighbours;
  for (int64_t row = blockIdx.y; row < params.n; row += gridDim.y) {
    const int64_t length = max(0, params.lens[row]);
    list.entries = params.tokens ? length : units_of(length, params.page_size);
    list.begin = params.indptr[row];
    list.pages = RowEntries(params.table, row);
    const int64_t before = (list.begin + misplaced) & (kNeighbours - 1);  // of the first group, before the row
    for (int64_t first = (int64_t{blockIdx.x} * kThreads * kUnroll + threadIdx.x) * kNeighbours - before;
         first < list.entries; first += step) {
      Neighbours groups[kUnroll];
      bool whole[kUnroll];
#pragma unroll
      for (int32_t u = 0; u < kUnroll; ++u) {
        whole[u] = groups[u].read(params, list, first + u * kThreads * kNeighbours);
      }
#pragma unroll
      for (int32_t u = 0; u < kUnroll; ++u) {
        if (!whole[u] || !groups[u].write(params, list)) list_singly(params, list, groups[u].j);
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
  auto* const kernel = params.n <= kThreads ? indptr_kernel<1> : indptr_kernel<8>;
  kernel<<<1, kThreads, 0, native(stream)>>>(params);
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
