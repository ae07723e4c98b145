#include "kernels/cuda/common/division.hpp"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/common/merge_states/gather_header.cuh"
#include "kernels/cuda/common/peer_memory/exchange.cuh"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kQueryThreads = 512;

/// A thread takes words of up to 16 bytes, and stores each to all ranks.
template <typename Word>
__global__ void __launch_bounds__(kQueryThreads, 1)
    queries_kernel(const __grid_constant__ PeerQueriesParams params, const __grid_constant__ PieceSplit split) {
  const PeerRanks& ranks = params.ranks;
  const PeerMemoryLayout& layout = ranks.layout;
  const int32_t world = layout.world;
  PeerExchange exchange(ranks);
  const uint32_t row_words = split.per_head.divisor();
  const auto words = static_cast<uint32_t>(params.num_tokens * split.per_token.divisor());
  for (uint32_t at = blockIdx.x * kQueryThreads + threadIdx.x; at < words; at += gridDim.x * kQueryThreads) {
    const PieceIndex piece = split.at(at);
    const std::byte* const from = params.from + piece.token * params.token_stride + piece.head * params.head_stride +
                                  piece.piece * static_cast<int64_t>(sizeof(Word));
    const Word word = *reinterpret_cast<const Word*>(from);
    const int32_t place =
        head_place({ranks.rank, static_cast<int32_t>(piece.head)}, world, params.heads, params.groups);
    const int64_t to = (int64_t{piece.token} * world * params.heads + place) * row_words + piece.piece;
#pragma unroll
    for (int32_t r = 0; r < kMostPeers; ++r) {
      if (r < world) reinterpret_cast<Word*>(ranks.memory[r] + layout.queries)[to] = word;
    }
  }
  if (blockIdx.x == 0) {
    if (params.sends_slopes) {
      for (auto head = static_cast<int32_t>(threadIdx.x); head < params.heads; head += kQueryThreads) {
        const float slope = params.slopes == nullptr ? 0.0f : params.slopes[head];
        const int32_t place = head_place({ranks.rank, head}, world, params.heads, params.groups);
        for (int32_t r = 0; r < world; ++r) reinterpret_cast<float*>(ranks.memory[r] + layout.slopes)[place] = slope;
      }
    }
    const GatherHeader header = make_header<kQueryThreads>(params.sent);
    if (threadIdx.x == 0) {
      for (int32_t r = 0; r < world; ++r) {
        *reinterpret_cast<GatherHeader*>(ranks.memory[r] + layout.headers +
                                         ranks.rank * PeerMemoryLayout::kHeaderStride) = header;
      }
    }
  }
  const bool all_here = exchange.meet();
  if (blockIdx.x == 0 && threadIdx.x < 32 && all_here) {
    compare_headers({ranks.memory[ranks.rank] + layout.headers, PeerMemoryLayout::kHeaderStride, world, ranks.rank,
                     params.header_fault});
  }
}

/// Whether words of so many bytes can be moved.
bool fits(const PeerQueriesParams& params, int64_t bytes) {
  const auto from = static_cast<int64_t>(reinterpret_cast<uintptr_t>(params.from));
  return (from | params.token_stride | params.head_stride | params.row_bytes) % bytes == 0;
}

template <typename Word>
void launch(const PeerQueriesParams& params, Stream stream) {
  const PieceSplit split(static_cast<int32_t>(params.row_bytes / static_cast<int64_t>(sizeof(Word))), params.heads);
  const auto grid = static_cast<uint32_t>(params.ranks.layout.grid);
  queries_kernel<Word><<<grid, kQueryThreads, 0, native(stream)>>>(params, split);
  check_launch("the exchange of queries");
}

}  // namespace

void enqueue(const PeerQueriesParams& params, Stream stream) {
  if (fits(params, 16)) return launch<uint4>(params, stream);
  if (fits(params, 4)) return launch<uint32_t>(params, stream);
  if (fits(params, 2)) return launch<uint16_t>(params, stream);
  launch<uint8_t>(params, stream);
}

}  // namespace folio::inline v0::kernels::cuda
