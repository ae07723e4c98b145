#pragma once

#include "kernels/cuda/sm90/common/copy.cuh"
#include "kernels/cuda/sm90/decode/stored.cuh"

/// Copies of eight elements by a warp's threads, for what no tensor map describes or what has to be widened.
namespace folio::inline v0::kernels::cuda::sm90::decode {

/// The same of queries. Called, so that what is seldom done does not stand between what always is.
template <typename T>
__device__ FOLIO_CALLED void copy_query_piece(const AttentionParams& params, uint32_t shared, int64_t at, bool valid) {
  copy_upcast_16B<T>(shared, params.q, params.q_dtype, at, valid);
}

/// Keys or values of one tile, token by token, as boxes of kLargeBox would leave them; zeros for tokens that no row
/// sees. `direct`: elements are stored as they are in shared memory, and every head of a token begins at a multiple of
/// 16 bytes.
template <typename T, int32_t Dim, Fp8 kFp8>
__device__ __forceinline__ void copy_tokens(uint32_t tile, const TokenPlace* places, const void* data, DType dtype,
                                            const KvStrides& strides, int32_t head, bool direct, int32_t lane) {
  constexpr int32_t kBytes = element_bytes(kFp8);
  constexpr int32_t kElements = 16 / kBytes;
  constexpr int32_t kPieces = Dim / kElements;
  const int64_t of_head = head * strides.head;
  if (direct) {  // a lane works out where a token begins: in 64 bits, that is most of the work
    static_assert(kTileTokens * kPieces % 32 == 0);
    const TokenPlace mine = places[lane % kTileTokens];
    const uint32_t seen = __ballot_sync(kAllLanes, mine.in_page >= 0);
    const int64_t at = mine.in_page < 0 ? 0 : mine.page * strides.page + mine.in_page * strides.token + of_head;
    const auto begins = reinterpret_cast<uint64_t>(static_cast<const uint8_t*>(data) + kBytes * at);
    const auto copy = [&](uint32_t to, int32_t token, int32_t piece) {
      const auto* const from = reinterpret_cast<const uint8_t*>(__shfl_sync(kAllLanes, begins, token));
      ptx::cp_async_16(to, from + 16 * piece, (seen >> token & 1) != 0);
    };
    if constexpr (32 % kPieces == 0) {  // a lane has one piece of every token: of eight, places differ by constants
      constexpr int32_t kStep = 32 / kPieces;
      constexpr int32_t kWidth = side_by_side(Dim, kBytes);
      static_assert(kWidth == 128 || kStep == 8);
      const int32_t piece = lane % kPieces;
      int32_t token = lane / kPieces;
      auto to = tile + static_cast<uint32_t>(piece_offset(Dim, kBytes, kLargeBox, token, piece));
#pragma unroll 1
      for (; token < kTileTokens; token += 8) {
#pragma unroll
        for (int32_t next = 0; next < 8; next += kStep) {
          copy((to ^ static_cast<uint32_t>(16 * next)) + static_cast<uint32_t>(next * kWidth), token + next, piece);
        }
        to += 8 * kWidth;
      }
    } else {
#pragma unroll 4
      for (int32_t i = lane; i < kTileTokens * kPieces; i += 32) {
        const int32_t token = i / kPieces;
        const int32_t piece = i % kPieces;
        copy(tile + static_cast<uint32_t>(piece_offset(Dim, kBytes, kLargeBox, token, piece)), token, piece);
      }
    }
    return;
  }
#pragma unroll 1
  for (int32_t i = lane; i < kTileTokens * kPieces; i += 32) {
    const int32_t token = i / kPieces;
    const int32_t piece = i % kPieces;
    const TokenPlace place = places[token];
    const bool valid = place.in_page >= 0;
    const int64_t at = place.page * strides.page + place.in_page * strides.token + of_head + piece * kElements;
    const uint32_t to = tile + static_cast<uint32_t>(piece_offset(Dim, kBytes, kLargeBox, token, piece));
    if constexpr (kFp8 == Fp8::kNone) {
      copy_upcast_16B<T>(to, data, dtype, at, valid);
    } else {
      copy_fp8_16B(to, static_cast<const uint8_t*>(data) + at, valid);
    }
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
