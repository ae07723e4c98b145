#pragma once

#include <cstdint>

#include "folio/types/export.hpp"

/// Sizes of the kernel's parts and where things stand in shared memory. Plain integers, for host and device.
namespace folio::inline v0::kernels::cuda::sm90::mla {

constexpr int32_t kDimQk = 576;
constexpr int32_t kDimV = 512;
constexpr int32_t kGroupThreads = 128;  ///< of a warpgroup
constexpr int32_t kGroupWarps = 4;
constexpr int32_t kMathGroups = 2;
constexpr int32_t kThreads = kGroupThreads * (1 + kMathGroups);  ///< the first warpgroup loads
constexpr int32_t kRows = 64;                                    ///< most packed rows of an item
constexpr int32_t kTokens = 64;                                  ///< of a tile
constexpr int32_t kEight = 8;                                    ///< the smallest box
constexpr int32_t kPiece = 8;                                    ///< elements of 16 bytes
constexpr int32_t kStages = 2;                                   ///< tiles in the ring
constexpr int32_t kItems = 2;                                    ///< items whose rows are known
constexpr int32_t kSharedLimit = 227 * 1024;
/// Registers of a thread: at entry as many as 384 threads may have, then those of the loading and the math warpgroups.
constexpr int32_t kLoadRegisters = 72;
constexpr int32_t kMathRegisters = 216;

/// Tiles, and queries, are columns of 64 components: 64 tokens (rows) of 128 bytes, one after the other.
constexpr int32_t kColumnBytes = 128 * kTokens;
constexpr int32_t kColumns = kDimQk / 64;
constexpr int32_t kValueColumns = kDimV / 64;
constexpr int32_t kTileBytes = kColumns * kColumnBytes;
static_assert(kRows == kTokens, "queries stand as tiles do");

/// What of a tile is loaded and freed at a time: the values of either math warpgroup, and what keys have beyond values.
enum Part : int32_t { kLeft = 0, kRight = 1, kTail = 2 };
constexpr int32_t kParts = 3;
constexpr int32_t kHalfColumns = kValueColumns / kMathGroups;
constexpr int32_t part_begin(int32_t part) {
  return part * kHalfColumns;
}
constexpr int32_t part_columns(int32_t part) {
  return part == kTail ? kColumns - kValueColumns : kHalfColumns;
}
static_assert(kHalfColumns == kGroupWarps, "a loading warp has a column of each half");
/// A tile's weights stand in the place of its tail, which nothing reads any more: 16 registers of each thread.
constexpr int32_t kWeights = kValueColumns * kColumnBytes;
static_assert(kTileBytes - kWeights == 2 * kRows * kTokens);

/// Byte offset of 16-byte piece `piece` of token (row) `token` in a tile (the queries): within 128 bytes pieces change
/// places by the token's number.
FOLIO_HOST_DEVICE constexpr int32_t tile_offset(int32_t token, int32_t piece) {
  return piece / 8 * kColumnBytes + token * 128 + ((piece ^ token) & 7) * 16;
}

/// Byte offsets of shared memory's parts, from an address that is a multiple of 1024. The ring comes first.
constexpr int32_t kQueries = kStages * kTileBytes;
constexpr int32_t kRest = kQueries + kTileBytes;  ///< struct SharedState

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
/// Whether some token of the tile is seen by no row: what it holds must not be multiplied.
FOLIO_HOST_DEVICE constexpr bool has_unseen(const Sight& sight, int32_t first) {
  return first < sight.any_begin || first + kTokens > sight.any_end;
}
/// Whether one of the tokens is seen by some rows and not by others: then what it holds must not reach the others.
FOLIO_HOST_DEVICE constexpr bool is_mixed(const Sight& sight, int32_t first) {
  const int32_t begin = first > sight.any_begin ? first : sight.any_begin;
  const int32_t end = first + kTokens < sight.any_end ? first + kTokens : sight.any_end;
  return begin < end && (begin < sight.all_begin || end > sight.all_end);
}

/// Largest box of tokens of one page: a power of two, from kEight to kTokens; 0 where pages are no multiples of eight.
constexpr int32_t box_tokens(int32_t page_size) {
  if (page_size % kEight != 0) return 0;
  int32_t box = kEight;
  while (box < kTokens && page_size % (2 * box) == 0) box *= 2;
  return box;
}

/// The boxes of a tile that hold a token that some row sees: [begin, end).
struct BoxRange {
  int32_t begin;
  int32_t end;
  /// Those whose number is `which` more than a multiple of four.
  FOLIO_HOST_DEVICE constexpr int32_t count_of(int32_t which) const {
    return (end - which + 3) / 4 - (begin - which + 3) / 4;
  }
};
FOLIO_HOST_DEVICE constexpr BoxRange seen_boxes(const Sight& sight, int32_t first, int32_t box) {
  const int32_t begin = sight.any_begin > first ? sight.any_begin - first : 0;
  const int32_t end = sight.any_end < first + kTokens ? sight.any_end - first : kTokens;
  if (begin >= end) return {0, 0};
  return {begin / box, (end + box - 1) / box};
}

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
