#include <cmath>

#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/common/merge_states/merge_row.cuh"
#include "kernels/cuda/common/peer_memory/exchange.cuh"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kCombineThreads = 512;
constexpr int32_t kWarps = kCombineThreads / 32;

/// Where a rank's row stands among this rank's partial results.
__device__ int64_t row_of_partial(const PeerCombineParams& params, int32_t rank, int32_t row) {
  const RankHeads& heads = params.heads;
  const int32_t token = row / params.merges[0].num_heads;
  const int32_t head = row % params.merges[0].num_heads;
  const HeadOwner owner = params.all_heads ? HeadOwner{head / heads.local, head % heads.local} : HeadOwner{rank, head};
  return int64_t{token} * heads.parts * heads.local + head_place(owner, heads.parts, heads.local, heads.groups);
}

/// Stores this rank's part of the rows [begin, end) of every rank. A warp takes a row of each rank at a time.
__device__ void send_rows(const PeerCombineParams& params, size_t half, int32_t begin, int32_t end) {
  const PeerRanks& ranks = params.ranks;
  const int32_t world = ranks.layout.world;
  const int64_t rows = params.merges[0].num_tokens * params.merges[0].num_heads;
  const auto row_words = static_cast<int32_t>(params.row_bytes / static_cast<int64_t>(sizeof(uint4)));
  const auto* const partial = reinterpret_cast<const uint4*>(params.partial);
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const size_t lses = half + peer_lses_at(world, rows, params.row_bytes);
  for (int32_t row = begin + static_cast<int32_t>(threadIdx.x / 32); row < end; row += kWarps) {
    const int64_t to = ranks.rank * rows + row;
    for (int32_t d = lane; d < row_words; d += 32) {
      uint4 words[kMostPeers];  // loads before stores, which may be to the same place for all that the compiler knows
#pragma unroll
      for (int32_t r = 0; r < kMostPeers; ++r) {
        if (r < world) words[r] = partial[row_of_partial(params, r, row) * row_words + d];
      }
#pragma unroll
      for (int32_t r = 0; r < kMostPeers; ++r) {
        if (r < world) reinterpret_cast<uint4*>(ranks.memory[r] + half)[to * row_words + d] = words[r];
      }
    }
  }
  for (int32_t r = 0; r < world; ++r) {
    auto* const to = reinterpret_cast<float*>(ranks.memory[r] + lses) + ranks.rank * rows;
    for (int32_t row = begin + static_cast<int32_t>(threadIdx.x); row < end; row += kCombineThreads) {
      to[row] = params.lse[row_of_partial(params, r, row)];
    }
  }
}

/// Rows whose parts did not all come.
__device__ void spoil_rows(const CombineParams& merge, int32_t begin, int32_t end) {
  const float nan = __int_as_float(0x7fc00000);
  for (int64_t row = begin + static_cast<int32_t>(threadIdx.x / 32); row < end; row += kWarps) {
    const int64_t token = row / merge.num_heads;
    const int64_t head = row % merge.num_heads;
    std::byte* const to = element_at(static_cast<std::byte*>(merge.out), merge.out_dtype,
                                     token * merge.out_token_stride + head * merge.out_head_stride);
    for (auto d = static_cast<int32_t>(threadIdx.x % 32); d < merge.head_dim; d += 32) {
      store_floats<1>(element_at(to, merge.out_dtype, d), merge.out_dtype, &nan);
    }
    if (threadIdx.x % 32 == 0 && merge.lse.data != nullptr) {
      merge.lse.data[token * merge.lse.token_stride + head * merge.lse.head_stride] = nan;
    }
  }
}

/// A CTA sends the rows that the same CTAs of its peers merge. kLanes lanes merge a row, each kElements neighbours at a
/// time.
template <int32_t kLanes, int32_t kElements>
__global__ void __launch_bounds__(kCombineThreads, 1) combine_kernel(const __grid_constant__ PeerCombineParams params) {
  PeerExchange exchange(params.ranks);
  const uint32_t odd = exchange.number() % 2;
  const CombineParams& merge = params.merges[odd];
  const auto rows = static_cast<int32_t>(merge.num_tokens * merge.num_heads);
  const auto grid = static_cast<int32_t>(gridDim.x);
  const int32_t of_cta = (rows + grid - 1) / grid;
  const auto begin = static_cast<int32_t>(min(int64_t{blockIdx.x} * of_cta, int64_t{rows}));
  const int32_t end = min(begin + of_cta, rows);
  send_rows(params, params.ranks.layout.halves[odd], begin, end);
  if (!exchange.meet()) {
    spoil_rows(merge, begin, end);
    return;
  }
  constexpr int32_t kRows = kCombineThreads / kLanes;
  for (int32_t first = begin; first < end; first += kRows) {
    merge_row<kLanes, kElements>(merge, int64_t{first} + threadIdx.x / kLanes, end);
  }
}

template <int32_t kLanes, int32_t kElements>
void launch(const PeerCombineParams& params, Stream stream) {
  const auto grid = static_cast<uint32_t>(params.ranks.layout.grid);
  combine_kernel<kLanes, kElements><<<grid, kCombineThreads, 0, native(stream)>>>(params);
  check_launch("the combine over peer memory");
}

}  // namespace

void enqueue(const PeerCombineParams& params, Stream stream) {
  if (is_wide(params.merges[0]) && is_wide(params.merges[1])) {
    launch<16, kWide>(params, stream);
  } else {
    launch<32, 1>(params, stream);
  }
}

}  // namespace folio::inline v0::kernels::cuda
