#include <climits>
#include <limits>
#include <type_traits>

#include "kernels/cuda/common/kv_cache_views.cuh"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/common/tables/tables.cuh"
#include "kernels/cuda/common/tables/tables.hpp"
#include "ptx/griddepcontrol.cuh"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kMaxRows = 65535;  // of a grid

template <typename Value>
__device__ Value* list_memory(const ListParams& params) {
  if constexpr (sizeof(Value) == 4) {
    return params.out32;
  } else {
    return params.out64;
  }
}

/// Entries of a row's list, of `length` tokens.
__device__ int32_t entries_of(const ListParams& params, int32_t length) {
  return params.tokens ? max(0, length) : static_cast<int32_t>(units_of(max(0, length), params.page_size));
}

/// Entries [from, to) of a row's list, one by one, as far as it has them. All is read again, so that the many do not
/// keep what only these need.
template <typename Value>
__device__ void list_singly(const ListParams& params, int64_t row, int64_t from, int64_t to) {
  const RowEntries pages(params.table, row);
  const int64_t begin = params.indptr[row];
  const int64_t room = params.capacity - begin;
  const int64_t end = min(to, int64_t{entries_of(params, params.lens[row])});
#pragma unroll 1
  for (int64_t j = max(from, int64_t{0}); j < end; ++j) {
    const uint32_t column = params.pages.quotient(static_cast<uint32_t>(j));
    const uint32_t in_page = static_cast<uint32_t>(j) - column * params.pages.divisor();
    const bool exists = column < pages.count;
    const int64_t value = exists ? pages.first[column] * params.page_stride + in_page * params.token_stride : 0;
    const auto stored = static_cast<Value>(value);
    if (j >= room || !exists || stored != value) report(params.status);
    if (j < room) list_memory<Value>(params)[begin + j] = stored == value ? stored : 0;
  }
}

template <typename Value>
__device__ void store(Value* out, const Value (&values)[1]) {
  *out = values[0];
}
/// Lists that are stored widely are much longer than what they are made of: they leave the L2 cache to that.
__device__ inline void store(int32_t* out, const int32_t (&values)[4]) {
  __stcs(reinterpret_cast<int4*>(out), make_int4(values[0], values[1], values[2], values[3]));
}
__device__ inline void store(int64_t* out, const int64_t (&values)[2]) {
  __stcs(reinterpret_cast<longlong2*>(out), make_longlong2(values[0], values[1]));
}

/// How a list is divided whose stores have `count` entries.
struct ListShape {
  int32_t threads;    ///< of a CTA
  int32_t in_flight;  ///< stores of a thread whose pages are looked up at once
  int32_t at_once;    ///< entries of a CTA
};
constexpr ListShape shape_of(int32_t count) {
  const int32_t threads = count > 1 ? 256 : 128;
  const int32_t in_flight = count > 1 ? 8 : 10;
  return {threads, in_flight, threads * in_flight * count};
}

/// Where kCount neighbours of a list begin: on which page of the row's, and where there. Those in front of the list
/// are on page -1.
struct Place {
  int32_t column;
  int32_t in_page;

  __device__ Place(const ListParams& params, int32_t j) {
    const auto page_size = static_cast<int32_t>(params.pages.divisor());
    const int32_t front = j < 0 ? 1 : 0;
    const auto place = static_cast<uint32_t>(j + front * page_size);
    const auto quotient = static_cast<int32_t>(params.pages.quotient(place));
    column = quotient - front;
    in_page = static_cast<int32_t>(place) - quotient * page_size;
  }
};

/// Column y of CTAs: row y's list, kCount neighbours a store, which begin where they can be stored at once and
/// lie on one page or two. kSteady: all of a thread's neighbours lie at the same place of their pages. The lists'
/// beginnings are made by the kernel before.
template <typename Value, int32_t kCount, bool kSteady>
__global__ void __launch_bounds__(shape_of(kCount).threads, 1024 / shape_of(kCount).threads)
    list_kernel(const __grid_constant__ ListParams params) {
  constexpr int32_t kUnroll = shape_of(kCount).in_flight;
  constexpr int32_t kAtOnce = shape_of(kCount).at_once;
  constexpr int32_t kStep = shape_of(kCount).threads * kCount;
  const auto page_size = static_cast<int32_t>(params.pages.divisor());
  using Bits = std::make_unsigned_t<Value>;  // what does not fit may overflow: it is found and written again
  const auto page_stride = static_cast<Bits>(params.page_stride);
  const auto token_stride = static_cast<Bits>(params.token_stride);
  const auto step_columns = static_cast<int32_t>(params.pages.quotient(kStep));  // kSteady
#pragma unroll 1
  for (int64_t row = blockIdx.y; row < params.n; row += gridDim.y) {
    const int32_t length = params.lens[row];
    const RowBounds bounds(params.table, row);
    ptx::griddep_wait();  // by all, every row: what follows in the stream waits for this kernel alone
    const int64_t begin = params.indptr[row];
    const RowEntries row_pages(params.table, bounds);
    const int32_t entries = entries_of(params, length);
    Value* const list = list_memory<Value>(params) + begin;
    const auto before = static_cast<int32_t>(reinterpret_cast<uintptr_t>(list) / sizeof(Value) % kCount);
    // Entries whose pages exist and that there is room for.
    const int64_t most = min(params.capacity - begin, row_pages.count * page_size);
    const auto sure = static_cast<int32_t>(max(min(most, int64_t{entries}), int64_t{0}));
#pragma unroll 1
    for (int64_t first = int64_t{blockIdx.x} * kAtOnce - before; first < entries;
         first += int64_t{gridDim.x} * kAtOnce) {
      const auto mine = static_cast<int32_t>(static_cast<uint32_t>(first) + threadIdx.x * kCount);
      Value* const out = list + first + threadIdx.x * kCount;
      const Place first_place(params, mine);
      const auto write = [&](auto all_are_sure) {
        constexpr bool kSure = decltype(all_are_sure)::value;
        int32_t in_page[kUnroll];
        uint32_t pages[kUnroll], next_pages[kUnroll];
        uint32_t highest = 0;
#pragma unroll
        for (int32_t u = 0; u < kUnroll; ++u) {
          const int32_t j = mine + u * kStep;
          Place place = first_place;
          if (kSteady) {
            place.column += u * step_columns;
          } else if (u > 0) {
            place = Place(params, j);
          }
          in_page[u] = place.in_page;
          const int32_t* const at = row_pages.first + place.column;
          const int32_t left = page_size - place.in_page;  // on this page
          const bool any = kSure || (j > -kCount && j < sure);
          pages[u] = next_pages[u] = 0;
          if (any && (kSure || place.column >= 0)) pages[u] = static_cast<uint32_t>(__ldg(at));
          if (kCount > 1 && left < kCount && any && (kSure || j + left < sure)) {
            next_pages[u] = static_cast<uint32_t>(__ldg(at + 1));
          }
        }
#pragma unroll
        for (int32_t u = 0; u < kUnroll; ++u) {
          const int32_t j = mine + u * kStep;
          const int32_t left = page_size - in_page[u];
          highest = max(highest, max(pages[u], next_pages[u]));
          const Bits here = pages[u] * page_stride + static_cast<Bits>(in_page[u]) * token_stride;
          const Bits next = next_pages[u] * page_stride - static_cast<Bits>(left) * token_stride;
          Value values[kCount];
#pragma unroll
          for (int32_t k = 0; k < kCount; ++k) {
            values[k] = static_cast<Value>((k == 0 || k < left ? here : next) + static_cast<Bits>(k) * token_stride);
          }
          if (kSure || (j >= 0 && j < sure - (kCount - 1))) {
            store(out + u * kStep, values);
          } else {
#pragma unroll
            for (int32_t k = 0; k < kCount; ++k) {
              if (j + k >= 0 && j + k < sure) out[u * kStep + k] = values[k];
            }
          }
        }
        return highest < params.pages_that_fit;
      };
      const bool all_are_sure = first >= 0 && first + kAtOnce <= sure;
      const bool fit = all_are_sure ? write(std::true_type{}) : write(std::false_type{});
      if (fit && sure == entries) continue;
      const int64_t again = first + int64_t{threadIdx.x} * kCount;  // what is missing or does not fit is reported
#pragma unroll 1
      for (int32_t u = 0; u < kUnroll; ++u) {
        list_singly<Value>(params, row, again + u * kStep, again + u * kStep + kCount);
      }
    }
  }
}

template <typename Value, int32_t kCount, bool kSteady>
void launch_list(const ListParams& params, Stream stream) {
  const dim3 grid(grid_for(params.capacity / params.n, shape_of(kCount).at_once, 64),
                  static_cast<uint32_t>(std::min(params.n, kMaxRows)));
  static_cast<void>(launch_overlapping(list_kernel<Value, kCount, kSteady>, grid, shape_of(kCount).threads, 0, stream,
                                       kernels_overlap(), params));
  check_launch("a list of pages or tokens");
}

/// kMost neighbours a store, or single ones where a page has fewer.
template <typename Value, int32_t kMost>
void launch_list(const ListParams& params, Stream stream) {
  const bool wide = params.pages.divisor() >= kMost;
  const ListShape shape = shape_of(wide ? kMost : 1);
  const bool steady = static_cast<uint32_t>(shape.at_once / shape.in_flight) % params.pages.divisor() == 0;
  if (wide) {
    (steady ? launch_list<Value, kMost, true> : launch_list<Value, kMost, false>)(params, stream);
  } else {
    (steady ? launch_list<Value, 1, true> : launch_list<Value, 1, false>)(params, stream);
  }
}

/// How many pages, from 0 on, have only entries that a list's numbers hold.
uint32_t pages_that_fit(const ListParams& params) {
  const int64_t most = params.out64 != nullptr ? std::numeric_limits<int64_t>::max() : INT_MAX;
  const int64_t last = int64_t{params.page_size} - 1;
  if (last > 0 && params.token_stride > most / last) return 0;
  if (params.page_stride == 0) return INT_MAX;
  return static_cast<uint32_t>(
      std::min<int64_t>((most - last * params.token_stride) / params.page_stride, INT_MAX - 1) + 1);
}

}  // namespace

void enqueue(const ListParams& given, Stream stream) {
  ListParams params = given;
  IndptrParams beginnings;
  beginnings.lens = params.lens;
  beginnings.n = params.n;
  beginnings.unit = params.tokens ? 1 : params.page_size;
  beginnings.indptr = params.indptr;
  beginnings.last_unit_len = params.last_unit_len;
  beginnings.status = params.status;
  enqueue(beginnings, stream);
  if (params.n == 0 || params.capacity == 0) return;
  const int32_t entries_a_page = params.tokens ? params.page_size : 1;
  params.pages = FastDiv(entries_a_page);
  params.pages_that_fit = params.tokens ? pages_that_fit(params) : uint32_t{1} << 31;
  if (params.out64 != nullptr) {
    launch_list<int64_t, 2>(params, stream);
  } else {
    launch_list<int32_t, 4>(params, stream);
  }
}

}  // namespace folio::inline v0::kernels::cuda
