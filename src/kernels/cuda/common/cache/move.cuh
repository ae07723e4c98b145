#pragma once

#include "kernels/cuda/common/cache/move.hpp"
#include "kernels/cuda/common/cache/shape.hpp"
#include "kernels/cuda/common/division.hpp"
#include "kernels/cuda/common/ds_mla.cuh"
#include "kernels/cuda/common/kv_cache_views.cuh"
#include "kernels/cuda/common/numeric_conversion.cuh"

/// What kernels that move tokens share. A CTA takes one half of some tokens: it resolves where they come from
/// and go to into shared memory, and then its threads move the pieces of all of them, several loads in flight a thread.
namespace folio::inline v0::kernels::cuda {

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
  static constexpr int32_t kInFlight = 4;
  __device__ Copy(const MoveHalf&, int32_t) {}
  __device__ static Piece load(const std::byte* at) { return *reinterpret_cast<const Piece*>(at); }
  __device__ void store(std::byte* at, Piece piece, int32_t) const { *reinterpret_cast<Piece*>(at) = piece; }
};

/// Converts pieces of eight elements, four or one, of one head.
template <int32_t kBytes, int32_t kElements>
class Convert {
 public:
  using Loaded = Raw<kBytes, kElements>;
  static constexpr int32_t kInFlight = kBytes == 4 ? 2 : 4;
  __device__ Convert(const MoveHalf& half, int32_t head)
      : from_(half.from.dtype), to_(half.to.dtype), scale_(half.from_scale), head_(head) {
    by_request_ = scale_.data != nullptr && (scale_.granularity == ScaleGranularity::kPerRequest ||
                                             scale_.granularity == ScaleGranularity::kPerRequestAndHead);
    if (kBytes == 1 && !by_request_) factor_ = scale_at(scale_, 0, head);
    if (is_fp8(to_)) divisor_ = Divisor(scale_at(half.to_scale, 0, head));
  }
  __device__ static Loaded load(const std::byte* at) { return load_raw<kBytes, kElements>(at); }
  __device__ void store(std::byte* at, const Loaded& raw, int32_t request) const {
    float values[kElements];
    decode(raw, from_, values);
    if constexpr (kBytes == 1) {
      const float factor = by_request_ ? scale_at(scale_, int64_t{request}, int64_t{head_}) : factor_;
#pragma unroll
      for (float& value : values) value *= factor;
    }
    if (is_fp8(to_)) divisor_.divide<kElements>(values);
    store_floats<kElements>(at, to_, values);
  }

 private:
  const DType from_;
  const DType to_;
  const Scale& scale_;
  const int32_t head_;
  bool by_request_;
  float factor_ = 1.0f;
  Divisor divisor_;
};

/// Rows become rows of KvFormat::kFp8DsMla, or these become others. A warp moves a token.
struct EncodeDsMla {
  static constexpr bool kByWarps = true;
  static __device__ void move(const MoveHalf& half, const std::byte* from, std::byte* to) {
    const float factor = is_fp8(half.from.dtype) ? scale_at(half.from_scale, 0, 0) : 1.0f;
    encode_ds_mla(from, half.from.dtype, factor, to);
  }
};
struct DecodeDsMla {
  static constexpr bool kByWarps = true;
  static __device__ void move(const MoveHalf& half, const std::byte* from, std::byte* to) {
    const float divisor = is_fp8(half.to.dtype) ? scale_at(half.to_scale, 0, 0) : 1.0f;
    decode_ds_mla(from, to, half.to.dtype, half.head_dim, divisor);
  }
};

/// Moves a tile's first `num_tokens` tokens. The tile was written before the block's last barrier.
template <typename Move>
requires(Move::kByWarps) __device__
    inline void move_tile(const MoveHalf& half, const MoveTile& tile, uint32_t num_tokens) {
  for (uint32_t token = threadIdx.x / 32; token < num_tokens; token += kMoveThreads / 32) {
    if (tile.from[token] != nullptr) Move::move(half, tile.from[token], tile.to[token]);
  }
}

/// The same. A thread takes the same pieces of every token, so that what a piece and its head have in common is found
/// once.
template <typename Move>
__device__ inline void move_tile(const MoveHalf& half, const MoveTile& tile, uint32_t num_tokens) {
  constexpr int32_t kUnroll = Move::kInFlight;
  const uint32_t lane = half.columns.quotient(threadIdx.x);
  const uint32_t lanes = half.lanes;
  if (lane >= lanes) return;
  for (uint32_t at = half.columns.remainder(threadIdx.x); at < half.pieces; at += half.columns.divisor()) {
    const auto head = static_cast<int32_t>(half.per_head.quotient(at));
    const uint32_t piece = at - head * half.per_head.divisor();
    const int64_t from = head * half.from_head_bytes + piece * half.from_piece_bytes;
    const int64_t to = head * half.to_head_bytes + piece * half.to_piece_bytes;
    const Move move(half, head);
    for (uint32_t first = lane; first < num_tokens; first += lanes * kUnroll) {
      typename Move::Loaded loaded[kUnroll];
      bool moves[kUnroll];
#pragma unroll
      for (int32_t u = 0; u < kUnroll; ++u) {
        const uint32_t token = first + u * lanes;
        const std::byte* const begin = token < num_tokens ? tile.from[token] : nullptr;
        moves[u] = begin != nullptr;
        if (moves[u]) loaded[u] = Move::load(begin + from);
      }
#pragma unroll
      for (int32_t u = 0; u < kUnroll; ++u) {
        const uint32_t token = first + u * lanes;
        if (moves[u]) move.store(tile.to[token] + to, loaded[u], tile.request[token]);
      }
    }
  }
}

/// Names a Copy or Convert.
template <typename MoveOfType>
struct MoveType {
  using Move = MoveOfType;
};

/// Calls launch(type, first half, number of halves), `type` naming a Copy or Convert that suits the halves: once where
/// one suits both.
template <typename Launch>
void for_halves(const MoveParams& params, const Launch& launch) {
  const auto launch_half = [&](int32_t first, int32_t count) {
    const MoveHalf& half = params.halves[first];
    switch (move_kind(half)) {
      case MoveKind::kCopy16: return launch(MoveType<Copy<uint4>>{}, first, count);
      case MoveKind::kCopy4: return launch(MoveType<Copy<uint32_t>>{}, first, count);
      case MoveKind::kCopy2: return launch(MoveType<Copy<uint16_t>>{}, first, count);
      case MoveKind::kCopy1: return launch(MoveType<Copy<uint8_t>>{}, first, count);
      case MoveKind::kWide1: return launch(MoveType<Convert<1, kWide>>{}, first, count);
      case MoveKind::kWide2: return launch(MoveType<Convert<2, kWide>>{}, first, count);
      case MoveKind::kWide4: return launch(MoveType<Convert<4, kWide>>{}, first, count);
      case MoveKind::kQuad1: return launch(MoveType<Convert<1, 4>>{}, first, count);
      case MoveKind::kQuad2: return launch(MoveType<Convert<2, 4>>{}, first, count);
      case MoveKind::kSingle1: return launch(MoveType<Convert<1, 1>>{}, first, count);
      case MoveKind::kSingle2: return launch(MoveType<Convert<2, 1>>{}, first, count);
      case MoveKind::kSingle4: return launch(MoveType<Convert<4, 1>>{}, first, count);
      case MoveKind::kEncodeDsMla: return launch(MoveType<EncodeDsMla>{}, first, count);
      case MoveKind::kDecodeDsMla: return launch(MoveType<DecodeDsMla>{}, first, count);
    }
  };
  if (params.num_halves == 2 && move_kind(params.halves[0]) == move_kind(params.halves[1])) return launch_half(0, 2);
  for (int32_t h = 0; h < params.num_halves; ++h) launch_half(h, 1);
}

}  // namespace folio::inline v0::kernels::cuda
