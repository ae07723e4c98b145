#include <climits>

#include "kernels/cuda/common/block_sum.cuh"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/common/table_entry.cuh"
#include "kernels/cuda/common/tables/tables.hpp"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kSumThreads = 512;
constexpr int64_t kEntriesPerBlock = 4096;
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
__global__ void __launch_bounds__(kSumThreads) indptr_kernel(const __grid_constant__ IndptrParams params) {
  __shared__ int64_t sums[kSumThreads / 32 + 1];
  if (threadIdx.x == 0) params.indptr[0] = 0;
  int64_t before = 0;
  for (int64_t block = 0; block < params.n; block += int64_t{kSumThreads} * kPerThread) {
    const int64_t first = block + int64_t{threadIdx.x} * kPerThread;
    int32_t lengths[kPerThread];
#pragma unroll
    for (int32_t k = 0; k < kPerThread; ++k) lengths[k] = first + k < params.n ? params.lens[first + k] : 0;
    int32_t units[kPerThread];
    int64_t mine = 0;
#pragma unroll
    for (int32_t k = 0; k < kPerThread; ++k) {
      if (lengths[k] < 0) report(params.status);
      lengths[k] = max(0, lengths[k]);
      units[k] = lengths[k] == 0 ? 0 : static_cast<int32_t>(params.units.quotient(lengths[k] - 1)) + 1;
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
      if (params.last_unit_len == nullptr) continue;
      params.last_unit_len[i] = units[k] == 0 ? 0 : lengths[k] - (units[k] - 1) * params.unit;
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

/// A row's list of tokens, and where it goes. What a thread writes at once is 16 bytes.
template <typename Value>
struct RowList {
  static constexpr int32_t kNeighbours = 16 / sizeof(Value);
  RowEntries pages;
  int64_t entries;
  int64_t first_inside;  ///< entries from here to end_inside are the row's, and `out` has room for them
  int64_t end_inside;
  Value* out;  ///< of entry 0

  __device__ RowList(const ListParams& params, int64_t row, Value* all)
      : pages(params.table, row), entries(max(0, params.lens[row])) {
    const int64_t begin = params.indptr[row];
    first_inside = max(int64_t{0}, -begin);
    end_inside = min(entries, params.capacity - begin);
    out = all + begin;
  }
};

/// Neighbours from j on, as far as the row has them, one by one.
template <typename Value>
__device__ void list_singly(const ListParams& params, const RowList<Value>& list, int64_t j) {
  const int64_t end = min(j + list.kNeighbours, list.entries);
  for (int64_t i = max(j, int64_t{0}); i < end; ++i) {
    const bool has_room = i >= list.first_inside && i < list.end_inside;
    const uint32_t column = params.pages.quotient(static_cast<uint32_t>(i));
    const uint32_t in_page = static_cast<uint32_t>(i) - column * params.pages.divisor();
    const bool exists = column < list.pages.count;
    const int64_t value = exists ? list.pages.first[column] * params.page_stride + in_page * params.token_stride : 0;
    const auto stored = static_cast<Value>(value);
    if (!has_room || !exists || stored != value) report(params.status);
    if (has_room) list.out[i] = stored == value ? stored : 0;
  }
}

/// Neighbours of a row's list.
template <typename Value>
struct Neighbours {
  static constexpr int32_t kCount = RowList<Value>::kNeighbours;
  int64_t j = 0;
  uint32_t in_page = 0;  ///< the first one's place
  int32_t page = 0;
  bool inside = false;    ///< the list, all of them
  bool together = false;  ///< and on one page that exists

  Neighbours() = default;
  __device__ Neighbours(const ListParams& params, const RowList<Value>& list, int64_t at) : j(at) {
    inside = j >= list.first_inside && j + kCount <= list.end_inside;
    if (!inside) return;
    const auto place = static_cast<uint32_t>(j);
    const uint32_t column = params.pages.quotient(place);
    in_page = place - column * params.pages.divisor();
    together = in_page + kCount <= params.pages.divisor() && column < list.pages.count;
    if (together) page = list.pages.first[column];
  }
  __device__ void write(const ListParams& params, const RowList<Value>& list) const {
    Value values[kCount];
    if (!inside || !(together ? on_one_page(params, values) : one_by_one(params, list, values))) {
      list_singly(params, list, j);
      return;
    }
    if constexpr (kCount == 4) {
      *reinterpret_cast<int4*>(list.out + j) = make_int4(values[0], values[1], values[2], values[3]);
    } else {
      *reinterpret_cast<longlong2*>(list.out + j) = make_longlong2(values[0], values[1]);
    }
  }

 private:
  /// False where a value does not fit. Strides of 32-bit lists are a page's tokens and 1.
  __device__ bool on_one_page(const ListParams& params, Value (&values)[kCount]) const {
    const auto token_stride = static_cast<Value>(params.token_stride);
    const int64_t first =
        page * int64_t{static_cast<Value>(params.page_stride)} + int64_t{in_page} * int64_t{token_stride};
    const int64_t last = first + (kCount - 1) * int64_t{token_stride};
#pragma unroll
    for (int32_t k = 0; k < kCount; ++k) values[k] = static_cast<Value>(first) + k * token_stride;
    return static_cast<Value>(first) == first && static_cast<Value>(last) == last;
  }
  /// False also where a page does not exist.
  __device__ bool one_by_one(const ListParams& params, const RowList<Value>& list, Value (&values)[kCount]) const {
    int32_t pages[kCount];
    uint32_t in_pages[kCount];
    bool good = true;
#pragma unroll
    for (int32_t k = 0; k < kCount; ++k) {
      const uint32_t place = static_cast<uint32_t>(j) + k;
      const uint32_t column = params.pages.quotient(place);
      in_pages[k] = place - column * params.pages.divisor();
      const bool exists = column < list.pages.count;
      good = good && exists;
      pages[k] = exists ? list.pages.first[column] : 0;
    }
#pragma unroll
    for (int32_t k = 0; k < kCount; ++k) {
      const int64_t value = pages[k] * int64_t{static_cast<Value>(params.page_stride)} +
                            in_pages[k] * int64_t{static_cast<Value>(params.token_stride)};
      values[k] = static_cast<Value>(value);
      good = good && values[k] == value;
    }
    return good;
  }
};

/// Column y of thread blocks: row y's tokens, kUnroll groups of neighbours a thread. Groups begin where 16 bytes can be
/// stored at once.
template <typename Value>
__global__ void __launch_bounds__(kThreads) list_kernel(const __grid_constant__ ListParams params) {
  constexpr int32_t kUnroll = 4;
  constexpr int32_t kNeighbours = RowList<Value>::kNeighbours;
  Value* all = nullptr;
  if constexpr (sizeof(Value) == 4) {
    all = params.out32;
  } else {
    all = params.out64;
  }
  const int64_t step = int64_t{gridDim.x} * kThreads * kUnroll * kNeighbours;
  for (int64_t row = blockIdx.y; row < params.n; row += gridDim.y) {
    const RowList<Value> list(params, row, all);
    const auto before = static_cast<int64_t>(reinterpret_cast<uintptr_t>(list.out) / sizeof(Value) % kNeighbours);
    for (int64_t first = (int64_t{blockIdx.x} * kThreads * kUnroll + threadIdx.x) * kNeighbours - before;
         first < list.entries; first += step) {
      Neighbours<Value> groups[kUnroll];
#pragma unroll
      for (int32_t u = 0; u < kUnroll; ++u) {
        groups[u] = Neighbours<Value>(params, list, first + u * kThreads * kNeighbours);
      }
#pragma unroll
      for (int32_t u = 0; u < kUnroll; ++u) groups[u].write(params, list);
    }
  }
}

/// Column y of thread blocks: row y's pages, four a thread at a time.
__global__ void __launch_bounds__(kThreads) pages_kernel(const __grid_constant__ ListParams params) {
  constexpr int32_t kUnroll = 4;
  for (int64_t row = blockIdx.y; row < params.n; row += gridDim.y) {
    const int64_t entries = units_of(max(0, params.lens[row]), params.page_size);
    const int64_t begin = params.indptr[row];
    const RowEntries pages(params.table, row);
    const int64_t step = int64_t{gridDim.x} * kThreads * kUnroll;
    for (int64_t first = int64_t{blockIdx.x} * kThreads * kUnroll + threadIdx.x; first < entries; first += step) {
      int32_t values[kUnroll];
#pragma unroll
      for (int32_t u = 0; u < kUnroll; ++u) {
        const int64_t column = first + u * kThreads;
        const bool exists = column < min(entries, pages.count);
        values[u] = exists ? pages.first[column] : 0;
        if (!exists && column < entries) report(params.status);
      }
#pragma unroll
      for (int32_t u = 0; u < kUnroll; ++u) {
        const int64_t column = first + u * kThreads;
        const int64_t at = begin + column;
        if (column >= entries) break;
        if (at >= 0 && at < params.capacity) {
          params.out32[at] = values[u];
        } else {
          report(params.status);
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
    constexpr int32_t kUnroll = 4;
    const int64_t step = int64_t{gridDim.x} * kThreads * kUnroll;
    for (int64_t first = int64_t{blockIdx.x} * kThreads * kUnroll + threadIdx.x; first < params.columns;
         first += step) {
      int32_t values[kUnroll];
#pragma unroll
      for (int32_t u = 0; u < kUnroll; ++u) {
        const int64_t column = first + u * kThreads;
        values[u] = params.fill;
        if (column >= min(pages, int64_t{params.columns})) continue;
        const bool exists = column < entries.count;
        if (!exists) report(params.status);
        values[u] = exists ? entries.first[column] : 0;
      }
#pragma unroll
      for (int32_t u = 0; u < kUnroll; ++u) {
        const int64_t column = first + u * kThreads;
        if (column < params.columns) params.out[row * params.columns + column] = values[u];
      }
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

void enqueue(const IndptrParams& given, Stream stream) {
  IndptrParams params = given;
  params.units = FastDiv(params.unit);
  auto* const several = params.n <= 4 * kSumThreads ? indptr_kernel<4> : indptr_kernel<8>;
  auto* const kernel = params.n <= kSumThreads ? indptr_kernel<1> : several;
  kernel<<<1, kSumThreads, 0, native(stream)>>>(params);
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
  auto* const of_tokens = params.out64 != nullptr ? list_kernel<int64_t> : list_kernel<int32_t>;
  auto* const kernel = params.tokens ? of_tokens : pages_kernel;
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
