#pragma once

#include "kernels/cuda/sm80/attention/codes.cuh"
#include "kernels/cuda/sm80/attention/rows.cuh"

namespace folio::inline v0::kernels::cuda::sm80 {

/// Keys or values of a tile that warps share, on their way through shared memory: copied as e4m3 codes to a place
/// where nobody else looks, while products are under way, and widened to float16 into the tile by the thread that asked
/// for them. So no thread waits for memory, and a code is widened once, not by every warp.
template <int32_t Dim, int32_t Tokens>
class CodeStage {
  static constexpr int32_t kBytes = 16;             ///< of a piece
  static constexpr int32_t kPieces = Dim / kBytes;  ///< of a token
  static constexpr int32_t kMine = Tokens * kPieces / kThreads;
  static constexpr int32_t kTokenThreads = 8;
  static_assert(kMine * kThreads == Tokens * kPieces && kThreads == 16 * kTokenThreads);

  /// Pieces of a thread's tokens, one token after the other, are dealt to its eight threads.
  __device__ __forceinline__ static int32_t piece_of(int32_t i, int32_t thread) {
    return i * kTokenThreads + thread % kTokenThreads;
  }

 public:
  /// Begins the copies of this thread's pieces. `places`: of the tokens of which eight threads, this one among them,
  /// have all pieces: one of each 16. Of those that are null, zeros.
  __device__ __forceinline__ static void copy(uint32_t stage, const std::byte* const (&places)[kTokens / 16],
                                              int32_t thread) {
    const std::byte* from[kMine];  // read at once, not one behind each copy
#pragma unroll
    for (int32_t i = 0; i < kMine; ++i) from[i] = places[piece_of(i, thread) / kPieces];
#pragma unroll
    for (int32_t i = 0; i < kMine; ++i) {
      ptx::cp_async_16(stage + kBytes * (i * kThreads + thread), from[i] + piece_of(i, thread) % kPieces * kBytes,
                       from[i] != nullptr);
    }
  }

  /// Widens this thread's pieces, whose copies have ended. Threads with neighbouring pieces store halves of different
  /// parity at a time, which lie in different banks.
  __device__ __forceinline__ static void widen(uint32_t stage, uint32_t tile, int32_t thread) {
#pragma unroll
    for (int32_t i = 0; i < kMine; ++i) {
      const int32_t piece = piece_of(i, thread);
      const int32_t token = piece / kPieces * 16 + thread / kTokenThreads;
      const int32_t in_token = piece % kPieces;
      const uint4 codes = ptx::ld_shared_16(stage + kBytes * (i * kThreads + thread));
      uint4 low;
      uint4 high;
      widen_four(codes.x, low.x, low.y);
      widen_four(codes.y, low.z, low.w);
      widen_four(codes.z, high.x, high.y);
      widen_four(codes.w, high.z, high.w);
      const bool turned = (in_token & 4) != 0;
      ptx::st_shared_16(tile + piece_offset(Dim, token, 2 * in_token + (turned ? 1 : 0)), turned ? high : low);
      ptx::st_shared_16(tile + piece_offset(Dim, token, 2 * in_token + (turned ? 0 : 1)), turned ? low : high);
    }
  }
};

}  // namespace folio::inline v0::kernels::cuda::sm80
