#pragma once

#include <cuda_fp8.h>

#include "kernels/cuda/sm90/decode/stored.cuh"
#include "scheduler/mask_bounds.hpp"

/// Copies of eight elements by a warp's threads, for what no tensor map describes or what has to be widened.
namespace folio::inline v0::kernels::cuda::sm90 {

/// Two fp8 codes widened: exactly, NaN and infinities too.
template <typename T>
__device__ __forceinline__ uint32_t widen_two(uint32_t codes, __nv_fp8_interpretation_t kind) {
  const __half2 values = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), kind);
  const float2 wide = __half22float2(values);
  return ptx::pack_two<T>(wide.x, wide.y);
}

/// Eight elements, one by one, whatever their type and address; zeros where not valid. Not for inner loops.
template <typename T>
__device__ __forceinline__ void copy_any(uint32_t shared, const void* data, DType dtype, int64_t at, bool valid) {
  uint32_t parts[kPiece / 2] = {};
  if (valid && is_fp8(dtype)) {
    const auto* const from = static_cast<const uint8_t*>(data) + at;
    const __nv_fp8_interpretation_t kind = dtype == DType::kFloat8E5M2 ? __NV_E5M2 : __NV_E4M3;
#pragma unroll
    for (int32_t i = 0; i < kPiece; i += 2) parts[i / 2] = widen_two<T>(from[i] | uint32_t{from[i + 1]} << 8, kind);
  } else if (valid) {
    const auto* const from = static_cast<const uint16_t*>(data) + at;
#pragma unroll
    for (int32_t i = 0; i < kPiece; ++i) parts[i / 2] |= uint32_t{from[i]} << (i % 2 * 16);
  }
  ptx::st_shared_16(shared, uint4{parts[0], parts[1], parts[2], parts[3]});
}

/// The same of queries. Called, so that what is seldom done does not stand between what always is.
template <typename T>
__device__ FOLIO_CALLED void copy_query_piece(const AttentionParams& params, uint32_t shared, int64_t at, bool valid) {
  copy_any<T>(shared, params.q, params.q_dtype, at, valid);
}

/// Sixteen codes as they are, whatever their address; zeros where not valid.
__device__ __forceinline__ void copy_codes(uint32_t shared, const uint8_t* from, bool valid) {
  uint32_t parts[4] = {};
#pragma unroll
  for (int32_t i = 0; valid && i < 16; ++i) parts[i / 4] |= uint32_t{from[i]} << (i % 4 * 8);
  ptx::st_shared_16(shared, uint4{parts[0], parts[1], parts[2], parts[3]});
}

/// Keys or values of one tile, token by token, as boxes of kLargeBox would leave them; zeros for tokens that no row
/// sees. `direct`: elements are stored as they are in shared memory, and every head of a token begins at a multiple of
/// 16 bytes.
template <typename T, int32_t Dim, Codes kCodes>
__device__ __forceinline__ void copy_tokens(uint32_t tile, const TokenPlace* places, const void* data, DType dtype,
                                            const KvStrides& strides, int32_t head, bool direct, int32_t lane) {
  constexpr int32_t kBytes = element_bytes(kCodes);
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
    if constexpr (kCodes == Codes::kNone) {
      copy_any<T>(to, data, dtype, at, valid);
    } else {
      copy_codes(to, static_cast<const uint8_t*>(data) + at, valid);
    }
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90
