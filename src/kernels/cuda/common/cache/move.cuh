#pragma once

#include "kernels/cuda/common/cache/move.hpp"
#include "kernels/cuda/common/elements.cuh"

/// What kernels that move tokens share. A thread block resolves where some tokens come from and go to into shared
/// memory, and then its threads move the pieces of all of them, several loads in flight a thread.
namespace folio::inline v0::kernels::cuda {

inline constexpr int32_t kMoveThreads = 256;
inline constexpr int32_t kMaxTile = 64;

struct MoveTile {
  int64_t from[2][kMaxTile];  ///< elements from the side's begin; from[0] < 0: the token does not move
  int64_t to[2][kMaxTile];
  int32_t request[kMaxTile];
};

__device__ inline int64_t token_offset(const MoveSide& side, int64_t page, int64_t token) {
  const int64_t in_page = side.step == 2 ? (token >> 1) * side.token_stride + (token & 1) : token * side.token_stride;
  return page * side.page_stride + in_page;
}

/// One token's places in both halves.
__device__ inline void place_token(const MoveParams& params, MoveTile& tile, int32_t at, int64_t from_page,
                                   int64_t from_token, int64_t to_page, int64_t to_token) {
  for (int32_t h = 0; h < params.num_halves; ++h) {
    tile.from[h][at] = token_offset(params.halves[h].from, from_page, from_token);
    tile.to[h][at] = token_offset(params.halves[h].to, to_page, to_token);
  }
}

__device__ inline void report(const MoveParams& params) {
  if (params.status != nullptr) *params.status = 1;
}

/// Moves pieces as they are.
template <typename Piece>
struct CopyPiece {
  static constexpr int32_t kUnroll = 4;
  Piece piece;
  __device__ void load(const MoveHalf& half, int64_t at, int64_t, int32_t) {
    piece = *reinterpret_cast<const Piece*>(element_at(half.from.data, half.from.dtype, at));
  }
  __device__ void store(const MoveHalf& half, int64_t at) const {
    *reinterpret_cast<Piece*>(element_at(half.to.data, half.to.dtype, at)) = piece;
  }
};

/// Converts pieces of eight elements or one.
template <int32_t kElements>
struct ConvertPiece {
  static constexpr int32_t kUnroll = 2;
  float values[kElements];
  __device__ void load(const MoveHalf& half, int64_t at, int64_t request, int32_t head) {
    load_floats<kElements>(element_at(half.from.data, half.from.dtype, at), half.from.dtype, values);
    if (is_fp8(half.from.dtype)) {
      const float scale = scale_value(half.from_scale, request, head);
      for (float& value : values) value *= scale;
    }
    if (is_fp8(half.to.dtype)) {  // a true division: the contract's rounding
      const float scale = scale_value(half.to_scale, 0, head);
      for (float& value : values) value /= scale;
    }
  }
  __device__ void store(const MoveHalf& half, int64_t at) const {
    store_floats<kElements>(element_at(half.to.data, half.to.dtype, at), half.to.dtype, values);
  }
};

template <typename Piece>
__device__ __noinline__ void move_pieces(const MoveHalf& half, const MoveTile& tile, int32_t h, int32_t num_tokens,
                                         int32_t num_heads) {
  const int32_t per_head = half.head_dim / half.piece;
  const int32_t per_token = per_head * num_heads;
  const int32_t total = num_tokens * per_token;
  for (int32_t first = threadIdx.x; first < total; first += kMoveThreads * Piece::kUnroll) {
    Piece pieces[Piece::kUnroll];
    int64_t to[Piece::kUnroll];
#pragma unroll
    for (int32_t u = 0; u < Piece::kUnroll; ++u) {
      const int32_t i = first + u * kMoveThreads;
      to[u] = -1;
      if (i >= total) continue;
      const int32_t token = i / per_token;
      const int32_t head = i % per_token / per_head;
      const int64_t d = int64_t{i % per_token % per_head} * half.piece;
      if (tile.from[0][token] < 0) continue;
      pieces[u].load(half, tile.from[h][token] + head * half.from.head_stride + d * half.from.step, tile.request[token],
                     head);
      to[u] = tile.to[h][token] + head * half.to.head_stride + d * half.to.step;
    }
#pragma unroll
    for (int32_t u = 0; u < Piece::kUnroll; ++u) {
      if (to[u] >= 0) pieces[u].store(half, to[u]);
    }
  }
}

/// Moves a tile's first `num_tokens` tokens. The tile was written before the block's last barrier.
__device__ inline void move_tile(const MoveParams& params, const MoveTile& tile, int32_t num_tokens) {
#pragma unroll 1
  for (int32_t h = 0; h < params.num_halves; ++h) {
    const MoveHalf& half = params.halves[h];
    const int32_t heads = params.num_heads;
    if (!half.bitwise) {
      if (half.piece == kWide) {
        move_pieces<ConvertPiece<kWide>>(half, tile, h, num_tokens, heads);
      } else {
        move_pieces<ConvertPiece<1>>(half, tile, h, num_tokens, heads);
      }
      continue;
    }
    switch (half.piece * size_of(half.from.dtype)) {
      case 16: move_pieces<CopyPiece<uint4>>(half, tile, h, num_tokens, heads); break;
      case 4: move_pieces<CopyPiece<uint32_t>>(half, tile, h, num_tokens, heads); break;
      case 2: move_pieces<CopyPiece<uint16_t>>(half, tile, h, num_tokens, heads); break;
      default: move_pieces<CopyPiece<uint8_t>>(half, tile, h, num_tokens, heads); break;
    }
  }
}

}  // namespace folio::inline v0::kernels::cuda
