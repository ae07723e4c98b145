#pragma once

#include <algorithm>
#include <cstdint>

#include "folio/types/export.hpp"
#include "scheduler/claim_rule.hpp"
#include "scheduler/partition_rule.hpp"

/// The parts that a row tile's keys are claimed in. Host and device.
namespace folio::inline v0::scheduler {

/// What one accumulation visits, by one KV head, in the line of work. Its keys are a list of ranges, one a segment, of
/// which some may be empty: `ranges(i)` for i in [0, num_ranges).
struct ClaimChain {
  int64_t begin = 0;     ///< place in the line
  int64_t kv_tiles = 0;  ///< of all ranges
  int64_t tile_cost = 1;
  int32_t kv_tokens = 1;     ///< of a KV tile
  int32_t split_tokens = 0;  ///< of a fixed split; 0: splits are not fixed
  int32_t num_ranges = 0;
};

/// Some keys of one range.
struct ClaimPart {
  int32_t range = 0;
  TokenRange keys;
};

/// How many parts a chain is to be cut into: 1 is one claim of all its ranges; more are one item each, every range on
/// its own, at fixed splits every split.
template <typename Ranges>
FOLIO_HOST_DEVICE constexpr int32_t count_parts(const ClaimRule& rule, const ClaimChain& chain, const Ranges& ranges) {
  if (chain.kv_tiles < 2 * rule.least_tiles) return 1;
  if (!is_to_be_cut(rule, chain.begin, chain.kv_tiles * chain.tile_cost)) return 1;
  int32_t parts = 0;
  int64_t before = 0;
  for (int32_t i = 0; i < chain.num_ranges; ++i) {
    const TokenRange range = ranges(i);
    if (range.empty()) continue;
    const int64_t tiles = tiles_touched(range, chain.kv_tokens);
    parts += chain.split_tokens > 0
                 ? static_cast<int32_t>(tiles_touched(range, chain.split_tokens))
                 : count_pieces(rule, {chain.begin + before * chain.tile_cost, tiles, chain.tile_cost});
    before += tiles;
  }
  return parts;
}

/// Part number `index` of fixed splits: of a chain that is cut, or the work tiles of one that is not.
template <typename Ranges>
FOLIO_HOST_DEVICE constexpr ClaimPart split_at(const ClaimChain& chain, const Ranges& ranges, int32_t index) {
  const int64_t split = chain.split_tokens;
  for (int32_t i = 0; i < chain.num_ranges; ++i) {
    const TokenRange range = ranges(i);
    if (range.empty()) continue;
    const auto count = static_cast<int32_t>(tiles_touched(range, split));
    if (index < count) {
      const int64_t begin = (narrow_div(range.begin, split) + index) * split;
      const int64_t end = begin + split;
      return {i, {index == 0 ? range.begin : begin, end < range.end ? end : range.end}};
    }
    index -= count;
  }
  return {};
}

/// Part number `index` of a chain that is cut.
template <typename Ranges>
FOLIO_HOST_DEVICE constexpr ClaimPart part_at(const ClaimRule& rule, const ClaimChain& chain, const Ranges& ranges,
                                              int32_t index) {
  if (chain.split_tokens > 0) return split_at(chain, ranges, index);
  const int64_t width = chain.kv_tokens;
  int64_t before = 0;
  for (int32_t i = 0; i < chain.num_ranges; ++i) {
    const TokenRange range = ranges(i);
    if (range.empty()) continue;
    const int64_t tiles = tiles_touched(range, width);
    const ClaimSpan span{chain.begin + before * chain.tile_cost, tiles, chain.tile_cost};
    const int32_t pieces = count_pieces(rule, span);
    if (index < pieces) {
      const TokenRange piece = piece_of(rule, span, index);
      const int64_t first = narrow_div(range.begin, width);
      const int64_t begin = (first + piece.begin) * width;
      const int64_t end = (first + piece.end) * width;
      return {i, {begin > range.begin ? begin : range.begin, end < range.end ? end : range.end}};
    }
    index -= pieces;
    before += tiles;
  }
  return {};
}

/// Calls visit(ClaimPart) for every part of a chain that is cut, in order. part_at finds one of them; all at once cost
/// little more.
template <typename Ranges, typename Visit>
constexpr void for_each_part(const ClaimRule& rule, const ClaimChain& chain, const Ranges& ranges, const Visit& visit) {
  const int64_t width = chain.kv_tokens;
  int64_t before = 0;
  for (int32_t i = 0; i < chain.num_ranges; ++i) {
    const TokenRange range = ranges(i);
    if (range.empty()) continue;
    if (chain.split_tokens > 0) {
      const int64_t split = chain.split_tokens;
      for (int64_t begin = range.begin; begin < range.end;) {
        const int64_t end = std::min(range.end, (narrow_div(begin, split) + 1) * split);
        visit(ClaimPart{i, {begin, end}});
        begin = end;
      }
      continue;
    }
    const int64_t tiles = tiles_touched(range, width);
    const int64_t first = narrow_div(range.begin, width);
    int64_t begin = range.begin;
    const ClaimSpan span{chain.begin + before * chain.tile_cost, tiles, chain.tile_cost};
    for_each_claim_run(rule, span, [&](const ClaimRunOf<int64_t>& run) {
      const int64_t count = run.end - run.begin;
      for (int32_t piece = 1; piece <= run.pieces; ++piece) {
        const int64_t tile = piece == run.pieces ? run.end : run.begin + count * piece / run.pieces;
        const int64_t end = std::min(range.end, (first + tile) * width);
        visit(ClaimPart{i, {begin, end}});
        begin = end;
      }
    });
    before += tiles;
  }
}

/// Item number `index` of a chain that is not cut: one a range, or one a fixed split.
template <typename Ranges>
FOLIO_HOST_DEVICE constexpr ClaimPart whole_item_at(const ClaimChain& chain, const Ranges& ranges, int32_t index) {
  if (chain.split_tokens > 0) return split_at(chain, ranges, index);
  for (int32_t i = 0; i < chain.num_ranges; ++i) {
    const TokenRange range = ranges(i);
    if (range.empty()) continue;
    if (index-- == 0) return {i, range};
  }
  return {};
}

}  // namespace folio::inline v0::scheduler
