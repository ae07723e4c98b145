#pragma once

#include "kernels/cuda/sm90/decode/shared_state.cuh"

/// Copies of 16-byte pieces by a warp's threads, for what no tensor map describes.
namespace folio::inline v0::kernels::cuda::sm90 {

/// Eight elements one by one, whatever their address; zeros where not valid.
__device__ __forceinline__ void copy_unaligned(uint32_t shared, const uint16_t* from, bool valid) {
  uint32_t parts[kPiece / 2] = {};
  if (valid) {
#pragma unroll
    for (int32_t i = 0; i < kPiece; ++i) parts[i / 2] |= uint32_t{from[i]} << (i % 2 * 16);
  }
  ptx::store_16(shared, uint4{parts[0], parts[1], parts[2], parts[3]});
}

/// Keys or values of one tile, token by token, as boxes of kLargeBox would leave them; zeros for tokens that no row
/// sees and components beyond the head dimension.
template <int32_t Dim>
__device__ __forceinline__ void copy_tokens(uint32_t tile, const TokenPlace* places, const void* data,
                                            const KvStrides& strides, int32_t head, int32_t head_dim, bool aligned,
                                            int32_t lane) {
  constexpr int32_t kPieces = Dim / kPiece;
  const auto* const from = static_cast<const uint16_t*>(data) + head * strides.head;
#pragma unroll 4
  for (int32_t i = lane; i < kTileTokens * kPieces; i += 32) {
    const int32_t token = i / kPieces;
    const int32_t piece = i % kPieces;
    const TokenPlace place = places[token];
    const bool valid = place.in_page >= 0 && piece * kPiece < head_dim;
    const int64_t at = valid ? place.page * strides.page + place.in_page * strides.token + piece * kPiece : 0;
    const uint32_t target = tile + static_cast<uint32_t>(piece_offset(Dim, kLargeBox, token, piece));
    if (aligned) {
      ptx::copy_16_async(target, from + at, valid);
    } else {
      copy_unaligned(target, from + at, valid);
    }
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90
