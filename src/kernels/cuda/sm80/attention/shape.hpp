#pragma once

#include <cstdint>

#include "scheduler/mask_bounds.hpp"

/// Sizes of the kernel's tiles and where things stand in shared memory. Plain integers, for host and device.
namespace folio::inline v0::kernels::cuda::sm80 {

constexpr int32_t kWarps = 4;
constexpr int32_t kThreads = 32 * kWarps;
constexpr int32_t kTokens = 64;      ///< of a tile of the scheduler's, between which work is cut
constexpr int32_t kNarrowRows = 16;  ///< items of up to so many rows take the narrow way
constexpr int32_t kPiece = 8;        ///< elements of 16 bytes: what is copied at a time
/// What a CTA may have on every GPU from compute capability 8.0 on (8.6, 8.9 and 12.0 have the least).
constexpr int32_t kSharedLimit = 99 * 1024;

/// Head dimensions a kernel is compiled for; smaller ones are padded with zeros in shared memory.
struct DimClass {
  int32_t qk;
  int32_t v;
};
constexpr DimClass kDimClasses[] = {{64, 64}, {128, 128}, {192, 128}, {256, 256}};

/// Those beyond: a kernel of their own (large.cuh), for values that lie inside keys before all.
constexpr DimClass kLargeDims{576, 512};
constexpr int32_t kLargeClass = 4;

/// Index of the smallest class that holds the dimensions, kLargeClass, or -1.
constexpr int32_t dim_class(int32_t head_dim_qk, int32_t head_dim_v) {
  int32_t index = 0;
  for (const DimClass& dims : kDimClasses) {
    if (head_dim_qk <= dims.qk && head_dim_v <= dims.v) return index;
    ++index;
  }
  return head_dim_qk <= kLargeDims.qk && head_dim_v <= kLargeDims.v ? kLargeClass : -1;
}

/// Row tiles of 16 that a warp has in the wide way: two share what is read of keys and values, where registers allow.
constexpr int32_t row_tiles_per_warp(const DimClass& dims) {
  return dims.v <= 128 ? 2 : 1;
}
constexpr int32_t rows_per_item(const DimClass& dims) {
  return 16 * kWarps * row_tiles_per_warp(dims);
}

/// Tokens of a tile in the wide way.
constexpr int32_t wide_tokens(const DimClass& dims) {
  return dims.qk <= 128 ? 64 : 32;
}
/// Tiles of keys or values in shared memory in the wide way: one is used, one is there, one is copied.
constexpr int32_t kWideSlots = 3;
constexpr int32_t slot_bytes(const DimClass& dims) {
  return 2 * wide_tokens(dims) * (dims.qk > dims.v ? dims.qk : dims.v);
}

/// Keys and values that a warp has under way in the narrow way, in pieces of 16 tokens.
constexpr int32_t narrow_stages(const DimClass& dims) {
  return dims.qk <= 64 ? 4 : (dims.qk <= 192 ? 2 : 1);
}

/// The same where the ring has codes of 8 bits: as many bytes.
constexpr int32_t code_stages(const DimClass& dims) {
  return 2 * narrow_stages(dims);
}

/// Bytes of shared memory for queries, keys and values in either way.
constexpr int32_t wide_bytes(const DimClass& dims) {
  return 2 * rows_per_item(dims) * dims.qk + kWideSlots * slot_bytes(dims);
}
constexpr int32_t ring_bytes(const DimClass& dims) {
  return 2 * kWarps * narrow_stages(dims) * 16 * (dims.qk + dims.v);
}
/// Columns of a row where results wait to be folded and written: padded, so that rows begin in different banks.
constexpr int32_t result_stride(const DimClass& dims) {
  return dims.v + 8;
}
constexpr int32_t result_bytes(const DimClass& dims) {
  return 4 * rows_per_item(dims) * result_stride(dims);
}
constexpr int32_t narrow_bytes(const DimClass& dims) {
  return 2 * kNarrowRows * dims.qk + ring_bytes(dims);
}
constexpr int32_t tile_bytes(const DimClass& dims) {
  const int32_t wide = wide_bytes(dims);
  const int32_t narrow = narrow_bytes(dims);
  const int32_t tiles = wide > narrow ? wide : narrow;
  const int32_t results = result_bytes(dims);  // takes the tiles' place
  return tiles > results ? tiles : results;
}

/// The kernel of large dimensions: queries, a ring of tiles (or keys and values of one), scores, which warps exchange.
constexpr int32_t kLargeRows = 32;
constexpr int32_t kLargeTokens = 16;       ///< of a tile
constexpr int32_t kLargeStages = 3;        ///< tiles in shared memory
constexpr int32_t kLargeScoreStride = 24;  ///< rows begin in different banks for a half of a warp
constexpr int32_t kLargeScores = 2 * (kLargeRows + kLargeStages * kLargeTokens) * kLargeDims.qk;  ///< byte offset
constexpr int32_t kLargeBytes = kLargeScores + 4 * kLargeRows * kLargeScoreStride;
/// Most packed rows of an item.
constexpr int32_t rows_of_class(int32_t index) {
  return index == kLargeClass ? kLargeRows : rows_per_item(kDimClasses[index]);
}

/// Byte offset of 16-byte piece `piece` of row `row` in a tile of `dim` 16-bit elements a row: pieces change places
/// within 128 bytes by the row's number, so that eight rows' equal pieces lie in different banks.
FOLIO_HOST_DEVICE constexpr int32_t piece_offset(int32_t dim, int32_t row, int32_t piece) {
  return row * dim * 2 + ((piece ^ (row & 7)) << 4);
}

/// The same in a tile of `dim` codes of 8 bits a row; rows of 64 or 192 bytes begin in one of two groups of banks.
FOLIO_HOST_DEVICE constexpr int32_t code_offset(int32_t dim, int32_t row, int32_t piece) {
  return row * dim + ((piece ^ (dim % 128 == 0 ? row & 7 : row >> 1 & 3)) << 4);
}

/// Where pair `pair` of the eight of a step of 16 query elements stands if keys are codes: a lane of a product then
/// finds the elements 4t to 4t + 3 where it would have 2t, 2t + 1, 2t + 8 and 2t + 9, and a lane's 4 codes lie side by
/// side.
FOLIO_HOST_DEVICE constexpr int32_t code_pair(int32_t pair) {
  return pair / 2 + pair % 2 * 4;
}

/// What the rows of an item see of a segment, as ranges of local tokens.
struct Sight {
  int32_t any_begin;  ///< tokens that at least one row sees lie in [any_begin, any_end)
  int32_t any_end;
  int32_t all_begin;  ///< tokens in [all_begin, all_end) are seen by all rows
  int32_t all_end;
};

/// Whether some row does not see some token of [first, first + count).
FOLIO_HOST_DEVICE constexpr bool needs_mask(const Sight& sight, int32_t first, int32_t count) {
  return first < sight.all_begin || first + count > sight.all_end;
}
/// Whether one of the tokens is seen by some rows and not by others: then what it holds must not reach the others.
FOLIO_HOST_DEVICE constexpr bool is_mixed(const Sight& sight, int32_t first, int32_t count) {
  const int32_t begin = first > sight.any_begin ? first : sight.any_begin;
  const int32_t end = first + count < sight.any_end ? first + count : sight.any_end;
  return begin < end && (begin < sight.all_begin || end > sight.all_end);
}

}  // namespace folio::inline v0::kernels::cuda::sm80
