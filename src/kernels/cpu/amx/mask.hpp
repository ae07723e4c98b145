#pragma once

#include "kernels/cpu/amx/config.hpp"

/// Visible KV ranges: which tiles of a work tile some row attends to, and which tokens of a tile each row does.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// What is visible to all rows of a work tile: KV tiles within it need no mask.
struct VisibleRange {
  int32_t begin;
  int32_t end;
  bool masked;  ///< some row has a custom mask
};

FOLIO_INLINE VisibleRange common_visible_range(const WorkTileParams& work) {
  VisibleRange range{work.rows[0].visible_begin, work.rows[0].visible_end, false};
  for (int32_t r = 0; r < work.num_rows; ++r) {
    range.begin = larger(range.begin, work.rows[r].visible_begin);
    range.end = smaller(range.end, work.rows[r].visible_end);
    range.masked |= work.rows[r].mask != nullptr;
  }
  return range;
}

/// Finds the first KV tile from token `first` on with a token visible to some row; false if there is none.
static inline bool find_tile(const WorkTileParams& work, const VisibleRange& range, int32_t first,
                             TileOperands& operands) {
  const KvOperand& kv = work.kv;
  for (; first < kv.kv_end; first += kTileTokens) {
    const KvTile part{first, larger(kv.kv_begin - first, 0), smaller(kv.kv_end - first, kTileTokens)};
    operands.non_finite = operands.non_finite_keys = 0;
    if (!range.masked && range.begin <= first + part.begin && first + part.end <= range.end) {
      operands.tile = part;
      operands.uniform = true;
      return true;
    }
    uint64_t any = 0;
    uint64_t all = ~uint64_t{0};
    for (int32_t r = 0; r < work.num_rows; ++r) {
      operands.visible[r] = visible_tokens(work.rows[r], part);
      any |= operands.visible[r];
      all &= operands.visible[r];
    }
    if (any == 0) continue;
    for (int32_t r = work.num_rows; r % kRowBlock != 0; ++r) operands.visible[r] = 0;
    operands.tile = {first, __builtin_ctzll(any), 64 - __builtin_clzll(any)};
    operands.uniform = all == bit_range(operands.tile.begin, operands.tile.end);
    return true;
  }
  return false;
}

/// Fills the batch with KV tiles from token `first` on, at most `most`. Returns where the next batch begins.
static inline int32_t find_batch(const WorkTileParams& work, const VisibleRange& range, int32_t first, int32_t most,
                                 TileBatch& batch) {
  batch.count = 0;
  while (batch.count < most && find_tile(work, range, first, batch.tiles[batch.count])) {
    first = batch.tiles[batch.count++].tile.first + kTileTokens;
  }
  return first;
}

/// The mask of a row block and a KV tile.
struct RowBlockMask {
  bool any;
  bool masked;  ///< some token is masked for some row: the words below are used
  IntVec low;   ///< tokens [0, 32) of each row
  IntVec high;
};

FOLIO_INLINE RowBlockMask row_block_mask(const TileOperands& operands, int32_t r, int32_t rows) {
  const uint64_t range = bit_range(operands.tile.begin, operands.tile.end);
  if (operands.uniform) {
    return {true, range != ~uint64_t{0}, splat_int(static_cast<int32_t>(range)),
            splat_int(static_cast<int32_t>(range >> 32))};
  }
  uint64_t any = 0;
  uint64_t all = ~uint64_t{0};
  for (int32_t i = 0; i < rows; ++i) {
    any |= operands.visible[r + i];
    all &= operands.visible[r + i];
  }
  const IntVec first = load<IntVec>(operands.visible + r);
  const IntVec second = load<IntVec>(operands.visible + r + 8);
  return {any != 0, all != ~uint64_t{0},
          FOLIO_SHUFFLE(first, second, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
          FOLIO_SHUFFLE(first, second, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)};
}

/// Lanes of the rows to which token t is visible.
FOLIO_INLINE __mmask16 visible_lanes(const RowBlockMask& mask, int32_t t) {
  const IntVec word = t < 32 ? mask.low : mask.high;
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(word),
                                reinterpret_cast<__m512i>(splat_int(static_cast<int32_t>(uint32_t{1} << (t % 32)))));
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
