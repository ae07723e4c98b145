#pragma once

#include <cstdint>

#include "kernels/cpu/common/vec.hpp"

/// Masks of a KV tile: which of its tokens each row attends to, one bit a token, and the scan for NaN and infinity that
/// masked tokens make necessary.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// Tokens [begin, end) of a KV tile, counted from its first, local token `first`.
struct KvTile {
  int32_t first;
  int32_t begin;
  int32_t end;
};

FOLIO_INLINE int32_t smaller(int32_t a, int32_t b) {
  return a < b ? a : b;
}
FOLIO_INLINE int32_t larger(int32_t a, int32_t b) {
  return a > b ? a : b;
}

FOLIO_INLINE int32_t padded_rows(int32_t rows) {
  return (rows + kRowPadding - 1) / kRowPadding * kRowPadding;
}

/// The sequence position of a local token.
FOLIO_INLINE int64_t key_position(const KvOperand& kv, int64_t local) {
  if (kv.shard_world == 1) return kv.first_pos + local;
  return kv.first_pos + local / kv.shard_interleave * (int64_t{kv.shard_world} * kv.shard_interleave) +
         int64_t{kv.shard_rank} * kv.shard_interleave + local % kv.shard_interleave;
}

/// Bits [begin, end) of a word; none where end <= begin.
FOLIO_INLINE uint64_t bit_range(int64_t begin, int64_t end) {
  if (begin < 0) begin = 0;
  if (end > 64) end = 64;
  if (end <= begin) return 0;
  return (~uint64_t{0} >> (64 - (end - begin))) << begin;
}

/// Bits [bit, bit + count) of a little-endian bit string, count in 1..64. Reads only the bytes that hold them.
FOLIO_INLINE uint64_t bits_at(const uint8_t* bytes, int64_t bit, int32_t count) {
  const int64_t first = bit / 8;
  const int64_t last = (bit + count - 1) / 8;
  const int shift = static_cast<int>(bit % 8);
  uint64_t word = 0;
  for (int64_t i = first; i <= last && i < first + 8; ++i) word |= static_cast<uint64_t>(bytes[i]) << (8 * (i - first));
  word >>= shift;
  if (last == first + 8) word |= static_cast<uint64_t>(bytes[last]) << (64 - shift);
  return word & bit_range(0, count);
}

/// The mask of a row and a KV tile: a bit for each token of the work tile that is visible to the row.
FOLIO_INLINE uint64_t visible_tokens(const QueryRow& row, const KvTile& tile) {
  uint64_t word = bit_range(tile.begin, tile.end) &
                  bit_range(int64_t{row.visible_begin} - tile.first, int64_t{row.visible_end} - tile.first);
  if (row.mask == nullptr || word == 0) return word;
  int64_t begin = row.mask_begin - tile.first;  // tokens before it are visible
  if (begin >= tile.end) return word;
  if (begin < tile.begin) begin = tile.begin;
  const auto count = static_cast<int32_t>(tile.end - begin);
  const uint64_t masked = bits_at(row.mask, row.mask_bit + tile.first + begin, count) << begin;
  return word & (masked | bit_range(0, begin));
}

/// The scan: true if an upcast value of the KV tile is infinite or NaN.
static inline bool has_non_finite_v(const WorkTileParams& work) {
  const IntVec exponent = splat_int(0x7f800000);
  IntVec non_finite{};
  const int32_t count = kTileTokens * work.v_stride;
  for (int32_t i = 0; i < count; i += kLanes) {
    non_finite |= (bits(load<Vec>(work.scratch.v + i)) & exponent) == exponent;
  }
  for (int i = 0; i < kLanes; ++i) {
    if (non_finite[i] != 0) return true;
  }
  return false;
}

/// GEMM1 of one row over its visible tokens alone. For tiles with non-finite values: a masked token has p = 0, and 0 *
/// NaN would be NaN.
static inline void pv_row_visible_only(const WorkTileParams& work, uint64_t visible, int32_t r) {
  const float* const p = work.scratch.p + r * kTileTokens;
  float* const acc = work.state.acc + r * work.v_stride;
  const Vec rescale = splat(work.scratch.rescale[r]);
  for (int32_t d = 0; d < work.v_stride; d += kLanes) {
    Vec sum{};
    for (uint64_t left = visible; left != 0; left &= left - 1) {
      const int t = __builtin_ctzll(left);
      sum = multiply_add(splat(p[t]), load<Vec>(work.scratch.v + t * work.v_stride + d), sum);
    }
    store(acc + d, multiply_add(load<Vec>(acc + d), rescale, sum));
  }
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
