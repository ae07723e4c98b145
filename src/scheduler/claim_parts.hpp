#pragma once

#include <algorithm>
#include <cstdint>

#include "folio/types/export.hpp"
#include "scheduler/claim_rule.hpp"
#include "scheduler/partition_rule.hpp"

/// The splits that a row tile's keys are claimed in. Host and device.
namespace folio::inline v0::scheduler {

/// What one accumulation visits, by one KV head, in the tile space. Its keys are a list of ranges, one a segment, of
/// which some may be empty: `ranges(i)` for i in [0, num_ranges).
struct OutputTile {
  int64_t begin = 0;     ///< place in the tile space
  int64_t kv_tiles = 0;  ///< of all ranges
  int64_t tile_cost = 1;
  int32_t kv_tokens = 1;     ///< of a KV tile
  int32_t split_tokens = 0;  ///< of a fixed split; 0: splits are not fixed
  int32_t num_ranges = 0;
};

/// Some keys of one range.
struct KvSplit {
  int32_t range = 0;
  TokenRange keys;
};

/// How many splits an output tile is to be cut into: 1 is one claim of all its ranges; more are one work tile each,
/// every range on its own, at fixed splits every split.
template <typename Ranges>
FOLIO_HOST_DEVICE constexpr int32_t count_kv_splits(const SplitRule& rule, const OutputTile& output_tile,
                                                    const Ranges& ranges) {
  if (output_tile.kv_tiles < 2 * rule.min_split_tiles) return 1;
  if (!needs_split(rule, output_tile.begin, output_tile.kv_tiles * output_tile.tile_cost)) return 1;
  int32_t splits = 0;
  int64_t before = 0;
  for (int32_t i = 0; i < output_tile.num_ranges; ++i) {
    const TokenRange range = ranges(i);
    if (range.empty()) continue;
    const int64_t tiles = tiles_touched(range, output_tile.kv_tokens);
    splits +=
        output_tile.split_tokens > 0
            ? static_cast<int32_t>(tiles_touched(range, output_tile.split_tokens))
            : count_splits(rule, {output_tile.begin + before * output_tile.tile_cost, tiles, output_tile.tile_cost});
    before += tiles;
  }
  return splits;
}

/// Split number `index` of fixed splits: of an output tile that is cut, or the work tiles of one that is not.
template <typename Ranges>
FOLIO_HOST_DEVICE constexpr KvSplit fixed_split_at(const OutputTile& output_tile, const Ranges& ranges, int32_t index) {
  const int64_t split = output_tile.split_tokens;
  for (int32_t i = 0; i < output_tile.num_ranges; ++i) {
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

/// Split number `index` of an output tile that is cut.
template <typename Ranges>
FOLIO_HOST_DEVICE constexpr KvSplit kv_split_at(const SplitRule& rule, const OutputTile& output_tile,
                                                const Ranges& ranges, int32_t index) {
  if (output_tile.split_tokens > 0) return fixed_split_at(output_tile, ranges, index);
  const int64_t width = output_tile.kv_tokens;
  int64_t before = 0;
  for (int32_t i = 0; i < output_tile.num_ranges; ++i) {
    const TokenRange range = ranges(i);
    if (range.empty()) continue;
    const int64_t tiles = tiles_touched(range, width);
    const KvSpan span{output_tile.begin + before * output_tile.tile_cost, tiles, output_tile.tile_cost};
    const int32_t num_splits = count_splits(rule, span);
    if (index < num_splits) {
      const TokenRange split = split_of(rule, span, index);
      const int64_t first = narrow_div(range.begin, width);
      const int64_t begin = (first + split.begin) * width;
      const int64_t end = (first + split.end) * width;
      return {i, {begin > range.begin ? begin : range.begin, end < range.end ? end : range.end}};
    }
    index -= num_splits;
    before += tiles;
  }
  return {};
}

/// Calls visit(KvSplit) for every split of an output tile that is cut, in order. kv_split_at finds one of them; all at
/// once cost little more.
template <typename Ranges, typename Visit>
constexpr void for_each_kv_split(const SplitRule& rule, const OutputTile& output_tile, const Ranges& ranges,
                                 const Visit& visit) {
  const int64_t width = output_tile.kv_tokens;
  int64_t before = 0;
  for (int32_t i = 0; i < output_tile.num_ranges; ++i) {
    const TokenRange range = ranges(i);
    if (range.empty()) continue;
    if (output_tile.split_tokens > 0) {
      const int64_t split = output_tile.split_tokens;
      for (int64_t begin = range.begin; begin < range.end;) {
        const int64_t end = std::min(range.end, (narrow_div(begin, split) + 1) * split);
        visit(KvSplit{i, {begin, end}});
        begin = end;
      }
      continue;
    }
    const int64_t tiles = tiles_touched(range, width);
    const int64_t first = narrow_div(range.begin, width);
    int64_t begin = range.begin;
    const KvSpan span{output_tile.begin + before * output_tile.tile_cost, tiles, output_tile.tile_cost};
    for_each_split_run(rule, span, [&](const SplitRunOf<int64_t>& run) {
      const int64_t count = run.end - run.begin;
      for (int32_t number = 1; number <= run.num_splits; ++number) {
        const int64_t tile = number == run.num_splits ? run.end : run.begin + count * number / run.num_splits;
        const int64_t end = std::min(range.end, (first + tile) * width);
        visit(KvSplit{i, {begin, end}});
        begin = end;
      }
    });
    before += tiles;
  }
}

/// Work tile number `index` of an output tile that is not cut: one a range, or one a fixed split.
template <typename Ranges>
FOLIO_HOST_DEVICE constexpr KvSplit unsplit_tile_at(const OutputTile& output_tile, const Ranges& ranges,
                                                    int32_t index) {
  if (output_tile.split_tokens > 0) return fixed_split_at(output_tile, ranges, index);
  for (int32_t i = 0; i < output_tile.num_ranges; ++i) {
    const TokenRange range = ranges(i);
    if (range.empty()) continue;
    if (index-- == 0) return {i, range};
  }
  return {};
}

}  // namespace folio::inline v0::scheduler
