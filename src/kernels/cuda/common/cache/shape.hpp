#pragma once

#include <cstdint>

#include "kernels/cuda/common/cache/move.hpp"

namespace folio::inline v0::kernels::cuda {

inline constexpr int32_t kMoveThreads = 256;

/// How a half's pieces move: as they are, 16, 4, 2 or 1 bytes at a time, or converted, eight elements at a time or one,
/// from elements of 1, 2 or 4 bytes, or four that become 4 bytes each from 1 or 2. Whole rows to or from those of
/// KvFormat::kFp8DsMla.
enum class MoveKind {
  kCopy16,
  kCopy4,
  kCopy2,
  kCopy1,
  kWide1,
  kWide2,
  kWide4,
  kQuad1,
  kQuad2,
  kSingle1,
  kSingle2,
  kSingle4,
  kEncodeDsMla,
  kDecodeDsMla
};
MoveKind move_kind(const MoveHalf& half);

/// Sets pieces, how threads share them, and the tile: the widest pieces that addresses and strides allow, and as many
/// tokens as give each thread four of a half, eight where they are converted, fewer where there are few tokens.
void set_shape(MoveParams& params, int64_t num_tokens);

}  // namespace folio::inline v0::kernels::cuda
