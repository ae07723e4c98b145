#pragma once

#include "kernels/cpu/common/mask.hpp"
#include "kernels/cpu/common/token_scales.hpp"

/// Tile shapes of the AMX kernel, the operands of its tile loads, and its scratch memory.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

static_assert(kLanes == 16, "a tile has 16 rows");

inline constexpr int32_t kRowBlock = 16;     ///< rows of Q in the lanes of a vector, or in the rows of a tile register
inline constexpr int32_t kGroupTokens = 16;  ///< keys in one tile register
inline constexpr int32_t kHalfTokens = 32;   ///< V rows in one tile register, as 16 pairs (VNNI layout)
inline constexpr int32_t kBatchTiles = 4;    ///< KV tiles that a pair of row blocks takes before the next pair, at most
inline constexpr int32_t kBf16Bytes = 2;     ///< of a bfloat16
inline constexpr int32_t kMmaDims = 32;      ///< components of Q and K that one TDPBF16PS takes
inline constexpr int32_t kDimTile = 16;      ///< components of V in one tile register
inline constexpr int64_t kTileRowBytes = 64;
inline constexpr int32_t kTileBytes = 1024;
inline constexpr int32_t kBlockScores = kTileTokens * kRowBlock;  ///< scores of a row block in a KV tile
/// Work tiles of up to so many rows are bound by memory, not by arithmetic.
inline constexpr int32_t kMaxDecodeRows = 2 * kRowBlock;
/// Elements of P: of half a KV tile for a row block, of a row block, of all of a pair of row blocks.
inline constexpr int32_t kHalfP = kRowBlock * kHalfTokens;
inline constexpr int32_t kRowBlockP = 2 * kHalfP;
inline constexpr int32_t kTermP = 2 * kRowBlockP;

FOLIO_INLINE int32_t rounded_up(int32_t value, int32_t to) {
  return (value + to - 1) / to * to;
}

/// Bfloat16 terms that an element of Q, K, V or P is the sum of: a float16 has two, `high` and `low`.
FOLIO_INLINE int32_t num_terms(DType q) {
  return q == DType::kFloat16 ? 2 : 1;
}

/// KV tiles of a batch: beside O and Q of a work tile, their K and V stay in L2, and P of a pair of row blocks in half
/// of L1, which two threads of a core share.
FOLIO_INLINE int32_t batch_tiles(int32_t head_dim_qk, int32_t head_dim_v, int32_t terms) {
  const int32_t dims = (head_dim_qk + head_dim_v) * terms;
  return dims <= 1152 ? kBatchTiles : kBatchTiles / 2;
}

/// What a tile load reads: 16 rows of 64 bytes, `stride` bytes apart. The tile of the same rows' next components is
/// `step` bytes further on. Null: not needed.
struct TileSource {
  const unsigned char* at;
  int64_t stride;
  int64_t step;
};

/// Where the rows of a packed copy lie, of so many tiles side by side. Few rows of Q read a copy once, and it is
/// written fastest row by row. Many rows read it again and again: tile by tile, so that a load's lines follow one
/// another.
struct CopyLayout {
  int64_t stride;  ///< from a row to the next
  int64_t step;    ///< from a line of 64 bytes to the row's next one
};

FOLIO_INLINE CopyLayout copy_layout(int32_t num_rows, int32_t tiles) {
  return num_rows <= kMaxDecodeRows ? CopyLayout{tiles * kTileRowBytes, kTileRowBytes}
                                    : CopyLayout{kTileRowBytes, kTileBytes};
}

/// A KV tile as operands of tile loads.
struct TileOperands {
  KvTile tile;               ///< [begin, end): from the first to the last token that is visible to some row
  bool uniform;              ///< all of [begin, end) is visible to every row; `visible` may be unset
  uint64_t non_finite;       ///< tokens whose NaN or infinite components are zeros in `values`
  uint64_t non_finite_keys;  ///< float16: tokens whose keys have such components
  uint64_t* visible;         ///< [rows, padded]: the tokens visible to each row
  TileSource keys[kTileTokens / kGroupTokens];
  TileSource values[kTileTokens / kHalfTokens];
  unsigned char* k_buffer;  ///< copies of each 16 keys: [terms, padded head_dim_qk / 32] tiles, as CopyLayout says
  unsigned char* v_buffer;  ///< [terms] of each 16 pairs of V rows: [padded head_dim_v / 16] tiles
  TileScales scales;        ///< of the tokens in [begin, end)
};

/// Pairs of row blocks take two buffers in turn; the last one is a single row block's.
inline constexpr int32_t kScoreBuffers = 3;
inline constexpr int32_t kPBuffers = 3;

/// TileScratch::collective, carved.
struct AmxScratch {
  unsigned char* visible;      ///< [2, kBatchTiles, padded rows] words
  float* token_scales;         ///< [2, kBatchTiles, 2, kTileTokens]: of K and V
  unsigned char* keys;         ///< [2, batch_tiles] packed copies; in the dequantization pipeline its stages
  unsigned char* values;       ///< [2, batch_tiles] packed copies
  float* scores;               ///< [kScoreBuffers, 2, kTileTokens, kRowBlock]: S^T of a KV tile, for two row blocks
  uint16_t* p;                 ///< [kPBuffers, kBatchTiles, terms, 2, 2, kRowBlock, kHalfTokens] bfloat16
  float* logit_scale;          ///< [padded rows]
  float* value_scale;          ///< [padded rows]
  int64_t visible_tile_bytes;  ///< of one tile's words
  int64_t key_tile_bytes;
  int64_t value_tile_bytes;
  size_t bytes;
};

FOLIO_INLINE AmxScratch carve_amx_scratch(unsigned char* memory, int32_t tile_rows, int32_t head_dim_qk,
                                          int32_t head_dim_v, int32_t terms) {
  const int64_t rows = rounded_up(tile_rows, kRowBlock);
  AmxScratch scratch;
  scratch.visible_tile_bytes = rows * 8;
  scratch.key_tile_bytes = int64_t{kTileTokens} * terms * rounded_up(head_dim_qk, kMmaDims) * kBf16Bytes;
  scratch.value_tile_bytes = int64_t{kTileTokens} * terms * rounded_up(head_dim_v, kDimTile) * kBf16Bytes;
  const int32_t tiles = batch_tiles(head_dim_qk, head_dim_v, terms);
  int64_t used = 0;
  const auto take = [&](int64_t bytes) __attribute__((always_inline)) {
    unsigned char* const part = memory == nullptr ? nullptr : memory + used;
    used += (bytes + 63) / 64 * 64;
    return part;
  };
  scratch.visible = take(2 * kBatchTiles * scratch.visible_tile_bytes);
  scratch.token_scales = reinterpret_cast<float*>(take(2 * kBatchTiles * 2 * kTileTokens * 4));
  scratch.keys = take(2 * tiles * scratch.key_tile_bytes);
  scratch.values = take(2 * tiles * scratch.value_tile_bytes);
  scratch.scores = reinterpret_cast<float*>(take(kScoreBuffers * 2 * kBlockScores * 4));
  scratch.p = reinterpret_cast<uint16_t*>(take(kPBuffers * kBatchTiles * terms * 4 * kTileBytes));
  scratch.logit_scale = reinterpret_cast<float*>(take(rows * 4));
  scratch.value_scale = reinterpret_cast<float*>(take(rows * 4));
  scratch.bytes = static_cast<size_t>(used);
  return scratch;
}

/// Up to kBatchTiles KV tiles.
struct TileBatch {
  TileOperands tiles[kBatchTiles];
  int32_t count = 0;
};

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
