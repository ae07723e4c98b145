#pragma once

#include <cstdint>

#include "folio/types/export.hpp"

/// Sizes of the kernel's parts and where things stand in shared memory. Plain integers, for host and device.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

constexpr int32_t kGroupThreads = 128;  ///< of a warpgroup
constexpr int32_t kGroupWarps = 4;
constexpr int32_t kMathGroups = 2;
constexpr int32_t kMathWarps = kGroupWarps * kMathGroups;
constexpr int32_t kThreads = kGroupThreads * (1 + kMathGroups);  ///< the first warpgroup loads
constexpr int32_t kGroupRows = 64;                               ///< of an item, that a math warpgroup has
constexpr int32_t kRows = kGroupRows * kMathGroups;              ///< most packed rows of an item
constexpr int32_t kTokens = 128;                                 ///< of a tile of keys or values
constexpr int32_t kEight = 8;   ///< tokens whose rows lie together in a tile; the smallest box
constexpr int32_t kPiece = 8;   ///< elements of 16 bytes
constexpr int32_t kStages = 4;  ///< tiles in the ring
constexpr int32_t kItems = 2;   ///< items whose queries are in shared memory
constexpr int32_t kSharedLimit = 227 * 1024;
/// Registers of a thread: at entry as many as 384 threads may have, then those of the loading and the math warpgroups.
constexpr int32_t kLoadRegisters = 88;
constexpr int32_t kMathRegisters = 208;
/// What a group claims are registers that another has given up: more would be waited for in vain.
static_assert(kLoadRegisters + kMathGroups * kMathRegisters <= (1 + kMathGroups) * (65536 / kThreads / 8 * 8));

struct HeadDims {
  int32_t qk;
  int32_t v;
};

constexpr int32_t tile_bytes(int32_t dim) {
  return 2 * kTokens * dim;
}
constexpr int32_t stage_bytes(const HeadDims& dims) {
  return tile_bytes(dims.qk > dims.v ? dims.qk : dims.v);
}
/// Queries of one math warpgroup, whose place its results take when they are through.
constexpr int32_t query_bytes(int32_t dim) {
  return 2 * kGroupRows * dim;
}
/// From 64 components of eight tokens to the next 64, and from eight tokens to the next eight.
constexpr int32_t kHalfBytes = 1024;
FOLIO_HOST_DEVICE constexpr int32_t eight_bytes(int32_t dim) {
  return 2 * kEight * dim;
}
/// From 64 components of a warpgroup's queries to the next 64.
constexpr int32_t kQueryHalfBytes = 128 * kGroupRows;

/// Byte offset of 16-byte piece `piece` of token `token` in a tile: eight tokens' first 64 components, their next 64,
/// ..., then the next eight tokens; within 128 bytes pieces change places by the token's number.
FOLIO_HOST_DEVICE constexpr int32_t tile_offset(int32_t dim, int32_t token, int32_t piece) {
  return token / kEight * eight_bytes(dim) + piece / 8 * kHalfBytes + token % kEight * 128 + ((piece ^ token) & 7) * 16;
}
/// The same of a row's queries: a warpgroup's rows' first 64 components, then their next 64.
FOLIO_HOST_DEVICE constexpr int32_t query_offset(int32_t dim, int32_t row, int32_t piece) {
  return row / kGroupRows * query_bytes(dim) + piece / 8 * kQueryHalfBytes + row % kGroupRows * 128 +
         ((piece ^ row) & 7) * 16;
}
/// The same of a row's results of 16 bits, within its warpgroup's queries' place.
FOLIO_HOST_DEVICE constexpr int32_t result_offset(int32_t dim, int32_t row, int32_t piece) {
  return row * 2 * dim + (piece & ~7) * 16 + ((piece ^ row) & 7) * 16;
}

/// Byte offsets of shared memory's parts, from an address that is a multiple of 1024.
struct SharedLayout {
  int32_t ring;     ///< [kStages] tiles
  int32_t queries;  ///< [kItems][kMathGroups]
  int32_t rest;     ///< struct SharedState
};
constexpr SharedLayout shared_layout(const HeadDims& dims) {
  SharedLayout layout{};
  layout.queries = kStages * stage_bytes(dims);
  layout.rest = layout.queries + kItems * kMathGroups * query_bytes(dims.qk);
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
  return first < sight.all_begin || first + kTokens > sight.all_end;
}

/// Largest box of tokens of one page: a power of two, from kEight to kTokens; 0 where pages are no multiples of eight.
constexpr int32_t box_tokens(int32_t page_size) {
  if (page_size % kEight != 0) return 0;
  int32_t box = kEight;
  while (box < kTokens && page_size % (2 * box) == 0) box *= 2;
  return box;
}
/// Boxes of a tile that one of the loading warps issues; where there are fewer than warps, the first warps have one.
FOLIO_HOST_DEVICE constexpr int32_t boxes_per_warp(int32_t box) {
  return box * kGroupWarps >= kTokens ? 1 : kTokens / kGroupWarps / box;
}

constexpr int32_t kMostBoxes = boxes_per_warp(kEight);
/// The same as a power of two.
FOLIO_HOST_DEVICE constexpr int32_t boxes_shift(int32_t box) {
  return box == kEight ? 2 : (box == 2 * kEight ? 1 : 0);
}
static_assert(boxes_per_warp(kEight) == 4 && boxes_per_warp(2 * kEight) == 2 && boxes_per_warp(4 * kEight) == 1);

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
