#pragma once

#include <cstdint>

#include "folio/types/export.hpp"

/// Sizes of the kernel's parts and where things stand in shared memory. Plain integers, for host and device.
namespace folio::inline v0::kernels::cuda::sm90::decode {

constexpr int32_t kTileTokens = 16;  ///< tokens that a warp takes at a time
constexpr int32_t kFewRows = 8;      ///< most packed rows of an item of the launch for few
constexpr int32_t kMaxRows = 16;     ///< ... of the other
constexpr int32_t kEntries = 2;      ///< of the queue between the scheduler and the math warps
constexpr int32_t kPiece = 8;        ///< elements of 16 bytes
constexpr int32_t kSharedLimit = 227 * 1024;

/// Ways in which an item's keys and values come to shared memory: tokens that one place in the queue stands for.
constexpr int32_t kSingles = 1;    ///< any strides and alignment: copied by the warp's threads
constexpr int32_t kSmallBox = 8;   ///< page sizes that are multiples of 8
constexpr int32_t kLargeBox = 16;  ///< page sizes that are multiples of 16

/// What a kernel is compiled for: its head dimensions, and the bytes of an element of keys and values in shared memory.
struct HeadDims {
  int32_t qk;
  int32_t v;
  int32_t bytes = 2;
};

/// Warps that compute. Tiles of head_dim 256 are so large that shared memory has room for two of each of four only.
constexpr int32_t math_warps(const HeadDims& dims) {
  return dims.qk > 192 ? 4 : 8;
}
constexpr int32_t math_threads(const HeadDims& dims) {
  return 32 * math_warps(dims);
}
constexpr int32_t threads(const HeadDims& dims) {
  return math_threads(dims) + 32;
}
/// Packed rows of an item at least: so many, or kMaxRows, which its kernel is compiled for: columns of one product or
/// of two.
constexpr int32_t rows_of_item(int32_t group_size) {
  return group_size <= kFewRows ? kFewRows : kMaxRows;
}
/// As if CTAs had so many threads: what registers a thread may have. Nine warps are three in one quarter of a
/// SM. Of 128 registers (few rows) they leave room for a fourth: for a CTA of the merge kernel,
/// which waits beside them until the last of them has ended. More rows take 168.
constexpr int32_t register_threads(const HeadDims& dims, int32_t rows) {
  if (math_warps(dims) != 8) return threads(dims);
  return rows == kFewRows ? 512 : 384;
}
/// Tokens of the scheduler's tiles, between which work is cut: each math warp has one of the kernel's in it.
constexpr int32_t plan_tokens(const HeadDims& dims) {
  return math_warps(dims) * kTileTokens;
}

/// Most tiles of an entry. Tiles of 192/128 are so large that half as many find room for their places.
constexpr int32_t entry_tiles(const HeadDims& dims) {
  return dims.qk == 192 ? 32 : 64;
}

/// Bytes of a tile of keys or of values.
constexpr int32_t half_bytes(int32_t dim, int32_t bytes) {
  return bytes * kTileTokens * dim;
}
constexpr int32_t stage_bytes(const HeadDims& dims) {
  return half_bytes(dims.qk, dims.bytes) + half_bytes(dims.v, dims.bytes);
}
/// Tiles that a warp has under way or in use: 128 KiB of them a CTA, but at least two.
constexpr int32_t stages(const HeadDims& dims) {
  const int32_t fit = 128 * 1024 / math_warps(dims) / stage_bytes(dims);
  return fit < 2 ? 2 : fit;
}

/// Bytes of a token that lie side by side in a tile: 128, or 64 where they are no multiple of 128.
FOLIO_HOST_DEVICE constexpr int32_t side_by_side(int32_t dim, int32_t bytes) {
  return dim * bytes % 128 == 0 ? 128 : 64;
}

/// Byte offset of 16-byte piece `piece` of token `token` in a tile as boxes of `box` tokens leave it: of every box, the
/// first 128 (or 64) bytes of each token and then the next, and within these pieces change places by the token's
/// number, so that eight tokens' equal pieces lie in different banks.
FOLIO_HOST_DEVICE constexpr int32_t piece_offset(int32_t dim, int32_t bytes, int32_t box, int32_t token,
                                                 int32_t piece) {
  const int32_t rows = box == kSmallBox ? kSmallBox : kTileTokens;
  const int32_t width = side_by_side(dim, bytes);
  const int32_t pieces = width / 16;
  const int32_t in_box = token % rows;
  const int32_t exchange = width == 128 ? in_box & 7 : in_box >> 1 & 3;
  return token / rows * rows * dim * bytes + (piece / pieces * rows + in_box) * width +
         (piece % pieces ^ exchange) * 16;
}

/// Queries in shared memory: a row's bytes, padded so that eight rows begin in different banks.
constexpr int32_t query_stride(const HeadDims& dims) {
  return 2 * dims.qk + 16;
}
/// Floats of a row where warps' results wait to be joined, padded likewise.
constexpr int32_t result_stride(const HeadDims& dims) {
  return dims.v + 4;
}
constexpr int32_t kResultRows = 8;  ///< of each warp: joined so many rows at a time

/// Neighbouring components of a row's end that a lane has, and how many in all: runs 32 times as far apart.
constexpr int32_t run_components(int32_t dim_v) {
  return dim_v % 128 == 0 ? 4 : 2;
}
constexpr int32_t lane_components(int32_t dim_v) {
  const int32_t across = 32 * run_components(dim_v);
  return run_components(dim_v) * ((dim_v + across - 1) / across);
}
/// Floats of a row's running state between the items of a chain: maximum, sum, two for alignment, and what lanes have.
constexpr int32_t running_floats(int32_t dim_v) {
  return 4 + 32 * lane_components(dim_v);
}

/// Byte offsets of shared memory's parts, from an address that is a multiple of 1024.
struct SharedLayout {
  int32_t ring;     ///< [math_warps][stages][stage_bytes]
  int32_t results;  ///< [math_warps][kResultRows][result_stride] float
  int32_t running;  ///< [kMaxRows][running_floats] float
  int32_t queries;  ///< [kEntries][kMaxRows][query_stride]
  int32_t places;   ///< [kEntries][entry_tiles * kTileTokens] TokenPlace
  int32_t rest;     ///< struct SharedState
};
constexpr SharedLayout shared_layout(const HeadDims& dims) {
  SharedLayout layout{};
  layout.ring = 0;
  layout.results = math_warps(dims) * stages(dims) * stage_bytes(dims);
  layout.running = layout.results + 4 * math_warps(dims) * kResultRows * result_stride(dims);
  layout.queries = layout.running + 4 * kMaxRows * running_floats(dims.v);
  layout.places = layout.queries + kEntries * kMaxRows * query_stride(dims);
  layout.rest = layout.places + kEntries * entry_tiles(dims) * kTileTokens * 8;
  return layout;
}

/// What the rows of an item see of a segment, as ranges of local tokens.
struct alignas(16) Sight {
  int32_t any_begin;  ///< tokens that at least one row sees lie in [any_begin, any_end)
  int32_t any_end;
  int32_t all_begin;  ///< tokens in [all_begin, all_end) are seen by all rows
  int32_t all_end;
};

/// Whether some row does not see some token of the tile that begins at `first`.
FOLIO_HOST_DEVICE constexpr bool needs_mask(const Sight& sight, int32_t first) {
  return first < sight.all_begin || first + kTileTokens > sight.all_end;
}
/// Whether some token of the tile is seen by no row: what it holds must not be multiplied.
FOLIO_HOST_DEVICE constexpr bool has_unseen(const Sight& sight, int32_t first) {
  return first < sight.any_begin || first + kTileTokens > sight.any_end;
}
/// Whether one of the tokens is seen by some rows and not by others: then what it holds must not reach the others.
FOLIO_HOST_DEVICE constexpr bool is_mixed(const Sight& sight, int32_t first) {
  const int32_t begin = first > sight.any_begin ? first : sight.any_begin;
  const int32_t end = first + kTileTokens < sight.any_end ? first + kTileTokens : sight.any_end;
  return begin < end && (begin < sight.all_begin || end > sight.all_end);
}

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
