#pragma once

#include "kernels/cpu/generic/attention/convert.hpp"

/// Finds the tokens of one tile in memory and says which of them each row sees.
namespace folio::inline v0::kernels::generic::FOLIO_ISA {

/// The part of a tile that an item covers: tokens [begin, end) counted from the tile's first, local token `first`.
struct Tile {
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

FOLIO_INLINE Tile tile_at(const ItemKeys& keys, int32_t first) {
  return {first, larger(keys.kv_begin - first, 0), smaller(keys.kv_end - first, kTileTokens)};
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

/// The tokens of a tile that a row sees, one bit each.
FOLIO_INLINE uint64_t visible_tokens(const ItemRow& row, const Tile& tile) {
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

/// Copies a pair of values whose other half is not the item's, with zeros in its place: memory that the request does
/// not own may hold NaN.
FOLIO_INLINE void copy_half_pair(const unsigned char* pair, int odd, int64_t element, int32_t dim,
                                 unsigned char* copy) {
  for (int32_t d = 0; d < dim; ++d) {
    for (int64_t b = 0; b < element; ++b) {
      copy[(2 * d + odd) * element + b] = pair[(2 * d + odd) * element + b];
      copy[(2 * d + 1 - odd) * element + b] = 0;
    }
  }
}

/// Fills k_rows and v_rows for a tile. Tokens outside the item's range point to zeros.
static inline void locate_tile(const ItemCall& call, const Tile& tile) {
  const ItemKeys& keys = call.keys;
  const ItemScratch& scratch = call.scratch;
  for (int32_t t = 0; t < tile.begin; ++t) scratch.k_rows[t] = scratch.v_rows[t] = scratch.zeros;
  for (int32_t t = larger(tile.end, 0); t < kTileTokens; ++t) scratch.k_rows[t] = scratch.v_rows[t] = scratch.zeros;
  for (int32_t t = tile.begin; t < tile.end;) {
    const int32_t local = tile.first + t;
    const unsigned char* k = keys.k;
    const unsigned char* v = keys.v;
    int32_t slot = local;
    int32_t count = tile.end - t;
    if (keys.pages != nullptr) {
      const int32_t number = local / keys.page_size;
      slot = local - number * keys.page_size;
      count = smaller(count, keys.page_size - slot);
      k += keys.pages[number] * keys.k_page;
      v += keys.pages[number] * keys.v_page;
    }
    for (int32_t i = 0; i < count; ++i) {
      scratch.k_rows[t + i] = k + (slot + i) * keys.k_token;
      scratch.v_rows[t + i] = keys.packed_v ? v + (slot + i) / 2 * keys.v_token : v + (slot + i) * keys.v_token;
    }
    t += count;
  }
  if (!keys.packed_v) return;
  const int64_t element = element_bytes(keys.dtype);
  const unsigned char* half_begin = nullptr;
  const unsigned char* half_end = nullptr;
  if ((tile.begin & 1) != 0 && tile.begin < tile.end) {
    half_begin = scratch.pairs;
    copy_half_pair(scratch.v_rows[tile.begin], 1, element, call.head_dim_v, scratch.pairs);
  }
  if ((tile.end & 1) != 0 && tile.begin < tile.end) {
    unsigned char* const copy = scratch.pairs + 2 * element * call.head_dim_v;
    half_end = copy;
    copy_half_pair(scratch.v_rows[tile.end - 1], 0, element, call.head_dim_v, copy);
  }
  if (half_begin != nullptr) scratch.v_rows[tile.begin] = half_begin;
  if (half_end != nullptr) scratch.v_rows[tile.end - 1] = half_end;
  for (int32_t pair = 0; pair < kTileTokens / 2; ++pair) {
    const int32_t even = 2 * pair;
    scratch.v_rows[pair] = even >= tile.begin && even < tile.end ? scratch.v_rows[even] : scratch.v_rows[even + 1];
  }
}

}  // namespace folio::inline v0::kernels::generic::FOLIO_ISA
