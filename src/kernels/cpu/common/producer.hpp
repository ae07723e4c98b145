#pragma once

#include "kernels/cpu/common/convert.hpp"
#include "kernels/cpu/common/mask.hpp"
#include "kernels/cpu/common/token_scales.hpp"

/// Loads Q, and finds the K and V of each tile that some row attends to.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// Copies one half of a pair of V rows, with zeros for the other. The other token is not the work tile's: its memory
/// may hold NaN.
FOLIO_INLINE void copy_half_pair(const unsigned char* pair, int odd, int64_t element, int32_t dim,
                                 unsigned char* copy) {
  for (int32_t d = 0; d < dim; ++d) {
    for (int64_t b = 0; b < element; ++b) {
      copy[(2 * d + odd) * element + b] = pair[(2 * d + odd) * element + b];
      copy[(2 * d + 1 - odd) * element + b] = 0;
    }
  }
}

/// Where the K and V rows of a KV tile lie, and their scales.
struct TilePointers {
  const unsigned char** k;  ///< [kTileTokens]
  const unsigned char** v;  ///< [kTileTokens], or [kTileTokens / 2] pairs
  unsigned char* pairs;     ///< memory for copies of two pairs
  TileScales scales = {};   ///< memory for them; null: there are none
};

/// Replaces a pair of which one token lies outside the tile's range by a copy with zeros for that token.
FOLIO_INLINE void replace_half_pair(const WorkTileParams& work, int32_t token, unsigned char* copy,
                                    const TilePointers& rows) {
  copy_half_pair(rows.v[token / 2], token & 1, element_bytes(work.kv.dtype), work.head_dim_v, copy);
  rows.v[token / 2] = copy;
}

/// Fills `rows` for the tokens of a KV tile; there is at least one. Tokens outside [begin, end) point to zeros.
static inline void locate_tile(const WorkTileParams& work, const KvTile& tile, const TilePointers& rows) {
  const KvOperand& kv = work.kv;
  if (tile.end - tile.begin < kTileTokens) {
    for (int32_t t = 0; t < kTileTokens; ++t) rows.k[t] = rows.v[t] = work.scratch.zeros;
    if (rows.scales.k != nullptr) clear_token_scales(rows.scales);
  }
  for (int32_t t = tile.begin; t < tile.end;) {
    const int32_t local = tile.first + t;
    const unsigned char* k = kv.k;
    const unsigned char* v = kv.v;
    int32_t slot = local;
    int32_t count = tile.end - t;
    if (kv.pages != nullptr) {
      const int32_t number = local / kv.page_size;
      slot = local - number * kv.page_size;
      count = smaller(count, kv.page_size - slot);
      k += kv.pages[number] * kv.k_page;
      v += kv.pages[number] * kv.v_page;
      if (rows.scales.k != nullptr) copy_token_scales(kv, kv.pages[number], slot, t, count, rows.scales);
    }
    for (int32_t i = 0; i < count; ++i) rows.k[t + i] = k + (slot + i) * kv.k_token;
    if (kv.packed_v) {
      for (int32_t i = 0; i < count; ++i) rows.v[(t + i) / 2] = v + (slot + i) / 2 * kv.v_token;
    } else {
      for (int32_t i = 0; i < count; ++i) rows.v[t + i] = v + (slot + i) * kv.v_token;
    }
    t += count;
  }
  if (!kv.packed_v) return;
  if ((tile.begin & 1) != 0) replace_half_pair(work, tile.begin, rows.pairs, rows);
  if ((tile.end & 1) != 0) replace_half_pair(work, tile.end - 1, rows.pairs + 4 * work.v_stride, rows);
}

/// A KV tile with its masks and the addresses of its rows.
struct LocatedTile {
  KvTile tile;        ///< [begin, end): from the first to the last token that is visible to some row
  bool uniform;       ///< all of [begin, end) is visible to every row
  uint64_t* visible;  ///< [rows]
  TilePointers rows;
};

/// Finds the first KV tile from token `first` on with a token visible to some row; false if there is none.
static inline bool find_tile(const WorkTileParams& work, int32_t first, LocatedTile& located) {
  const KvOperand& kv = work.kv;
  for (; first < kv.kv_end; first += kTileTokens) {
    const KvTile part{first, larger(kv.kv_begin - first, 0), smaller(kv.kv_end - first, kTileTokens)};
    uint64_t any = 0;
    uint64_t all = ~uint64_t{0};
    for (int32_t r = 0; r < work.num_rows; ++r) {
      located.visible[r] = visible_tokens(work.rows[r], part);
      any |= located.visible[r];
      all &= located.visible[r];
    }
    if (any == 0) continue;
    located.tile = {first, __builtin_ctzll(any), 64 - __builtin_clzll(any)};
    located.uniform = all == bit_range(located.tile.begin, located.tile.end);
    locate_tile(work, located.tile, located.rows);
    return true;
  }
  return false;
}

/// The KV tile after `now`, which is one of heads[head]: the next head's of the same tokens, then the first head's
/// next. Sets `head`. All heads have the same masks.
static inline bool next_tile(const WorkTileParams* heads, int32_t num_heads, const LocatedTile& now, int32_t& head,
                             LocatedTile& next) {
  if (++head == num_heads) {
    head = 0;
    return find_tile(heads[0], now.tile.first + kTileTokens, next);
  }
  next.tile = now.tile;
  next.uniform = now.uniform;
  for (int32_t r = 0; r < heads[head].num_rows; ++r) next.visible[r] = now.visible[r];
  locate_tile(heads[head], next.tile, next.rows);
  return true;
}

/// Prefetches a part of every K or V row of a KV tile to L2, one token at a time. Where a head's rows follow each other
/// in memory, the rows alternate between four quarters of the tile: a quarter is about one memory page, within which
/// hardware prefetchers follow, and several streams at once keep more of them ahead than one.
struct Prefetch {
  const unsigned char* const* rows =
      nullptr;        ///< [kTileTokens], or [kTileTokens / 2] pairs; null = nothing to prefetch
  int32_t begin = 0;  ///< bytes [begin, end) of a token's vector
  int32_t end = 0;
  int32_t pair_bytes = 0;  ///< of a token, in pairs; 0 = not in pairs
  bool streams = false;    ///< rows follow each other in memory

  /// The t-th call for a tile.
  FOLIO_INLINE_MEMBER void issue(int32_t t) const {
    constexpr int32_t kStreams = 4;
    if (rows == nullptr) return;
    if (streams) t = t % kStreams * (kTileTokens / kStreams) + t / kStreams;
    const unsigned char* const row = pair_bytes != 0 ? rows[t >> 1] + (t & 1) * pair_bytes : rows[t];
    for (int32_t at = begin; at < end; at += kCacheLine) __builtin_prefetch(row + at, 0, 2);
  }
  /// Of `parts` equal ones, those in [first, last), in whole lines.
  FOLIO_INLINE_MEMBER Prefetch part(int32_t first, int32_t last, int32_t parts) const {
    const int32_t lines = (end - begin + kCacheLine - 1) / kCacheLine;
    Prefetch some = *this;
    some.begin = begin + lines * first / parts * kCacheLine;
    some.end = smaller(end, begin + lines * smaller(last, parts) / parts * kCacheLine);
    return some;
  }

 private:
  static constexpr int32_t kCacheLine = 64;
};

template <DType kType>
static void load_q_as(const WorkTileParams& work) {
  for (int32_t r = 0; r < work.num_rows; ++r) {
    convert_row<kType>(work.rows[r].q, work.head_dim_qk, work.scratch.q + r * work.qk_stride);
  }
}

static void load_q(const WorkTileParams& work) noexcept {
  switch (work.q_dtype) {
    case DType::kFloat32: load_q_as<DType::kFloat32>(work); break;
    case DType::kFloat16: load_q_as<DType::kFloat16>(work); break;
    case DType::kBFloat16: load_q_as<DType::kBFloat16>(work); break;
    case DType::kFloat8E4M3: load_q_as<DType::kFloat8E4M3>(work); break;
    case DType::kFloat8E5M2: load_q_as<DType::kFloat8E5M2>(work); break;
    case DType::kFloat4E2M1x2:
    case DType::kInt8:
    case DType::kUnset: break;
  }
  // Blocks of scores take whole groups of rows; those beyond the last are computed and never read.
  for (int32_t r = work.num_rows; r < padded_rows(work.num_rows); ++r) {
    __builtin_memset(work.scratch.q + r * work.qk_stride, 0, static_cast<size_t>(work.qk_stride) * sizeof(float));
  }
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
