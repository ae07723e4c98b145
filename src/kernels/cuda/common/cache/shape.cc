#include "kernels/cuda/common/cache/shape.hpp"

#include <algorithm>

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int64_t kPiecesPerBlock = 1024;  // four for each of 256 threads
constexpr int64_t kMaxTile = 64;
constexpr int64_t kManyBlocks = 512;  // fewer leave multiprocessors of today's parts without work

/// The widest piece in elements, 16 bytes at most, that every row of a side begins and ends at a multiple of.
int32_t copy_piece(const MoveHalf& half) {
  const int64_t bytes = size_of(half.from.dtype);
  uintptr_t all = static_cast<uintptr_t>(half.head_dim * bytes);
  for (const MoveSide* side : {&half.from, &half.to}) {
    if (side->step != 1) return 1;
    all |= reinterpret_cast<uintptr_t>(side->data);
    for (const int64_t stride : {side->page_stride, side->token_stride, side->head_stride}) {
      all |= static_cast<uintptr_t>(stride * bytes);
    }
  }
  const int64_t piece = all % 16 == 0 ? 16 : (all % 4 == 0 ? 4 : (all % 2 == 0 ? 2 : 1));
  return static_cast<int32_t>(std::max<int64_t>(piece / bytes, 1));
}

int32_t convert_piece(const MoveHalf& half) {
  if (half.head_dim % 8 != 0) return 1;
  for (const MoveSide* side : {&half.from, &half.to}) {
    const auto bytes = static_cast<uintptr_t>(std::min(8 * size_of(side->dtype), 16));
    if (side->step != 1 || reinterpret_cast<uintptr_t>(side->data) % bytes != 0) return 1;
    if ((side->page_stride | side->token_stride | side->head_stride) % 8 != 0) return 1;
  }
  return 8;
}

}  // namespace

void set_shape(MoveParams& params, int64_t num_tokens) {
  int64_t pieces = 0;
  for (int32_t h = 0; h < params.num_halves; ++h) {
    MoveHalf& half = params.halves[h];
    half.piece = half.bitwise ? copy_piece(half) : convert_piece(half);
    pieces += int64_t{half.head_dim / half.piece} * params.num_heads;
  }
  const int64_t by_work = kPiecesPerBlock / std::max<int64_t>(pieces, 1);
  params.tile = static_cast<int32_t>(std::clamp<int64_t>(std::min(by_work, num_tokens / kManyBlocks), 1, kMaxTile));
}

}  // namespace folio::inline v0::kernels::cuda
