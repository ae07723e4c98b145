#pragma once

#include "kernels/cpu/common/mask.hpp"

/// Blocks of GEMM0 (S = Q K^T) and GEMM1 (O += P V).
///
/// A score is the sum over registers of the dimension, in order, and then over the lanes, always by halves. GEMM1 adds
/// up a KV tile's tokens in order, each by a multiply-add, from 0; acc takes the tile's sum at once. A sum that took
/// every token one by one would drift over long contexts. Blocks of every shape do the same operations: a row's bits do
/// not depend on the rows beside it. A masked token has p = 0 and changes nothing, so that rows may share loops over
/// more than their own tokens.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// Work tiles of up to so many rows read K and V straight from the cache; more rows share upcast copies.
inline constexpr int32_t kMaxDirectRows = 8;

/// A block is kRows rows and kScoreTokens tokens: one register of scores, or several where the registers hold as many
/// sums.
inline constexpr int kBlockScores = kVecRegisters == 32 ? 16 : kLanes;
template <int kRows>
inline constexpr int kScoreTokens = kBlockScores / kRows;

/// Which register's lanes are summed for a block's score: sum_lanes's order, in each kLanes of them.
FOLIO_INLINE constexpr int register_of_score(int score) {
  const int lane = score % kLanes;
  return score - lane + kLanes / 4 * (lane % 4) + lane / 4;
}

/// Registers of V's components that a block of kRows rows keeps at a time: what the register file holds. With 16 of 8
/// lanes, a third one hides more of a multiply-add's latency; a pair of tokens has no room for it.
template <int kRows, bool kPairs = false>
inline constexpr int kValueVecs = kLanes == 8 && kRows > 2 && !kPairs ? 3 : kVecRegisters / 4 / (kRows <= 2 ? 1 : 2);

/// Tokens of a KV tile.
struct TokenSpan {
  int32_t begin;
  int32_t end;
};

/// The sum over a KV tile, of kRows rows and kVecs registers.
template <int kRows, int kVecs>
struct PvAccumulator {
  Vec acc_regs[kRows][kVecs] = {};

  /// Adds a token's V: kCount registers, of which the first is the sum's register `first`.
  template <int kCount = kVecs>
  FOLIO_INLINE_MEMBER void fma(const float* p, const Vec* values, int first = 0) {
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const Vec p_i = splat(p[i * kTileTokens]);
#pragma GCC unroll 8
      for (int c = 0; c < kCount; ++c) acc_regs[i][first + c] = multiply_add(p_i, values[c], acc_regs[i][first + c]);
    }
  }
  /// acc = acc * rescale + the sum, of the first `vecs` registers.
  FOLIO_INLINE_MEMBER void add_to_acc(float* acc, int32_t stride, const float* rescale, int32_t vecs = kVecs) const {
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (int c = 0; c < kVecs && c < vecs; ++c) {
        float* const at = acc + i * stride + c * kLanes;
        store(at, multiply_add(load<Vec>(at), splat(rescale[i]), acc_regs[i][c]));
      }
    }
  }
};

/// Upcast V of a KV tile: components [begin, end), in order; `stride` floats from a token to the next.
struct UpcastV {
  const float* data;
  int32_t stride;
  int32_t begin;
  int32_t end;
};

/// One block of GEMM1 from upcast V.
template <int kRows, int kVecs>
FOLIO_INLINE void pv_block_from_upcast(const WorkTileParams& work, const UpcastV& v, int32_t r, int32_t d,
                                       TokenSpan span) {
  const float* const p = work.scratch.p + r * kTileTokens;
  PvAccumulator<kRows, kVecs> block;
  for (int32_t t = span.begin; t < span.end; ++t) {
    Vec values[kVecs];
#pragma GCC unroll 8
    for (int c = 0; c < kVecs; ++c) values[c] = load<Vec>(v.data + t * v.stride + (d - v.begin) + c * kLanes);
    block.fma(p + t, values);
  }
  block.add_to_acc(work.state.acc + r * work.v_stride + d, work.v_stride, work.scratch.rescale + r);
}

/// Components [d, v.end) of rows [r, r + kRows), in blocks of kVecs registers, then smaller ones.
template <int kRows, int kVecs>
FOLIO_INLINE void pv_blocks_from_upcast(const WorkTileParams& work, const UpcastV& v, int32_t r, int32_t d,
                                        TokenSpan span) {
  for (; d + kVecs * kLanes <= v.end; d += kVecs * kLanes) pv_block_from_upcast<kRows, kVecs>(work, v, r, d, span);
  if constexpr (kVecs > 1) pv_blocks_from_upcast<kRows, kVecs / 2>(work, v, r, d, span);
}

/// Rows [r, r + kRows), over the tokens that are visible to some of them.
template <int kRows, int kVecs = kValueVecs<kRows>>
static void pv_rows_from_upcast(const WorkTileParams& work, const UpcastV& v, const uint64_t* visible, int32_t r) {
  uint64_t any = 0;
  for (int i = 0; i < kRows; ++i) any |= visible[r + i];
  if (any == 0) return;
  pv_blocks_from_upcast<kRows, kVecs>(work, v, r, v.begin, {__builtin_ctzll(any), 64 - __builtin_clzll(any)});
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
