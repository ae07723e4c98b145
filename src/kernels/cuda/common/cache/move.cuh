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
  int64_t from[kMaxTile];  ///< elements from the side's begin; below 0: the token does not move
  int64_t to[kMaxTile];
  int32_t request[kMaxTile];
};

__device__ inline int64_t token_offset(const MoveSide& side, int64_t page, int64_t token) {
  const int64_t in_page = side.step == 2 ? (token >> 1) * side.token_stride + (token & 1) : token * side.token_stride;
  return page * side.page_stride + in_page;
}

/// One token's places.
__device__ inline void place_token(const MoveHalf& half, MoveTile& tile, int32_t at, int64_t from_page,
                                   int64_t from_token, int64_t to_page, int64_t to_token) {
  tile.from[at] = token_offset(half.from, from_page, from_token);
  tile.to[at] = token_offset(half.to, to_page, to_token);
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
      const float scale = scale_value(half.from_scale, request, head);
#pragma unroll
      for (float& value : values) value *= scale;
    }
    if (is_fp8(half.to.dtype)) divide_all<kElements>(values, scale_value(half.to_scale, 0, head));
    store_floats<kElements>(at, half.to.dtype, values);
  }
};

/// Moves a tile's first `num_tokens` tokens. The tile was written before the block's last barrier.
template <typename Move>
__device__ inline void move_tile(const MoveHalf& half, const MoveTile& tile, int32_t num_tokens) {
  constexpr int32_t kUnroll = 4;
  const uint32_t total = num_tokens * half.split.per_token.divisor();
  const int32_t from_bytes = size_of(half.from.dtype);
  const int32_t to_bytes = size_of(half.to.dtype);
  for (uint32_t first = threadIdx.x; first < total; first += kMoveThreads * kUnroll) {
    typename Move::Loaded pieces[kUnroll];
    bool moves[kUnroll];
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      const uint32_t i = first + u * kMoveThreads;
      const PieceIndex at = half.split.at(min(i, total - 1));
      const int64_t from = tile.from[at.token];
      const int64_t in_token = at.head * half.from.head_stride + int64_t{at.piece} * half.piece * half.from.step;
      moves[u] = i < total && from >= 0;
      if (moves[u]) pieces[u] = Move::load(half.from.data + (from + in_token) * from_bytes);
    }
#pragma unroll
    for (int32_t u = 0; u < kUnroll; ++u) {
      if (!moves[u]) continue;
      const PieceIndex at = half.split.at(first + u * kMoveThreads);
      const int64_t to =
          tile.to[at.token] + at.head * half.to.head_stride + int64_t{at.piece} * half.piece * half.to.step;
      Move::store(half, half.to.data + to * to_bytes, pieces[u], tile.request[at.token], at.head);
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
