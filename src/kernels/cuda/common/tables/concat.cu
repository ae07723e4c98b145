#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/common/tables/tables.hpp"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kUnroll = 4;

/// A thread takes kUnroll pieces of rows of k.
template <typename Piece>
__global__ void __launch_bounds__(kThreads) concat_kernel(const __grid_constant__ ConcatParams params) {
  constexpr int32_t kBytes = sizeof(Piece);
  const int32_t first_piece = params.copy_nope ? 0 : params.nope_bytes / kBytes;
  const int32_t per_row = (params.nope_bytes + params.rope_bytes) / kBytes - first_piece;
  const int32_t per_token = per_row * params.num_heads;
  const int64_t total = params.num_tokens * per_token;
  const int64_t step = int64_t{gridDim.x} * kThreads * kUnroll;
  for (int64_t first = int64_t{blockIdx.x} * kThreads * kUnroll + threadIdx.x; first < total; first += step) {
    Piece pieces[kUnroll];
    Piece* to[kUnroll];
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      const int64_t i = first + u * kThreads;
      to[u] = nullptr;
      if (i >= total) continue;
      const int64_t token = i / per_token;
      const auto in_token = static_cast<int32_t>(i % per_token);
      const int32_t head = in_token / per_row;
      const int32_t byte = (in_token % per_row + first_piece) * kBytes;
      const unsigned char* const from = byte < params.nope_bytes
                                            ? params.nope + token * params.nope_token + head * params.nope_head + byte
                                            : params.rope + token * params.rope_token + byte - params.nope_bytes;
      pieces[u] = *reinterpret_cast<const Piece*>(from);
      to[u] = reinterpret_cast<Piece*>(params.k + token * params.k_token + head * params.k_head + byte);
    }
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      if (to[u] != nullptr) *to[u] = pieces[u];
    }
  }
}

template <typename Piece>
void launch(const ConcatParams& params, Stream stream) {
  const int64_t bytes = params.num_tokens * params.num_heads * (params.nope_bytes + params.rope_bytes);
  const uint32_t grid = grid_for(bytes / static_cast<int64_t>(sizeof(Piece)), kThreads * kUnroll);
  concat_kernel<Piece><<<grid, kThreads, 0, native(stream)>>>(params);
}

}  // namespace

void enqueue(const ConcatParams& params, Stream stream) {
  if (params.num_tokens == 0 || params.num_heads == 0 || params.nope_bytes + params.rope_bytes == 0) return;
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
  check_launch("the concatenation of keys");
}

}  // namespace folio::inline v0::kernels::cuda
