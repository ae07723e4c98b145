#pragma once

#include "kernels/cpu/common/attention/convert.hpp"

/// Finds the tokens of one tile in memory and says which of them each row sees.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// Tokens [begin, end) of a tile, counted from its first, local token `first`.
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

FOLIO_INLINE int32_t padded_rows(int32_t rows) {
  return (rows + kRowPadding - 1) / kRowPadding * kRowPadding;
}

/// The sequence position of a local token.
FOLIO_INLINE int64_t key_position(const ItemKeys& keys, int64_t local) {
  if (keys.shard_world == 1) return keys.first_pos + local;
  return keys.first_pos + local / keys.shard_interleave * (int64_t{keys.shard_world} * keys.shard_interleave) +
         int64_t{keys.shard_rank} * keys.shard_interleave + local % keys.shard_interleave;
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

/// Which of an item's tokens in a tile a row sees, one bit each.
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

/// Where a tile's keys and values lie.
struct TileRows {
  const unsigned char** k;  ///< [kTileTokens]
  const unsigned char** v;  ///< [kTileTokens], or [kTileTokens / 2] pairs
  unsigned char* pairs;     ///< memory for copies of two pairs
};

/// A pair of values of which only one half is the tile's becomes a copy with zeros in the other's place.
FOLIO_INLINE void replace_half_pair(const ItemCall& call, int32_t token, unsigned char* copy, const TileRows& rows) {
  copy_half_pair(rows.v[token / 2], token & 1, element_bytes(call.keys.dtype), call.head_dim_v, copy);
  rows.v[token / 2] = copy;
}

/// Fills `rows` for the tokens of a tile, which are not none; those outside [begin, end) point to zeros.
static inline void locate_tile(const ItemCall& call, const Tile& tile, const TileRows& rows) {
  const ItemKeys& keys = call.keys;
  if (tile.end - tile.begin < kTileTokens) {
    for (int32_t t = 0; t < kTileTokens; ++t) rows.k[t] = rows.v[t] = call.scratch.zeros;
  }
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
    for (int32_t i = 0; i < count; ++i) rows.k[t + i] = k + (slot + i) * keys.k_token;
    if (keys.packed_v) {
      for (int32_t i = 0; i < count; ++i) rows.v[(t + i) / 2] = v + (slot + i) / 2 * keys.v_token;
    } else {
      for (int32_t i = 0; i < count; ++i) rows.v[t + i] = v + (slot + i) * keys.v_token;
    }
    t += count;
  }
  if (!keys.packed_v) return;
  if ((tile.begin & 1) != 0) replace_half_pair(call, tile.begin, rows.pairs, rows);
  if ((tile.end & 1) != 0) replace_half_pair(call, tile.end - 1, rows.pairs + 4 * call.v_stride, rows);
}

/// A tile made ready: what each row sees of it and where it lies.
struct ReadyTile {
  Tile tile;          ///< [begin, end): from the first to the last token that some row sees
  bool uniform;       ///< every row sees all of [begin, end)
  uint64_t* visible;  ///< [rows]
  TileRows rows;
};

/// Makes the first tile from token `first` on of which some row sees a token; false if there is none.
static inline bool find_tile(const ItemCall& call, int32_t first, ReadyTile& ready) {
  const ItemKeys& keys = call.keys;
  for (; first < keys.kv_end; first += kTileTokens) {
    const Tile part{first, larger(keys.kv_begin - first, 0), smaller(keys.kv_end - first, kTileTokens)};
    uint64_t any = 0;
    uint64_t all = ~uint64_t{0};
    for (int32_t r = 0; r < call.num_rows; ++r) {
      ready.visible[r] = visible_tokens(call.rows[r], part);
      any |= ready.visible[r];
      all &= ready.visible[r];
    }
    if (any == 0) continue;
    ready.tile = {first, __builtin_ctzll(any), 64 - __builtin_clzll(any)};
    ready.uniform = all == bit_range(ready.tile.begin, ready.tile.end);
    locate_tile(call, ready.tile, ready.rows);
    return true;
  }
  return false;
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
