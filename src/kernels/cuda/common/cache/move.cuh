#pragma once

#include "kernels/cuda/common/cache/move.hpp"
#include "kernels/cuda/common/cache/shape.hpp"
#include "kernels/cuda/common/elements.cuh"

/// What kernels that move tokens share. A thread block takes one half of some tokens: it resolves where they come from
/// and go to into shared memory, and then its threads move the pieces of all of them, four loads in flight a thread.
namespace folio::inline v0::kernels::cuda {

inline constexpr int32_t kMoveThreads = 256;
inline constexpr int32_t kMaxTile = 64;

struct MoveTile {
  const std::byte* from[kMaxTile];  ///< head 0; null: the token does not move
  std::byte* to[kMaxTile];
  int32_t request[kMaxTile];
};

__device__ inline std::byte* token_begin(const MoveSide& side, int64_t page, int64_t token) {
  const int64_t in_page = side.step == 2 ? (token >> 1) * side.token_stride + (token & 1) : token * side.token_stride;
  return element_at(side.data, side.dtype, page * side.page_stride + in_page);
}

/// One token's places.
__device__ inline void place_token(const MoveHalf& half, MoveTile& tile, int32_t at, int64_t from_page,
                                   int64_t from_token, int64_t to_page, int64_t to_token) {
  tile.from[at] = token_begin(half.from, from_page, from_token);
  tile.to[at] = token_begin(half.to, to_page, to_token);
}

__device__ inline void report(const MoveParams& params) {
  if (params.status != nullptr) *params.status = 1;
}

/// Moves pieces as they are.
template <typename Piece>
struct Copy {
  using Loaded = Piece;
  __device__ static Piece load(const std::byte* at) { return *reinterpret_cast<const Piece*>(at); }
  __device__ static void store(const MoveHalf&, std::byte* at, Piece piece, int64_t, int32_t) {
    *reinterpret_cast<Piece*>(at) = piece;
  }
};

/// Converts pieces of eight elements or one.
template <int32_t kBytes, int32_t kElements>
struct Convert {
  using Loaded = Raw<kBytes, kElements>;
  __device__ static Loaded load(const std::byte* at) { return load_raw<kBytes, kElements>(at); }
  __device__ static void store(const MoveHalf& half, std::byte* at, const Loaded& raw, int64_t request, int32_t head) {
    float values[kElements];
    decode(raw, half.from.dtype, values);
    if constexpr (kBytes == 1) {
      const float scale = scale_at(half.from_scale, request, int64_t{head});
#pragma unroll
      for (float& value : values) value *= scale;
    }
    if (is_fp8(half.to.dtype)) divide_all<kElements>(values, scale_at(half.to_scale, int64_t{0}, int64_t{head}));
    store_floats<kElements>(at, half.to.dtype, values);
  }
};

/// Moves a tile's first `num_tokens` tokens. The tile was written before the block's last barrier.
template <typename Move>
__device__ inline void move_tile(const MoveHalf& half, const MoveTile& tile, int32_t num_tokens) {
  constexpr int32_t kUnroll = 4;
  const uint32_t total = num_tokens * half.split.per_token.divisor();
  for (uint32_t first = threadIdx.x; first < total; first += kMoveThreads * kUnroll) {
    typename Move::Loaded pieces[kUnroll];
    PieceIndex at[kUnroll];
    bool moves[kUnroll];
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      const uint32_t i = first + u * kMoveThreads;
      at[u] = half.split.at(min(i, total - 1));
      const std::byte* const from = tile.from[at[u].token];
      moves[u] = i < total && from != nullptr;
      if (moves[u]) {
        pieces[u] = Move::load(from + at[u].head * half.from_head_bytes + at[u].piece * half.from_piece_bytes);
      }
    }
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      if (!moves[u]) continue;
      std::byte* const to = tile.to[at[u].token] + at[u].head * half.to_head_bytes + at[u].piece * half.to_piece_bytes;
      Move::store(half, to, pieces[u], tile.request[at[u].token], at[u].head);
    }
  }
}

/// Calls launch(move, first half, number of halves), `move` being a Copy or Convert that suits the halves: once where
/// one suits both.
template <typename Launch>
void for_halves(const MoveParams& params, const Launch& launch) {
  const auto launch_half = [&](int32_t first, int32_t count) {
    const MoveHalf& half = params.halves[first];
    switch (move_kind(half)) {
      case MoveKind::kCopy16: return launch(Copy<uint4>{}, first, count);
      case MoveKind::kCopy4: return launch(Copy<uint32_t>{}, first, count);
      case MoveKind::kCopy2: return launch(Copy<uint16_t>{}, first, count);
      case MoveKind::kCopy1: return launch(Copy<uint8_t>{}, first, count);
      case MoveKind::kWide1: return launch(Convert<1, kWide>{}, first, count);
      case MoveKind::kWide2: return launch(Convert<2, kWide>{}, first, count);
      case MoveKind::kWide4: return launch(Convert<4, kWide>{}, first, count);
      case MoveKind::kSingle1: return launch(Convert<1, 1>{}, first, count);
      case MoveKind::kSingle2: return launch(Convert<2, 1>{}, first, count);
      case MoveKind::kSingle4: return launch(Convert<4, 1>{}, first, count);
    }
  };
  if (params.num_halves == 2 && move_kind(params.halves[0]) == move_kind(params.halves[1])) return launch_half(0, 2);
  for (int32_t h = 0; h < params.num_halves; ++h) launch_half(h, 1);
}

}  // namespace folio::inline v0::kernels::cuda
