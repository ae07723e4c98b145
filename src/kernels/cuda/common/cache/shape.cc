#include "kernels/cuda/common/cache/shape.hpp"

#include <algorithm>

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int64_t kPiecesPerBlock = 1024;  // four for each of 256 threads; twice as many that are converted, which are
                                           // smaller on one side
constexpr int64_t kMaxTile = 64;
constexpr int64_t kManyBlocks = 512;  // fewer leave SMs of today's parts without work

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

/// Eight elements, but four where they become 4 bytes each: neighbouring threads then store 16 bytes beside each other.
int32_t convert_piece(const MoveHalf& half) {
  const int32_t piece = size_of(half.from.dtype) < 4 && half.to.dtype == DType::kFloat32 ? 4 : 8;
  if (half.head_dim % piece != 0) return 1;
  for (const MoveSide* side : {&half.from, &half.to}) {
    const auto bytes = static_cast<uintptr_t>(std::min(piece * size_of(side->dtype), 16));
    if (side->step != 1 || reinterpret_cast<uintptr_t>(side->data) % bytes != 0) return 1;
    if ((side->page_stride | side->token_stride | side->head_stride) % piece != 0) return 1;
  }
  return piece;
}

}  // namespace

MoveKind move_kind(const MoveHalf& half) {
  const int32_t bytes = size_of(half.from.dtype);
  if (half.bitwise) {
    switch (half.piece * bytes) {
      case 16: return MoveKind::kCopy16;
      case 4: return MoveKind::kCopy4;
      case 2: return MoveKind::kCopy2;
      default: return MoveKind::kCopy1;
    }
  }
  if (half.to.ds_mla) return MoveKind::kEncodeDsMla;
  if (half.from.ds_mla) return MoveKind::kDecodeDsMla;
  if (half.piece == 4) return bytes == 1 ? MoveKind::kQuad1 : MoveKind::kQuad2;
  const bool wide = half.piece == 8;
  switch (bytes) {
    case 1: return wide ? MoveKind::kWide1 : MoveKind::kSingle1;
    case 2: return wide ? MoveKind::kWide2 : MoveKind::kSingle2;
    default: return wide ? MoveKind::kWide4 : MoveKind::kSingle4;
  }
}

void set_shape(MoveParams& params, int64_t num_tokens) {
  int64_t pieces = 1;
  int64_t wanted = kPiecesPerBlock;
  for (int32_t h = 0; h < params.num_halves; ++h) {
    MoveHalf& half = params.halves[h];
    half.piece = half.bitwise ? copy_piece(half) : convert_piece(half);
    const int32_t per_head = half.head_dim / half.piece;
    const int32_t per_token = per_head * params.num_heads;
    // A token that has more pieces than there are threads takes its turns in equal parts.
    const int32_t turns = (per_token + kMoveThreads - 1) / kMoveThreads;
    const int32_t columns = (per_token + turns - 1) / turns;
    half.pieces = static_cast<uint32_t>(per_token);
    half.lanes = static_cast<uint32_t>(kMoveThreads / columns);
    half.columns = FastDiv(columns);
    half.per_head = FastDiv(per_head);
    const int32_t from_bytes = size_of(half.from.dtype);
    const int32_t to_bytes = size_of(half.to.dtype);
    half.from_head_bytes = half.from.head_stride * from_bytes;
    half.to_head_bytes = half.to.head_stride * to_bytes;
    half.from_piece_bytes = half.piece * half.from.step * from_bytes;
    half.to_piece_bytes = half.piece * half.to.step * to_bytes;
    if (!half.bitwise) wanted = 2 * kPiecesPerBlock;
    pieces = std::max<int64_t>(pieces, per_token);
  }
  const int64_t by_work = wanted / pieces;
  params.tile = static_cast<int32_t>(std::clamp<int64_t>(std::min(by_work, num_tokens / kManyBlocks), 1, kMaxTile));
}

}  // namespace folio::inline v0::kernels::cuda
