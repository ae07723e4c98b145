#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/common/tables/tables.hpp"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kConcatThreads = 256;
constexpr int32_t kUnroll = 4;

/// A thread takes kUnroll pieces of rows of k.
template <typename Piece>
__global__ void __launch_bounds__(kConcatThreads) concat_kernel(const __grid_constant__ ConcatParams params) {
  constexpr int32_t kBytes = sizeof(Piece);
  const int32_t first_piece = params.copy_nope ? 0 : params.nope_bytes / kBytes;
  const auto total = static_cast<uint32_t>(params.num_tokens) * params.split.per_token.divisor();
  for (uint32_t first = blockIdx.x * kConcatThreads * kUnroll + threadIdx.x; first < total;
       first += gridDim.x * kConcatThreads * kUnroll) {
    Piece pieces[kUnroll];
    Piece* to[kUnroll];
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      const uint32_t i = first + u * kConcatThreads;
      to[u] = nullptr;
      if (i >= total) continue;
      const PieceIndex at = params.split.at(i);
      const int32_t byte = (static_cast<int32_t>(at.piece) + first_piece) * kBytes;
      const unsigned char* const from =
          byte < params.nope_bytes ? params.nope + at.token * params.nope_token + at.head * params.nope_head + byte
                                   : params.rope + at.token * params.rope_token + byte - params.nope_bytes;
      pieces[u] = *reinterpret_cast<const Piece*>(from);
      to[u] = reinterpret_cast<Piece*>(params.k + at.token * params.k_token + at.head * params.k_head + byte);
    }
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      if (to[u] != nullptr) *to[u] = pieces[u];
    }
  }
}

template <typename Piece>
void launch(const ConcatParams& whole, Stream stream) {
  ConcatParams params = whole;
  const int32_t row_bytes = (params.copy_nope ? params.nope_bytes : 0) + params.rope_bytes;
  params.split = PieceSplit(row_bytes / static_cast<int32_t>(sizeof(Piece)), params.num_heads);
  const int64_t per_token = params.split.per_token.divisor();
  for_slices(whole.num_tokens, per_token, [&](int64_t first, int64_t count) {
    params.num_tokens = count;
    params.k = whole.k + first * whole.k_token;
    params.nope = whole.nope + first * whole.nope_token;
    params.rope = whole.rope + first * whole.rope_token;
    concat_kernel<Piece>
        <<<grid_for(count * per_token, kConcatThreads * kUnroll), kConcatThreads, 0, native(stream)>>>(params);
    check_launch("the concatenation of keys");
  });
}

}  // namespace

void enqueue(const ConcatParams& params, Stream stream) {
  const int32_t row_bytes = (params.copy_nope ? params.nope_bytes : 0) + params.rope_bytes;
  if (params.num_tokens == 0 || params.num_heads == 0 || row_bytes == 0) return;
  const auto all = reinterpret_cast<uintptr_t>(params.k) | reinterpret_cast<uintptr_t>(params.nope) |
                   reinterpret_cast<uintptr_t>(params.rope) |
                   static_cast<uintptr_t>(params.nope_bytes | params.rope_bytes | params.k_token | params.k_head |
                                          params.nope_token | params.nope_head | params.rope_token);
  if (all % 16 == 0) {
    launch<uint4>(params, stream);
  } else if (all % 4 == 0) {
    launch<uint32_t>(params, stream);
  } else if (all % 2 == 0) {
    launch<uint16_t>(params, stream);
  } else {
    launch<uint8_t>(params, stream);
  }
}

}  // namespace folio::inline v0::kernels::cuda
