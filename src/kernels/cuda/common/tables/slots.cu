#include <climits>

#include "kernels/cuda/common/kv_cache_views.cuh"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/common/tables/tables.cuh"
#include "kernels/cuda/common/tables/tables.hpp"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kSlotThreads = 256;
constexpr int32_t kScattered = 3;  ///< tokens that a thread has in flight where each is looked up by itself
constexpr int32_t kShortPages = 4;
constexpr int64_t kManyTokens = 1 << 13;  // fewer are done sooner a token a thread

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

__device__ int64_t slot_of(const SlotParams& params, int64_t page, int32_t in_page) {
  return page < 0 ? -1 : page * params.page_size + in_page;
}

__device__ int64_t slot_of_token(const SlotParams& params, int32_t row, int32_t given) {
  const Position position(params, given);
  if (!position.here) return -1;
  const int64_t page = table_entry(params.table, row, position.page);
  if (page < 0) report(params.status);
  return slot_of(params, page, position.in_page);
}

/// Tokens one by one.
__global__ void __launch_bounds__(kSlotThreads) single_slots_kernel(const __grid_constant__ SlotParams params) {
  const int64_t step = int64_t{gridDim.x} * kSlotThreads;
  for (int64_t t = int64_t{blockIdx.x} * kSlotThreads + threadIdx.x; t < params.num_tokens; t += step) {
    params.slots[t] = slot_of_token(params, params.token_row[t], params.positions[t]);
  }
}

/// Two neighbours a thread, whose slots are 16 bytes, kUnroll times; memory is aligned. Where they follow each other on
/// one page, as a prefill's do, that page is looked up once.
__global__ void __launch_bounds__(kSlotThreads) slots_kernel(const __grid_constant__ SlotParams params) {
  constexpr int32_t kUnroll = 4;
  const int64_t groups = params.num_tokens / 2;
  const int64_t step = int64_t{gridDim.x} * kSlotThreads * kUnroll;
  for (int64_t first = int64_t{blockIdx.x} * kSlotThreads * kUnroll + threadIdx.x; first < groups; first += step) {
    int2 positions[kUnroll], rows[kUnroll];
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      const int64_t group = min(first + u * kSlotThreads, groups - 1);
      positions[u] = reinterpret_cast<const int2*>(params.positions)[group];
      rows[u] = reinterpret_cast<const int2*>(params.token_row)[group];
    }
    bool together[kUnroll];
    int32_t pages[kUnroll], in_page[kUnroll];
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      const int32_t position = max(positions[u].x, 0);
      const uint32_t page = params.span.quotient(position);
      in_page[u] = position - static_cast<int32_t>(page * params.span.divisor());
      together[u] = params.shard.world == 1 && positions[u].x >= 0 && rows[u].x == rows[u].y &&
                    in_page[u] + 1 < params.page_size && positions[u].y == positions[u].x + 1;
      if (together[u]) pages[u] = static_cast<int32_t>(table_entry(params.table, rows[u].x, page));
    }
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      const int64_t group = first + u * kSlotThreads;
      if (group >= groups) break;
      longlong2 slots;
      if (together[u] && pages[u] >= 0) {
        const int64_t slot = slot_of(params, pages[u], in_page[u]);
        slots = make_longlong2(slot, slot + 1);
      } else {
        slots = make_longlong2(slot_of_token(params, rows[u].x, positions[u].x),
                               slot_of_token(params, rows[u].y, positions[u].y));
      }
      reinterpret_cast<longlong2*>(params.slots)[group] = slots;
    }
  }
  const int64_t t = 2 * groups;
  if (blockIdx.x == 0 && threadIdx.x == 0 && t < params.num_tokens) {
    params.slots[t] = slot_of_token(params, params.token_row[t], params.positions[t]);
  }
}

/// Tokens one by one, kScattered in flight, for pages so short that neighbours seldom share one.
__global__ void __launch_bounds__(kSlotThreads) scattered_slots_kernel(const __grid_constant__ SlotParams params) {
  constexpr int32_t kUnroll = kScattered;
  const int64_t step = int64_t{gridDim.x} * kSlotThreads * kUnroll;
  for (int64_t first = int64_t{blockIdx.x} * kSlotThreads * kUnroll + threadIdx.x; first < params.num_tokens;
       first += step) {
    int32_t rows[kUnroll], given[kUnroll];
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      const int64_t t = first + u * kSlotThreads;
      given[u] = t < params.num_tokens ? __ldg(params.positions + t) : -1;
      rows[u] = t < params.num_tokens ? __ldg(params.token_row + t) : 0;
    }
    // All loads of one step before any of the next.
    Position places[kUnroll];
    RowBounds bounds[kUnroll];
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      places[u] = Position(params, given[u]);
      bounds[u] = RowBounds(params.table, places[u].here ? rows[u] : -1);
    }
    int32_t pages[kUnroll];
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      const RowEntries entries(params.table, bounds[u]);
      pages[u] = -1;
      if (places[u].page < entries.count) pages[u] = __ldg(entries.first + places[u].page);
    }
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      const int64_t t = first + u * kSlotThreads;
      if (t >= params.num_tokens) continue;
      if (places[u].here && pages[u] < 0) report(params.status);
      params.slots[t] = slot_of(params, pages[u], places[u].in_page);
    }
  }
}

/// Four of the pages' pieces a thread, where they are 16 bytes that lie on one page; params.pieces counts such fours.
__global__ void __launch_bounds__(kSlotThreads) wide_expand_kernel(const __grid_constant__ ExpandParams params) {
  const auto total = static_cast<uint32_t>(params.n) * params.pieces.divisor();
  for (uint32_t i = blockIdx.x * kSlotThreads + threadIdx.x; i < total; i += gridDim.x * kSlotThreads) {
    const uint32_t at = params.pieces.quotient(i);
    const int64_t page = params.pages[at];
    const bool fits = page >= 0 && (page + 1) * params.ratio - 1 <= INT_MAX;
    if (!fits) report(params.status);
    const auto first = static_cast<int32_t>(page * params.ratio + 4 * int64_t{i - at * params.pieces.divisor()});
    const int4 pieces = make_int4(first, first + 1, first + 2, first + 3);
    reinterpret_cast<int4*>(params.out)[i] = fits ? pieces : make_int4(-1, -1, -1, -1);
  }
}

__global__ void __launch_bounds__(kSlotThreads) expand_kernel(const __grid_constant__ ExpandParams params) {
  const auto total = static_cast<uint32_t>(params.n * params.ratio);
  for (uint32_t i = blockIdx.x * kSlotThreads + threadIdx.x; i < total; i += gridDim.x * kSlotThreads) {
    const int64_t page = params.pages[params.pieces.quotient(i)];
    const bool fits = page >= 0 && (page + 1) * params.ratio - 1 <= INT_MAX;
    if (!fits) report(params.status);
    params.out[i] = fits ? static_cast<int32_t>(page * params.ratio + params.pieces.remainder(i)) : -1;
  }
}

__global__ void __launch_bounds__(kSlotThreads) shard_lens_kernel(const __grid_constant__ ShardLensParams params) {
  for (int64_t i = int64_t{blockIdx.x} * kSlotThreads + threadIdx.x; i < params.n;
       i += int64_t{gridDim.x} * kSlotThreads) {
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
  const uintptr_t all = reinterpret_cast<uintptr_t>(params.positions) | reinterpret_cast<uintptr_t>(params.token_row) |
                        reinterpret_cast<uintptr_t>(params.slots);
  if (params.page_size < kShortPages && params.num_tokens >= kManyTokens) {
    scattered_slots_kernel<<<grid_for(params.num_tokens, kScattered * kSlotThreads), kSlotThreads, 0, native(stream)>>>(
        params);
  } else if (all % 16 == 0 && params.num_tokens >= kManyTokens) {
    slots_kernel<<<grid_for(params.num_tokens, 8 * kSlotThreads), kSlotThreads, 0, native(stream)>>>(params);
  } else {
    single_slots_kernel<<<grid_for(params.num_tokens, kSlotThreads), kSlotThreads, 0, native(stream)>>>(params);
  }
  check_launch("the slot mapping");
}

void enqueue(const ExpandParams& whole, Stream stream) {
  ExpandParams params = whole;
  const bool wide = params.ratio % 4 == 0 && reinterpret_cast<uintptr_t>(params.out) % 16 == 0;
  params.pieces = FastDiv(wide ? params.ratio / 4 : params.ratio);
  auto* const kernel = wide ? wide_expand_kernel : expand_kernel;
  for_slices(whole.n, whole.ratio, [&](int64_t first, int64_t count) {
    params.pages = whole.pages + first;
    params.n = count;
    params.out = whole.out + first * whole.ratio;
    kernel<<<grid_for(count * params.pieces.divisor(), kSlotThreads), kSlotThreads, 0, native(stream)>>>(params);
    check_launch("the expansion of pages");
  });
}

void enqueue(const ShardLensParams& params, Stream stream) {
  if (params.n == 0) return;
  shard_lens_kernel<<<grid_for(params.n, kSlotThreads), kSlotThreads, 0, native(stream)>>>(params);
  check_launch("a shard's lengths");
}

}  // namespace folio::inline v0::kernels::cuda
