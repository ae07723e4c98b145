#include "kernels/cuda/common/cache/shape.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "kernels/cuda/common/division.hpp"

namespace folio::inline v0::kernels::cuda {
namespace {

TEST(FastDiv, DividesEveryNumberBelowTwoToThe31) {
  constexpr uint32_t kMost = std::numeric_limits<int32_t>::max();
  std::mt19937 random(1);
  for (int32_t i = 0; i < 4000; ++i) {
    const auto large = static_cast<uint32_t>(random() % kMost >> random() % 31) + 1;
    const uint32_t divisor = i < 1000 ? static_cast<uint32_t>(i) + 1 : large;
    const FastDiv division(static_cast<int32_t>(divisor));
    const uint32_t multiple = kMost / divisor * divisor;  // around multiples of the divisor a wrong multiplier shows
    for (const uint32_t n :
         {0u, divisor - 1, divisor, multiple - 1, multiple, kMost, static_cast<uint32_t>(random() % kMost)}) {
      if (n > kMost) continue;
      ASSERT_EQ(division.quotient(n), n / divisor) << n << " / " << divisor;
      ASSERT_EQ(division.remainder(n), n % divisor) << n << " % " << divisor;
    }
  }
}

TEST(PieceSplit, SplitsIntoTokenHeadAndPiece) {
  const PieceSplit split(5, 3);
  for (uint32_t i = 0; i < 100; ++i) {
    const PieceIndex at = split.at(i);
    EXPECT_EQ(at.token * 15 + at.head * 5 + at.piece, i);
    EXPECT_LT(at.head, 3u);
    EXPECT_LT(at.piece, 5u);
  }
}

MoveParams packed_move(DType from, DType to, int32_t head_dim) {
  MoveParams params;
  params.num_heads = 4;
  for (MoveHalf& half : params.halves) {
    half.from = {reinterpret_cast<std::byte*>(256), from, 0, int64_t{4} * head_dim, head_dim, 1};
    half.to = {reinterpret_cast<std::byte*>(256), to, int64_t{64} * head_dim, int64_t{4} * head_dim, head_dim, 1};
    half.head_dim = head_dim;
    half.bitwise = from == to;
  }
  return params;
}

MoveKind kind_of(MoveParams params) {
  set_shape(params, 1 << 20);
  return move_kind(params.halves[0]);
}

TEST(MoveShape, TakesTheWidestPieceThatDividesEverything) {
  EXPECT_EQ(kind_of(packed_move(DType::kBFloat16, DType::kBFloat16, 64)), MoveKind::kCopy16);
  EXPECT_EQ(kind_of(packed_move(DType::kBFloat16, DType::kBFloat16, 6)), MoveKind::kCopy4);
  EXPECT_EQ(kind_of(packed_move(DType::kBFloat16, DType::kBFloat16, 5)), MoveKind::kCopy2);
  EXPECT_EQ(kind_of(packed_move(DType::kFloat8E4M3, DType::kFloat8E4M3, 5)), MoveKind::kCopy1);
  EXPECT_EQ(kind_of(packed_move(DType::kBFloat16, DType::kFloat8E4M3, 64)), MoveKind::kWide2);
  EXPECT_EQ(kind_of(packed_move(DType::kFloat8E4M3, DType::kBFloat16, 8)), MoveKind::kWide1);
  EXPECT_EQ(kind_of(packed_move(DType::kFloat8E4M3, DType::kFloat32, 12)), MoveKind::kQuad1);
  EXPECT_EQ(kind_of(packed_move(DType::kBFloat16, DType::kFloat32, 64)), MoveKind::kQuad2);
  EXPECT_EQ(kind_of(packed_move(DType::kBFloat16, DType::kFloat32, 6)), MoveKind::kSingle2);
  EXPECT_EQ(kind_of(packed_move(DType::kFloat32, DType::kFloat16, 12)), MoveKind::kSingle4);
  MoveParams misaligned = packed_move(DType::kBFloat16, DType::kFloat8E4M3, 64);
  misaligned.halves[0].to.data += 4;
  EXPECT_EQ(kind_of(misaligned), MoveKind::kSingle2);
  MoveParams pairs = packed_move(DType::kBFloat16, DType::kBFloat16, 64);
  pairs.halves[0].to.step = 2;
  EXPECT_EQ(kind_of(pairs), MoveKind::kCopy2);
}

TEST(MoveShape, ThreadsShareATokensPiecesInEqualParts) {
  struct Shared {
    int32_t heads, head_dim;
    uint32_t pieces, columns, lanes;
  };
  for (const Shared& shared : {Shared{4, 64, 32, 32, 8}, Shared{8, 128, 128, 128, 2}, Shared{5, 72, 45, 45, 5},
                               Shared{32, 128, 512, 256, 1}, Shared{17, 128, 272, 136, 1}}) {
    MoveParams params = packed_move(DType::kBFloat16, DType::kBFloat16, shared.head_dim);
    params.num_heads = shared.heads;
    set_shape(params, 1 << 20);
    const MoveHalf& half = params.halves[0];
    EXPECT_EQ(half.pieces, shared.pieces);
    EXPECT_EQ(half.columns.divisor(), shared.columns);
    EXPECT_EQ(half.lanes, shared.lanes);
    EXPECT_LE(half.lanes * half.columns.divisor(), static_cast<uint32_t>(kMoveThreads));
  }
}

TEST(MoveShape, TilesGrowWithWhatThereIsToDo) {
  MoveParams params = packed_move(DType::kBFloat16, DType::kBFloat16, 128);
  set_shape(params, 1 << 20);
  EXPECT_EQ(params.tile, 16);  // 64 pieces a token, 1,024 a CTA
  set_shape(params, 256);
  EXPECT_EQ(params.tile, 1);
  MoveParams tiny = packed_move(DType::kBFloat16, DType::kBFloat16, 8);
  set_shape(tiny, 1 << 20);
  EXPECT_EQ(tiny.tile, 64);
}

}  // namespace
}  // namespace folio::inline v0::kernels::cuda
