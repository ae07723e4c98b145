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
constexpr int32_t kEight = 8;  ///< tokens whose rows lie together in a tile; the smallest box
constexpr int32_t kPiece = 8;  ///< elements of 16 bytes
constexpr int32_t kItems = 2;  ///< items whose rows are described in shared memory
constexpr int32_t kSharedLimit = 227 * 1024;
/// Registers of a thread: at entry as many as 384 threads may have, then those of the loading and the math warpgroups,
/// which are taken from what the CTA had at entry: more are waited for in vain.
constexpr int32_t kEntryRegisters = 168;
constexpr int32_t kLoadRegisters = 88;
constexpr int32_t kMathRegisters = 208;
/// The same where the loading warpgroup widens codes.
constexpr int32_t kCodeLoadRegisters = 104;
constexpr int32_t kCodeMathRegisters = 200;
static_assert(kLoadRegisters + kMathGroups * kMathRegisters <= (1 + kMathGroups) * kEntryRegisters);
static_assert(kCodeLoadRegisters + kMathGroups * kCodeMathRegisters <= (1 + kMathGroups) * kEntryRegisters);

struct HeadDims {
  int32_t qk;
  int32_t v;
};

/// Tokens of a tile of keys or values. Of head_dim 256, sums take half of the registers, and tiles of 128 more shared
/// memory than there is.
constexpr int32_t tile_tokens(const HeadDims& dims) {
  return dims.qk > 192 ? 64 : 128;
}
constexpr int32_t tile_bytes(const HeadDims& dims, int32_t dim) {
  return 2 * tile_tokens(dims) * dim;
}
/// Tiles of keys, and as many of values, in their rings.
constexpr int32_t stages(const HeadDims& dims) {
  return dims.qk > 64 ? 2 : 4;
}
constexpr int32_t kMaxStages = 4;
/// Queries of one math warpgroup, whose place its results take when they are through.
constexpr int32_t query_bytes(int32_t dim) {
  return 2 * kGroupRows * dim;
}
/// Items whose queries are in shared memory.
constexpr int32_t query_places(const HeadDims& dims) {
  return dims.qk > 128 ? 1 : kItems;
}

/// Bytes of a token, or a row, that lie side by side: 128, or 64 where they are no multiple of 128. Within them,
/// pieces of 16 change places by the token's number.
FOLIO_HOST_DEVICE constexpr int32_t span(int32_t dim) {
  return dim % 64 == 0 ? 128 : 64;
}
FOLIO_HOST_DEVICE constexpr int32_t in_span(int32_t dim, int32_t token, int32_t piece) {
  return span(dim) == 128 ? ((piece ^ token) & 7) * 16 : ((piece ^ token >> 1) & 3) * 16;
}
/// From a span of eight tokens to their next, and from eight tokens to the next eight.
FOLIO_HOST_DEVICE constexpr int32_t span_step(int32_t dim) {
  return kEight * span(dim);
}
FOLIO_HOST_DEVICE constexpr int32_t eight_bytes(int32_t dim) {
  return 2 * kEight * dim;
}
/// From a span of a warpgroup's queries to their next.
FOLIO_HOST_DEVICE constexpr int32_t query_step(int32_t dim) {
  return kGroupRows * span(dim);
}

/// Byte offset of 16-byte piece `piece` of token `token` in a tile: eight tokens' first spans, their next, ..., then
/// the next eight tokens.
FOLIO_HOST_DEVICE constexpr int32_t tile_offset(int32_t dim, int32_t token, int32_t piece) {
  return token / kEight * eight_bytes(dim) + piece / (span(dim) / 16) * span_step(dim) + token % kEight * span(dim) +
         in_span(dim, token, piece);
}
/// The same of a row's queries: a warpgroup's rows' first spans, then their next.
FOLIO_HOST_DEVICE constexpr int32_t query_offset(int32_t dim, int32_t row, int32_t piece) {
  return row / kGroupRows * query_bytes(dim) + piece / (span(dim) / 16) * query_step(dim) +
         row % kGroupRows * span(dim) + in_span(dim, row, piece);
}
/// The same of a row's results of 16 bits, within its warpgroup's queries' place.
FOLIO_HOST_DEVICE constexpr int32_t result_offset(int32_t dim, int32_t row, int32_t piece) {
  return row * 2 * dim + piece / (span(dim) / 16) * span(dim) + in_span(dim, row, piece);
}

/// fp8 codes: a loading warp widens its own boxes, each token's codes lie in one span.
constexpr int32_t kCodeSpan = 128;
constexpr int32_t kLargestCodeBox = 32;

/// Byte offsets of shared memory's parts, from an address that is a multiple of 1024.
struct SharedLayout {
  int32_t keys;     ///< [stages] tiles
  int32_t values;   ///< [stages] tiles
  int32_t queries;  ///< [query_places][kMathGroups]
  int32_t sights;   ///< of tiles of keys, [stages][kRows][tile_tokens / 32]: bits of the tokens that a row sees
  int32_t rest;     ///< struct SharedState
};
constexpr SharedLayout shared_layout(const HeadDims& dims) {
  SharedLayout layout{};
  layout.values = stages(dims) * tile_bytes(dims, dims.qk);
  layout.queries = layout.values + stages(dims) * tile_bytes(dims, dims.v);
  layout.sights = layout.queries + query_places(dims) * kMathGroups * query_bytes(dims.qk);
  layout.rest = layout.sights + stages(dims) * kRows * tile_tokens(dims) / 8;
  return layout;
}

/// What the rows of an item see of a segment, as ranges of local tokens.
struct alignas(16) Sight {
  int32_t any_begin;  ///< tokens that at least one row sees lie in [any_begin, any_end)
  int32_t any_end;
  int32_t all_begin;  ///< tokens in [all_begin, all_end) are seen by all rows
  int32_t all_end;
};

/// Whether some row does not see some token of the tile of `tokens` that begins at `first`.
FOLIO_HOST_DEVICE constexpr bool needs_mask(const Sight& sight, int32_t first, int32_t tokens) {
  return first < sight.all_begin || first + tokens > sight.all_end;
}

/// Largest box of tokens of one page: a power of two, from kEight to a tile's `tokens`; 0 where pages are no multiples
/// of eight.
constexpr int32_t box_tokens(int32_t page_size, int32_t tokens) {
  if (page_size % kEight != 0) return 0;
  int32_t box = kEight;
  while (box < tokens && page_size % (2 * box) == 0) box *= 2;
  return box;
}
/// Boxes of a tile of `tokens` that one of the loading warps issues; where there are fewer than warps, the first warps
/// have one.
FOLIO_HOST_DEVICE constexpr int32_t boxes_per_warp(int32_t box, int32_t tokens) {
  return box * kGroupWarps >= tokens ? 1 : tokens / kGroupWarps / box;
}

/// The same as a power of two.
FOLIO_HOST_DEVICE constexpr int32_t boxes_shift(int32_t box, int32_t tokens) {
  int32_t shift = 0;
  while (box << shift < tokens / kGroupWarps) ++shift;
  return shift;
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
