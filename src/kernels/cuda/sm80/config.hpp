#pragma once

#include <cstdint>

#include "scheduler/mask_bounds.hpp"

/// Tile shapes, stages and the layout of shared memory. Plain integers, for host and device.
namespace folio::inline v0::kernels::cuda::sm80 {

constexpr int32_t kWarps = 4;
constexpr int32_t kThreads = 32 * kWarps;
constexpr int32_t kKvTile = 64;      ///< tokens of the scheduler's KV tile, the unit of KV splits
constexpr int32_t kDecodeRows = 16;  ///< work tiles of up to so many rows take the decode path
constexpr int32_t kChunk = 8;        ///< 16-bit elements of a 16-byte chunk, the unit of copies
/// Shared memory that a CTA may have on every GPU from compute capability 8.0 on. 8.6, 8.9 and 12.0 have the least.
constexpr int32_t kMaxSmemBytes = 99 * 1024;

/// Head dimensions that the kernel is instantiated for. Smaller ones are padded with zeros in shared memory.
struct HeadDims {
  int32_t qk;
  int32_t v;
};
constexpr HeadDims kHeadDims[] = {{64, 64}, {128, 128}, {192, 128}, {256, 256}};

/// Larger head dimensions have a kernel of their own: mainloop_large_head.cuh.
constexpr HeadDims kLargeHeadDims{576, 512};
constexpr int32_t kLargeHeadIndex = 4;

/// Index of the smallest of kHeadDims that holds the dimensions, kLargeHeadIndex, or -1.
constexpr int32_t head_dims_index(int32_t head_dim_qk, int32_t head_dim_v) {
  int32_t index = 0;
  for (const HeadDims& dims : kHeadDims) {
    if (head_dim_qk <= dims.qk && head_dim_v <= dims.v) return index;
    ++index;
  }
  return head_dim_qk <= kLargeHeadDims.qk && head_dim_v <= kLargeHeadDims.v ? kLargeHeadIndex : -1;
}

/// Row tiles of 16 for each warp in the prefill path. Two share each fragment of K and V, where registers allow.
constexpr int32_t row_tiles_per_warp(const HeadDims& dims) {
  return dims.v <= 128 ? 2 : 1;
}
/// Packed rows of a work tile.
constexpr int32_t rows_per_tile(const HeadDims& dims) {
  return 16 * kWarps * row_tiles_per_warp(dims);
}

/// Tokens of a KV tile in the prefill path.
constexpr int32_t prefill_kv_tile(const HeadDims& dims) {
  return dims.qk <= 128 ? 64 : 32;
}
/// K or V tiles in shared memory in the prefill path: one is consumed, one has arrived, one is in flight.
constexpr int32_t kPrefillStages = 3;
constexpr int32_t stage_bytes(const HeadDims& dims) {
  return 2 * prefill_kv_tile(dims) * (dims.qk > dims.v ? dims.qk : dims.v);
}

/// Stages of 16 tokens of K and V that a warp has in the decode path.
constexpr int32_t decode_stages(const HeadDims& dims) {
  return dims.qk <= 64 ? 4 : (dims.qk <= 192 ? 2 : 1);
}

/// The same in fp8 instantiations: as many bytes.
constexpr int32_t decode_fp8_stages(const HeadDims& dims) {
  return 2 * decode_stages(dims);
}

/// Bytes of Q, K and V in shared memory, by path.
constexpr int32_t prefill_bytes(const HeadDims& dims) {
  return 2 * rows_per_tile(dims) * dims.qk + kPrefillStages * stage_bytes(dims);
}
constexpr int32_t decode_pipeline_bytes(const HeadDims& dims) {
  return 2 * kWarps * decode_stages(dims) * 16 * (dims.qk + dims.v);
}
/// Columns of a row of O in shared memory, padded so that rows begin in different banks.
constexpr int32_t epilogue_stride(const HeadDims& dims) {
  return dims.v + 8;
}
constexpr int32_t epilogue_bytes(const HeadDims& dims) {
  return 4 * rows_per_tile(dims) * epilogue_stride(dims);
}
constexpr int32_t decode_bytes(const HeadDims& dims) {
  return 2 * kDecodeRows * dims.qk + decode_pipeline_bytes(dims);
}
constexpr int32_t tile_bytes(const HeadDims& dims) {
  const int32_t wide = prefill_bytes(dims);
  const int32_t decode_allowed = decode_bytes(dims);
  const int32_t tiles = wide > decode_allowed ? wide : decode_allowed;
  const int32_t results = epilogue_bytes(dims);  // in place of the tiles
  return tiles > results ? tiles : results;
}

/// The kernel of large head dimensions: Q, stages of K (or K and V of one tile), the scores that warps exchange.
constexpr int32_t kLargeHeadRows = 32;
constexpr int32_t kLargeHeadKvTile = 16;       ///< tokens
constexpr int32_t kLargeHeadStages = 3;        ///< K tiles in shared memory
constexpr int32_t kLargeHeadScoreStride = 24;  ///< rows begin in different banks for a half of a warp
constexpr int32_t kLargeHeadScores =
    2 * (kLargeHeadRows + kLargeHeadStages * kLargeHeadKvTile) * kLargeHeadDims.qk;  ///< byte offset
constexpr int32_t kLargeHeadBytes = kLargeHeadScores + 4 * kLargeHeadRows * kLargeHeadScoreStride;
/// Most packed rows of a work tile, by head_dims_index.
constexpr int32_t tile_rows(int32_t index) {
  return index == kLargeHeadIndex ? kLargeHeadRows : rows_per_tile(kHeadDims[index]);
}

/// Byte offset of 16-byte chunk `chunk` of row `row` in a tile of `dim` 16-bit elements a row. Swizzle: chunks are
/// exchanged within 128 bytes by the row's number, so that the same chunk of eight rows lies in different banks.
FOLIO_HOST_DEVICE constexpr int32_t swizzled_offset(int32_t dim, int32_t row, int32_t chunk) {
  return row * dim * 2 + ((chunk ^ (row & 7)) << 4);
}

/// The same in a tile of `dim` fp8 elements a row. Rows of 64 or 192 bytes begin in one of two groups of banks.
FOLIO_HOST_DEVICE constexpr int32_t swizzled_offset_fp8(int32_t dim, int32_t row, int32_t chunk) {
  return row * dim + ((chunk ^ (dim % 128 == 0 ? row & 7 : row >> 1 & 3)) << 4);
}

/// Where pair `pair` of the eight of a k-step of Q stands if K is fp8 in shared memory. A lane of the MMA then finds
/// elements 4t to 4t + 3 where it would have 2t, 2t + 1, 2t + 8 and 2t + 9, and the lane's four elements of K are
/// neighbours.
FOLIO_HOST_DEVICE constexpr int32_t fp8_query_pair(int32_t pair) {
  return pair / 2 + pair % 2 * 4;
}

/// Which local tokens of a segment the rows of a work tile see.
struct VisibleRange {
  int32_t any_begin;  ///< tokens that at least one row sees lie in [any_begin, any_end)
  int32_t any_end;
  int32_t all_begin;  ///< every row sees every token in [all_begin, all_end)
  int32_t all_end;
};

/// Whether some row does not see some token of [first, first + count).
FOLIO_HOST_DEVICE constexpr bool needs_mask(const VisibleRange& range, int32_t first, int32_t count) {
  return first < range.all_begin || first + count > range.all_end;
}
/// Whether some rows see a token of [first, first + count) and others do not: its NaN and Inf must not reach the
/// others.
FOLIO_HOST_DEVICE constexpr bool is_mixed(const VisibleRange& range, int32_t first, int32_t count) {
  const int32_t begin = first > range.any_begin ? first : range.any_begin;
  const int32_t end = first + count < range.any_end ? first + count : range.any_end;
  return begin < end && (begin < range.all_begin || end > range.all_end);
}

}  // namespace folio::inline v0::kernels::cuda::sm80
