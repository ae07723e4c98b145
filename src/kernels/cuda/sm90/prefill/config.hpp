#pragma once

#include <cstdint>

#include "folio/types/export.hpp"
#include "kernels/cuda/sm90/common/config.hpp"

/// Tile shapes, stages, register split and shared memory layout. Plain integers, for host and device.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

constexpr int32_t kWarpgroupThreads = 128;
constexpr int32_t kWarpgroupWarps = 4;
constexpr int32_t kConsumerWarpgroups = 2;
constexpr int32_t kConsumerWarps = kWarpgroupWarps * kConsumerWarpgroups;
constexpr int32_t kThreads = kWarpgroupThreads * (1 + kConsumerWarpgroups);  ///< the first warpgroup is the producer
constexpr int32_t kWarpgroupRows = 64;                                       ///< rows of a consumer warpgroup
constexpr int32_t kBlockM = kWarpgroupRows * kConsumerWarpgroups;            ///< most packed rows of a work tile
constexpr int32_t kAtomRows = 8;     ///< tokens of a swizzle atom; the smallest TMA tile
constexpr int32_t kTileBuffers = 2;  ///< work tiles that shared memory describes at once
/// Registers of a thread: at entry what 384 threads may have, then after setmaxnreg. The sum over the warpgroups must
/// not exceed what the CTA had at entry: setmaxnreg waits for more in vain.
constexpr int32_t kEntryRegisters = 168;
constexpr int32_t kProducerRegisters = 88;
constexpr int32_t kConsumerRegisters = 208;
/// The same where the producer dequantizes fp8 data.
constexpr int32_t kFp8ProducerRegisters = 104;
constexpr int32_t kFp8ConsumerRegisters = 200;
static_assert(kProducerRegisters + kConsumerWarpgroups * kConsumerRegisters <=
              (1 + kConsumerWarpgroups) * kEntryRegisters);
static_assert(kFp8ProducerRegisters + kConsumerWarpgroups * kFp8ConsumerRegisters <=
              (1 + kConsumerWarpgroups) * kEntryRegisters);

/// How a kernel turns scores into logits, beyond a scale and visible ranges.
enum class Variant : int32_t {
  kPlain,  ///< nothing more
  kCap,    ///< a soft cap of at most kMaxFixedCap
  kAlibi,  ///< ALiBi
  kMask,   ///< a custom mask
  kAny,    ///< a custom mask and one of the others; a soft cap and ALiBi; or a larger soft cap
};
/// Whether masked tiles are masked by bits, which the producer writes beside them. kAny masks all tiles.
constexpr bool has_visible_bits(Variant variant) {
  return variant == Variant::kMask || variant == Variant::kAny;
}
/// Producer warps, the last ones, that fetch work tiles and load Q. Where they are not all four, the others load K and
/// V meanwhile. All four do both in turn where loading takes many instructions: fp8 data, and the visible bits of kAny.
constexpr int32_t kSomeFetchWarps = 2;
constexpr int32_t fetch_warps(Variant variant, bool is_fp8) {
  return is_fp8 || variant == Variant::kAny ? kWarpgroupWarps : kSomeFetchWarps;
}
/// Up to this soft cap, bfloat16 p has the range for all logits in [-cap, cap]. See has_fixed_row_max.
constexpr float kMaxFixedCap = 50.0f;

struct HeadDims {
  int32_t qk;
  int32_t v;
};

/// Tokens of a KV tile. At head_dim 256 the output takes half of the registers, and tiles of 128 do not fit into shared
/// memory.
constexpr int32_t block_n(const HeadDims& dims) {
  return dims.qk > 192 ? 64 : 128;
}
constexpr int32_t tile_bytes(const HeadDims& dims, int32_t dim) {
  return 2 * block_n(dims) * dim;
}
/// Stages of the K pipeline, and as many of the V pipeline.
constexpr int32_t stages(const HeadDims& dims) {
  return dims.qk > 64 ? 2 : 4;
}
constexpr int32_t kMaxStages = 4;
/// Q of one consumer warpgroup. Its output reuses this memory.
constexpr int32_t q_bytes(int32_t dim) {
  return 2 * kWarpgroupRows * dim;
}
/// Work tiles whose Q is in shared memory at once.
constexpr int32_t q_buffers(const HeadDims& dims) {
  return dims.qk > 128 ? 1 : kTileBuffers;
}

/// Bytes of a row in a swizzle atom: 128, or 64 where a row is no multiple of 128. A swizzle exchanges the 16-byte
/// chunks of the atom's row by the row's number.
FOLIO_HOST_DEVICE constexpr int32_t swizzle_bytes(int32_t dim) {
  return dim % 64 == 0 ? 128 : 64;
}
FOLIO_HOST_DEVICE constexpr int32_t swizzle(int32_t dim, int32_t row, int32_t chunk) {
  return swizzle_bytes(dim) == 128 ? ((chunk ^ row) & 7) * 16 : ((chunk ^ row >> 1) & 3) * 16;
}
/// A swizzle atom: eight rows. A KV tile has the atoms of eight tokens side by side, then those of the next eight
/// tokens.
FOLIO_HOST_DEVICE constexpr int32_t atom_bytes(int32_t dim) {
  return kAtomRows * swizzle_bytes(dim);
}
FOLIO_HOST_DEVICE constexpr int32_t atom_row_bytes(int32_t dim) {
  return 2 * kAtomRows * dim;
}
/// Q has a column of atoms, over all of a warpgroup's rows, and then the next column.
FOLIO_HOST_DEVICE constexpr int32_t query_column_bytes(int32_t dim) {
  return kWarpgroupRows * swizzle_bytes(dim);
}

/// Byte offset of 16-byte chunk `chunk` of token `token` in a KV tile.
FOLIO_HOST_DEVICE constexpr int32_t tile_offset(int32_t dim, int32_t token, int32_t chunk) {
  return token / kAtomRows * atom_row_bytes(dim) + chunk / (swizzle_bytes(dim) / 16) * atom_bytes(dim) +
         token % kAtomRows * swizzle_bytes(dim) + swizzle(dim, token, chunk);
}
/// The same of row `row` in Q, and in an output that TMA stores.
FOLIO_HOST_DEVICE constexpr int32_t q_tile_offset(int32_t dim, int32_t row, int32_t chunk) {
  return row / kWarpgroupRows * q_bytes(dim) + chunk / (swizzle_bytes(dim) / 16) * query_column_bytes(dim) +
         row % kWarpgroupRows * swizzle_bytes(dim) + swizzle(dim, row, chunk);
}
/// The same of a row of a 16-bit output that threads store, within its warpgroup's Q.
FOLIO_HOST_DEVICE constexpr int32_t out_tile_offset(int32_t dim, int32_t row, int32_t chunk) {
  return row * 2 * dim + chunk / (swizzle_bytes(dim) / 16) * swizzle_bytes(dim) + swizzle(dim, row, chunk);
}

/// Byte offsets in shared memory, from a multiple of 1024.
struct SmemLayout {
  int32_t k;             ///< [stages] tiles
  int32_t v;             ///< [stages] tiles
  int32_t q;             ///< [q_buffers][kConsumerWarpgroups]
  int32_t visible_bits;  ///< of K tiles, [stages][kBlockM][block_n / 32]: a bit for each token that the row sees
  int32_t storage;       ///< struct SharedStorage
};
constexpr SmemLayout smem_layout(const HeadDims& dims) {
  SmemLayout layout{};
  layout.v = stages(dims) * tile_bytes(dims, dims.qk);
  layout.q = layout.v + stages(dims) * tile_bytes(dims, dims.v);
  layout.visible_bits = layout.q + q_buffers(dims) * kConsumerWarpgroups * q_bytes(dims.qk);
  layout.storage = layout.visible_bits + stages(dims) * kBlockM * block_n(dims) / 8;
  return layout;
}

/// Tokens of a TMA tile: the largest power of two from kAtomRows to the KV tile's `tokens` that lies in one page; 0
/// where pages are no multiples of eight tokens.
constexpr int32_t tma_tile_tokens(int32_t page_size, int32_t tokens) {
  if (page_size % kAtomRows != 0) return 0;
  int32_t tile = kAtomRows;
  while (tile < tokens && page_size % (2 * tile) == 0) tile *= 2;
  return tile;
}
/// TMA tiles of a KV tile of `tokens` that one of `warps` issues. Where there are fewer than warps, the first warps
/// issue one each.
FOLIO_HOST_DEVICE constexpr int32_t tma_tiles_per_warp(int32_t tma_tokens, int32_t tokens, int32_t warps) {
  return tma_tokens * warps >= tokens ? 1 : tokens / warps / tma_tokens;
}
/// Its logarithm to base 2.
FOLIO_HOST_DEVICE constexpr int32_t tma_tiles_shift(int32_t tma_tokens, int32_t tokens, int32_t warps) {
  int32_t shift = 0;
  while (tma_tokens << shift < tokens / warps) ++shift;
  return shift;
}

/// fp8 data at head_dim 128: a token is a row of 128 bytes, and eight tokens are a swizzle atom. A producer warp
/// dequantizes or transposes the tokens that it has loaded, 32 at most.
constexpr int32_t kFp8RowBytes = 128;
constexpr int32_t kFp8AtomBytes = kAtomRows * kFp8RowBytes;
constexpr int32_t kMaxFp8TmaTokens = 32;
constexpr bool dequantizes(Fp8 fp8, bool fp8_mma) {
  return fp8 != Fp8::kNone && !fp8_mma;
}

/// FP8 MMA: K, V and V transposed lie in the memory of the 16-bit tiles. K tiles and Q have a row of 128 bytes for a
/// token; V transposed has one for each component.
constexpr HeadDims kFp8MmaDims{128, 128};
constexpr int32_t kFp8MmaBlockN = block_n(kFp8MmaDims);
constexpr int32_t kFp8TileBytes = 128 * kFp8RowBytes;
constexpr int32_t kKStages = 3;
constexpr int32_t kRawVStages = 2;  ///< V as TMA leaves it
constexpr int32_t kVtStages = 3;    ///< V transposed
static_assert(kKStages <= kMaxStages && kVtStages <= kMaxStages && kFp8MmaBlockN == 128);
static_assert((kKStages + kRawVStages + kVtStages) * kFp8TileBytes <= smem_layout(kFp8MmaDims).q);
constexpr uint32_t kRawVOffset = kKStages * kFp8TileBytes;
constexpr uint32_t kVtOffset = kRawVOffset + kRawVStages * kFp8TileBytes;

/// Byte offset of 16-byte chunk `chunk` of row `row` in an fp8 tile.
FOLIO_HOST_DEVICE constexpr int32_t fp8_tile_offset(int32_t row, int32_t chunk) {
  return row * kFp8RowBytes + ((chunk ^ row) & 7) * 16;
}
/// Column of V transposed that holds token `token`. Of sixteen tokens, pairs of the first eight and of the last eight
/// alternate: the order in which a lane holds p.
FOLIO_HOST_DEVICE constexpr int32_t vt_column(int32_t token) {
  return token / 16 * 16 + token % 8 / 2 * 4 + token % 16 / 8 * 2 + token % 2;
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
