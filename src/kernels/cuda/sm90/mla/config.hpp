#pragma once

#include <cstdint>

#include "folio/types/export.hpp"
#include "kernels/cuda/sm90/common/config.hpp"

/// Tile shapes, stages, registers and the layout of shared memory. Plain integers, for host and device.
namespace folio::inline v0::kernels::cuda::sm90::mla {

/// Components of queries and keys: those of values, and a RoPE part of 64 or none.
constexpr int32_t kHeadDimV = 512;
constexpr int32_t kHeadDimRope = 64;
constexpr int32_t kHeadDimsQk[] = {kHeadDimV + kHeadDimRope, kHeadDimV};
constexpr int32_t kBlockM = 64;  ///< packed rows (query tokens x heads) of a work tile, at most
constexpr int32_t kBlockN = 64;  ///< tokens of a KV tile

/// Where no work tile has more packed rows than this, MMAs have their operands swapped: tokens are their rows, packed
/// rows their columns. See consumer_swap_ab.cuh.
constexpr int32_t kSwapAbRows = 16;
constexpr bool swaps_ab(int32_t block_m) {
  return block_m < kBlockM;
}

constexpr int32_t kWarpgroupThreads = 128;
constexpr int32_t kWarpgroupWarps = 4;
constexpr int32_t kConsumers = 2;                                   ///< consumer warpgroups
constexpr int32_t kThreads = kWarpgroupThreads * (1 + kConsumers);  ///< the first warpgroup is the producer
constexpr uint32_t kConsumerThreads = kWarpgroupThreads * kConsumers;
constexpr int32_t kWorkTileSlots = 2;  ///< work tiles whose rows are described in shared memory

/// A KV tile is column blocks of 64 tokens (rows) of 128 bytes each: 64 components of 16 bits, 128 of fp8. So are the
/// queries, in 16 bits.
constexpr int32_t kColumnBlockBytes = 128 * kBlockN;
constexpr int32_t kQColumnBlocks = (kHeadDimV + kHeadDimRope) / 64;

/// Parts of a KV tile that are loaded and released on their own: the half of V of either consumer, and the RoPE part,
/// which only keys have.
enum KvPart : int32_t { kVLeft = 0, kVRight = 1, kRope = 2 };
constexpr int32_t kKvParts = 3;

/// Byte offset of 16-byte chunk `chunk` of token `token` in a KV tile, in the 128-byte swizzle.
FOLIO_HOST_DEVICE constexpr int32_t tile_offset(int32_t token, int32_t chunk) {
  return chunk / 8 * kColumnBlockBytes + token * 128 + ((chunk ^ token) & 7) * 16;
}

/// Layout of shared memory, from an address that is a multiple of 1024. The KV stages come first. `BlockM`: rows of
/// the queries. `ElementBytes`: of keys and values in the pipeline.
template <int32_t BlockM, int32_t ElementBytes>
struct Layout {
  static constexpr int32_t kStages = ElementBytes == 2 ? 2 : 4;  ///< KV tiles in the pipeline
  static constexpr int32_t kHalfColumnBlocks = kHeadDimV / kConsumers / (128 / ElementBytes);
  static constexpr int32_t kValueColumnBlocks = kHalfColumnBlocks * kConsumers;
  static constexpr int32_t kColumnBlocks = kValueColumnBlocks + 1;  ///< without a RoPE part, the last one is P's alone
  static constexpr int32_t kTileBytes = kColumnBlocks * kColumnBlockBytes;
  static constexpr int32_t part_begin(int32_t part) { return part * kHalfColumnBlocks; }  ///< in column blocks
  static constexpr int32_t part_size(int32_t part) { return part == kRope ? 1 : kHalfColumnBlocks; }

  /// P of a KV tile overwrites the tile's RoPE part, which nothing reads after GEMM0.
  static constexpr int32_t kPOffset = kValueColumnBlocks * kColumnBlockBytes;
  static_assert(kTileBytes - kPOffset >= 2 * BlockM * kBlockN);

  static constexpr int32_t kQOffset = kStages * kTileBytes;
  static constexpr int32_t kQBlockBytes = 128 * BlockM;
  static constexpr int32_t kStorageOffset = kQOffset + kQColumnBlocks * kQBlockBytes;  ///< struct SharedStorage
  /// Byte offset of 16-byte chunk `chunk` of row `row` of the queries.
  FOLIO_HOST_DEVICE static constexpr int32_t q_offset(int32_t row, int32_t chunk) {
    return kQOffset + chunk / 8 * kQBlockBytes + row * 128 + ((chunk ^ row) & 7) * 16;
  }
};
/// Of the kernel whose MMAs have packed rows as rows.
using RowsLayout = Layout<kBlockM, 2>;

/// fp8 data that the producer dequantizes comes in fp8 blocks of 128 components, column blocks that RowsLayout has no
/// place for. An fp8 block lands where its upper 64 components will be, in 16 bits, as a column block. The last one is
/// the RoPE part and has 64 components.
constexpr int32_t kFp8Blocks = 5;
constexpr int32_t fp8_block_offset(int32_t block) {
  return (block == kFp8Blocks - 1 ? 2 * block : 2 * block + 1) * kColumnBlockBytes;
}
constexpr int32_t fp8_block_begin(int32_t part) {  ///< of a part of a KV tile
  return part * RowsLayout::kHalfColumnBlocks / 2;
}
constexpr int32_t fp8_block_count(int32_t part) {
  return part == kRope ? 1 : RowsLayout::kHalfColumnBlocks / 2;
}
static_assert(kWarpgroupThreads == 32 * kWarpgroupWarps && fp8_block_begin(kRope) == kFp8Blocks - 1);

/// Where fp8 data stays fp8 in the KV pipeline: the token, of eight, that row `row` of eight of an MMA is. So neither
/// GEMM0's reads of fp8 data nor GEMM1's have bank conflicts.
FOLIO_HOST_DEVICE constexpr int32_t fp8_token(int32_t row) {
  return row ^ (row % 2 * 4);
}

/// A TMA tile holds 64 components (fp8: 128) of some tokens of one page: a power of two, from kMinTmaTokens to
/// kBlockN. 0 where pages are no multiples of eight tokens.
constexpr int32_t kMinTmaTokens = 8;
constexpr int32_t tma_tokens(int32_t page_size) {
  if (page_size % kMinTmaTokens != 0) return 0;
  int32_t tokens = kMinTmaTokens;
  while (tokens < kBlockN && page_size % (2 * tokens) == 0) tokens *= 2;
  return tokens;
}

/// Heads of a TMA tile of Q: of a group of `group_size` heads as many as a work tile has rows for. Eight rows are an
/// atom of the swizzle. 0 where TMA tiles would not fill row tiles.
constexpr int32_t q_tma_heads(int32_t group_size) {
  if (group_size % kBlockM == 0) return kBlockM;
  return kBlockM % group_size == 0 && group_size % 8 == 0 ? group_size : 0;
}

/// The TMA tiles of a column block that are loaded: [begin, end).
struct TmaTileRange {
  int32_t begin;
  int32_t end;
};
/// Those of the KV tile that begins at local token `first` with a token of [kv_begin, kv_end). A TMA tile has `tokens`
/// tokens.
FOLIO_HOST_DEVICE constexpr TmaTileRange loaded_tma_tiles(int32_t kv_begin, int32_t kv_end, int32_t first,
                                                          int32_t tokens) {
  const int32_t begin = kv_begin > first ? kv_begin - first : 0;
  const int32_t end = kv_end < first + kBlockN ? kv_end - first : kBlockN;
  if (begin >= end) return {0, 0};
  return {begin / tokens, (end + tokens - 1) / tokens};
}

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
