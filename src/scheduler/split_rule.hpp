#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <type_traits>

#include "folio/types/export.hpp"
#include "scheduler/mask_bounds.hpp"

/// The split-KV rule of the dynamic scheduler: how finely output tiles are split that workers claim
/// (Schedule::kDynamic). Pure functions of integers, run by the host and the device scheduler.
///
/// The rule covers the tile space of one KV head, in claim order; all heads have the same. It goes in split waves.
/// Each wave takes half of what is left, in splits of about half a worker's share of it ("factoring": Hummel,
/// Schonberg and Flynn, 1992). Output tiles that cost no more stay whole. So workers of different speed end at about
/// the same time, and the number of splits grows with the workers and the logarithm of the work, not with the work.
///
/// Where a worker's share is short, starting a second split costs more than balance gains. Then every worker gets one
/// of equal splits, if those exist.
namespace folio::inline v0::scheduler {

/// A 32-bit divisor that is used more than once (as cutlass::FastDivmod): one multiplication and a correction, where
/// a GPU's division is twenty dependent instructions. With r = floor((2^32 - 1) / d) >= 2^32 / d - 1, n * r / 2^32 >
/// n / d - 1 for every n below 2^32. So its integer part is the quotient or one less.
class FastDivisor {
 public:
  FastDivisor() = default;
  /// Implicit: code for 64 bits has plain integers in its place (DivisorOf). Nothing is divided by 0.
  FOLIO_HOST_DEVICE constexpr FastDivisor(uint32_t value)  // NOLINT(google-explicit-constructor)
      : value_(value), reciprocal_(value == 0 ? 0 : 0xffffffffu / value) {}
  FOLIO_HOST_DEVICE constexpr operator uint32_t() const { return value_; }  // NOLINT(google-explicit-constructor)
  FOLIO_HOST_DEVICE friend constexpr uint32_t operator/(uint32_t number, const FastDivisor& divisor) {
    const auto near = static_cast<uint32_t>(uint64_t{number} * divisor.reciprocal_ >> 32);
    return number - near * divisor.value_ >= divisor.value_ ? near + 1 : near;
  }

 private:
  uint32_t value_ = 1;
  uint32_t reciprocal_ = 0xffffffffu;
};

/// A divisor of numbers of type Int.
template <typename Int>
using DivisorOf = std::conditional_t<std::is_same_v<Int, uint32_t>, FastDivisor, Int>;

/// ceil_div of numbers whose sum fits.
FOLIO_HOST_DEVICE constexpr uint32_t ceil_div(uint32_t value, const FastDivisor& divisor) {
  return (value + static_cast<uint32_t>(divisor) - 1) / divisor;
}

/// One split wave: the work from the previous wave's end up to `end`, in splits of at most `split_cost`. Costs are of
/// one KV head.
template <typename Int>
struct SplitWaveOf {
  Int end = 0;
  DivisorOf<Int> split_cost = 0;
};

inline constexpr int32_t kMaxSplitWaves = 7;

template <typename Int>
struct SplitRuleOf {
  SplitWaveOf<Int> split_waves[kMaxSplitWaves];
  int32_t num_split_waves = 0;
  DivisorOf<Int> min_split_tiles = 1;  ///< fewest KV tiles of a split, unless the output tile has fewer
  int32_t swizzle_heads = 1;           ///< KV heads of a swizzle group: claimed side by side
};

/// One KV head's tile space, and what else the rule depends on.
template <typename Int>
struct HeadTileSpaceOf {
  Int total = 0;  ///< cost of one KV head's work
  int32_t num_kv_heads = 1;
  DivisorOf<Int> num_workers = 1;
  DivisorOf<Int> min_split_tiles = 1;  ///< fewest KV tiles that are worth a split
  Int min_tile_cost = 1;               ///< cost of the cheapest KV tile
  FOLIO_HOST_DEVICE constexpr Int min_split_cost() const { return min_split_tiles * min_tile_cost; }
  /// A worker's share of the work from `begin` on.
  FOLIO_HOST_DEVICE constexpr Int share(Int begin) const {
    return (total - begin) * static_cast<Int>(num_kv_heads) / num_workers;
  }
};

/// A rule with one wave: splits of at most `split_cost` everywhere.
template <typename Int>
FOLIO_HOST_DEVICE constexpr SplitRuleOf<Int> one_split_wave(const HeadTileSpaceOf<Int>& space, Int split_cost) {
  SplitRuleOf<Int> rule;
  rule.split_waves[0] = {space.total, split_cost};
  rule.num_split_waves = 1;
  rule.min_split_tiles = space.min_split_tiles;
  return rule;
}

/// Half a worker's share of what is left when split wave `index` begins.
template <typename Int>
FOLIO_HOST_DEVICE constexpr Int half_share(const HeadTileSpaceOf<Int>& space, int32_t index) {
  return space.share(space.total - (space.total >> index)) / 2;
}

/// Whether split wave `index` is the last. Every wave before it leaves some work.
template <typename Int>
FOLIO_HOST_DEVICE constexpr bool is_last_split_wave(const HeadTileSpaceOf<Int>& space, int32_t index) {
  return index + 1 == kMaxSplitWaves || half_share(space, index) <= space.min_split_cost();
}

/// Split wave `index` of the factoring rule.
template <typename Int>
FOLIO_HOST_DEVICE constexpr SplitWaveOf<Int> split_wave(const HeadTileSpaceOf<Int>& space, int32_t index) {
  const Int split_cost = half_share(space, index);
  const Int least = space.min_split_cost();
  const Int end = is_last_split_wave(space, index) ? space.total : space.total - (space.total >> index) / 2;
  // A quarter more: an output tile that costs slightly more than a split is not worth two halves.
  return {end, split_cost < least ? least : split_cost + split_cost / 4};
}

/// All split waves; one worker has a single one.
template <typename Int>
FOLIO_HOST_DEVICE constexpr SplitRuleOf<Int> factoring_rule(const HeadTileSpaceOf<Int>& space) {
  if (space.num_workers == 1) return one_split_wave(space, space.total);
  SplitRuleOf<Int> rule;
  rule.min_split_tiles = space.min_split_tiles;
  bool last = false;
  while (!last) {
    last = is_last_split_wave(space, rule.num_split_waves);
    rule.split_waves[rule.num_split_waves] = split_wave(space, rule.num_split_waves);
    ++rule.num_split_waves;
  }
  return rule;
}

/// Trial sizes for one equal split per worker: a worker's share plus 0 to 4 sixteenths.
inline constexpr int32_t kSplitTrials = 5;

/// Whether one split per worker is tried at all.
template <typename Int>
FOLIO_HOST_DEVICE constexpr bool is_short(const HeadTileSpaceOf<Int>& space) {
  return space.num_workers > 1 && space.share(0) <= 4 * space.min_split_cost();
}

template <typename Int>
FOLIO_HOST_DEVICE constexpr Int trial_split_cost(const HeadTileSpaceOf<Int>& space, int32_t trial) {
  const Int share = space.share(0);
  const Int split_cost = share + share * static_cast<Int>(trial) / 16;
  const Int least = space.min_split_cost();
  return split_cost < least ? least : split_cost;
}
template <typename Int>
FOLIO_HOST_DEVICE constexpr SplitRuleOf<Int> trial_rule(const HeadTileSpaceOf<Int>& space, int32_t trial) {
  return one_split_wave(space, trial_split_cost(space, trial));
}

/// Splits of an output tile at one trial size, whatever its ranges.
template <typename Int>
FOLIO_HOST_DEVICE constexpr Int trial_splits(const DivisorOf<Int>& split_cost, const DivisorOf<Int>& min_split_tiles,
                                             Int kv_tiles, Int tile_cost) {
  const Int wanted = ceil_div(kv_tiles * tile_cost, split_cost);
  const Int max = kv_tiles / min_split_tiles;
  const Int splits = wanted < max ? wanted : max;
  return splits < 1 ? 1 : splits;
}

/// Splits of one KV head's work, over the whole batch, for each trial size.
struct TrialSplits {
  int32_t of[kSplitTrials] = {};
};

struct AddTrials {
  FOLIO_HOST_DEVICE constexpr TrialSplits operator()(const TrialSplits& a, const TrialSplits& b) const {
    TrialSplits both;
    for (int32_t i = 0; i < kSplitTrials; ++i) {
      const int64_t sum = int64_t{a.of[i]} + b.of[i];
      both.of[i] = static_cast<int32_t>(sum < 0x7fffffff ? sum : 0x7fffffff);
    }
    return both;
  }
};

/// The rule, given the trials' counts. The counts are read only where the tile space is short.
template <typename Int>
FOLIO_HOST_DEVICE constexpr SplitRuleOf<Int> split_rule(const HeadTileSpaceOf<Int>& space, const TrialSplits& trials) {
  if (is_short(space)) {
    for (int32_t i = 0; i < kSplitTrials; ++i) {
      if (int64_t{trials.of[i]} * space.num_kv_heads <= space.num_workers) return trial_rule(space, i);
    }
  }
  return factoring_rule(space);
}

/// A row tile's keys in one segment, or all of its keys, as a span of the tile space.
template <typename Int>
struct KvSpanOf {
  Int begin = 0;     ///< position in the tile space
  Int kv_tiles = 0;  ///< at least 1
  DivisorOf<Int> tile_cost = 1;
};

/// Zero bits above a number's leading one bit.
FOLIO_HOST_DEVICE constexpr int32_t leading_zeros(uint32_t number) {
#if defined(__CUDA_ARCH__)
  return __clz(static_cast<int>(number));
#else
  return __builtin_clz(number);
#endif
}
FOLIO_HOST_DEVICE constexpr int32_t leading_zeros(int64_t number) {
#if defined(__CUDA_ARCH__)
  return __clzll(number);
#else
  return __builtin_clzll(static_cast<unsigned long long>(number));
#endif
}

/// The split wave of a position. Every wave leaves half, rounded down, of what it finds. So in wave r at most total
/// >> r is left, but more than total >> (r + 1).
template <typename Int>
FOLIO_HOST_DEVICE constexpr int32_t split_wave_at(const SplitRuleOf<Int>& rule, Int place) {
  const int32_t last = rule.num_split_waves - 1;
  const Int total = rule.split_waves[last].end;
  if (last == 0 || place >= total) return last;
  const Int left = total - place;
  int32_t wave = leading_zeros(left) - leading_zeros(total);
  if ((total >> wave) < left) --wave;
  return wave < last ? wave : last;
}

/// Whether an output tile of this cost that begins at `place` is split at all.
template <typename Int>
FOLIO_HOST_DEVICE constexpr bool needs_split(const SplitRuleOf<Int>& rule, Int place, Int cost) {
  return cost > rule.split_waves[split_wave_at(rule, place)].split_cost;
}

/// A run of neighbouring splits of about the same size: a span's splits of one wave.
template <typename Int>
struct SplitRunOf {
  Int begin = 0;  ///< KV tiles of the span
  Int end = 0;
  int32_t num_splits = 0;
};

/// Calls visit(SplitRunOf) for each wave that a span lies in, in order. The span is one that needs_split.
template <typename Int, typename Visit>
FOLIO_HOST_DEVICE constexpr void for_each_split_run(const SplitRuleOf<Int>& rule, const KvSpanOf<Int>& span,
                                                    const Visit& visit) {
  Int begin = 0;
  for (int32_t wave = split_wave_at(rule, span.begin); begin < span.kv_tiles; ++wave) {
    const SplitWaveOf<Int>& here = rule.split_waves[wave];
    Int end = span.kv_tiles;
    if (wave + 1 < rule.num_split_waves) {
      const Int up_to = ceil_div(here.end - span.begin, span.tile_cost);
      if (up_to < end) end = up_to;
      // A remainder below half a split joins its neighbour.
      if ((span.kv_tiles - end) * span.tile_cost * 2 < rule.split_waves[wave + 1].split_cost) end = span.kv_tiles;
      if (end < span.kv_tiles && (end - begin) * span.tile_cost * 2 < here.split_cost) continue;
    }
    const Int tiles = end - begin;
    const Int wanted = ceil_div(tiles * span.tile_cost, here.split_cost);
    const Int max = tiles / rule.min_split_tiles;
    const Int num_splits = wanted < max ? wanted : max;
    visit(SplitRunOf<Int>{begin, end, static_cast<int32_t>(num_splits < 1 ? 1 : num_splits)});
    begin = end;
  }
}

/// Number of splits of a span that is split.
template <typename Int>
FOLIO_HOST_DEVICE constexpr int32_t count_splits(const SplitRuleOf<Int>& rule, const KvSpanOf<Int>& span) {
  int32_t count = 0;
  for_each_split_run(rule, span, [&count](const SplitRunOf<Int>& run) { count += run.num_splits; });
  return count;
}

/// KV tiles of split `index` of a span that is split.
template <typename Int>
FOLIO_HOST_DEVICE constexpr TokenRange split_of(const SplitRuleOf<Int>& rule, const KvSpanOf<Int>& span,
                                                int32_t index) {
  TokenRange tiles;
  for_each_split_run(rule, span, [&tiles, &index](const SplitRunOf<Int>& run) {
    if (index >= 0 && index < run.num_splits) {
      const Int count = run.end - run.begin;
      const auto place = static_cast<Int>(index);
      const DivisorOf<Int> num_splits = static_cast<Int>(run.num_splits);
      tiles = {run.begin + count * place / num_splits, run.begin + count * (place + 1) / num_splits};
    }
    index -= run.num_splits;
  });
  return tiles;
}

using SplitWave = SplitWaveOf<int64_t>;
using SplitRule = SplitRuleOf<int64_t>;
using HeadTileSpace = HeadTileSpaceOf<int64_t>;
using KvSpan = KvSpanOf<int64_t>;

FOLIO_HOST_DEVICE FOLIO_CALLED constexpr int32_t count_splits(const SplitRule& rule, const KvSpan& span) {
  return count_splits<int64_t>(rule, span);
}
FOLIO_HOST_DEVICE FOLIO_CALLED constexpr TokenRange split_of(const SplitRule& rule, const KvSpan& span, int32_t index) {
  return split_of<int64_t>(rule, span, index);
}

/// What one accumulation visits for one KV head, in the tile space. Its keys are one range per segment, some of them
/// empty: `ranges(i)` for i in [0, num_ranges).
struct OutputTile {
  int64_t begin = 0;     ///< position in the tile space
  int64_t kv_tiles = 0;  ///< of all ranges
  int64_t tile_cost = 1;
  int32_t kv_tokens = 1;     ///< of a KV tile
  int32_t split_tokens = 0;  ///< of a fixed split; 0: splits are not fixed
  int32_t num_ranges = 0;
  int32_t max_splits = 0;  ///< most KV splits; 0: as many as the rule makes
};

/// One KV split: some keys of one range.
struct KvSplit {
  int32_t range = 0;
  TokenRange keys;
};

/// Most KV splits of each range of an output tile: equal shares of its max_splits. 0: it has more ranges than splits.
template <typename Ranges>
FOLIO_HOST_DEVICE constexpr int32_t max_range_splits(const OutputTile& output_tile, const Ranges& ranges) {
  if (output_tile.max_splits == 0) return 0x7fffffff;
  int32_t used = 0;
  for (int32_t i = 0; i < output_tile.num_ranges; ++i) used += ranges(i).empty() ? 0 : 1;
  return used == 0 ? output_tile.max_splits : output_tile.max_splits / used;
}

/// The runs of a span in at most `max_splits` splits: the rule's, or where those are more, that many equal ones.
template <typename Visit>
FOLIO_HOST_DEVICE constexpr void for_each_split_run(const SplitRule& rule, const KvSpan& span, int32_t max_splits,
                                                    const Visit& visit) {
  const bool bounded = max_splits < 0x7fffffff && count_splits(rule, span) > max_splits;
  if (bounded) {
    visit(SplitRunOf<int64_t>{0, span.kv_tiles, max_splits});
  } else {
    for_each_split_run(rule, span, visit);
  }
}

/// Number of KV splits of an output tile. 1: it is not split, and one claim covers all its ranges. More: each split
/// is one work tile, within one range, and at fixed splits within one fixed split.
template <typename Ranges>
FOLIO_HOST_DEVICE constexpr int32_t count_kv_splits(const SplitRule& rule, const OutputTile& output_tile,
                                                    const Ranges& ranges) {
  if (output_tile.kv_tiles < 2 * rule.min_split_tiles) return 1;
  if (!needs_split(rule, output_tile.begin, output_tile.kv_tiles * output_tile.tile_cost)) return 1;
  const int32_t most = max_range_splits(output_tile, ranges);
  if (most == 0) return 1;
  int32_t splits = 0;
  int64_t before = 0;
  for (int32_t i = 0; i < output_tile.num_ranges; ++i) {
    const TokenRange range = ranges(i);
    if (range.empty()) continue;
    const int64_t tiles = tiles_touched(range, output_tile.kv_tokens);
    const int32_t by_rule =
        output_tile.split_tokens > 0
            ? static_cast<int32_t>(tiles_touched(range, output_tile.split_tokens))
            : count_splits(rule, {output_tile.begin + before * output_tile.tile_cost, tiles, output_tile.tile_cost});
    splits += by_rule < most ? by_rule : most;
    before += tiles;
  }
  return splits;
}

/// Fixed split `index` of an output tile: a KV split, or a work tile of one that is not split.
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

/// KV split `index` of an output tile that is split.
template <typename Ranges>
FOLIO_HOST_DEVICE constexpr KvSplit kv_split_at(const SplitRule& rule, const OutputTile& output_tile,
                                                const Ranges& ranges, int32_t index) {
  if (output_tile.split_tokens > 0) return fixed_split_at(output_tile, ranges, index);
  const int64_t width = output_tile.kv_tokens;
  const int32_t most = max_range_splits(output_tile, ranges);
  int64_t before = 0;
  for (int32_t i = 0; i < output_tile.num_ranges; ++i) {
    const TokenRange range = ranges(i);
    if (range.empty()) continue;
    const int64_t tiles = tiles_touched(range, width);
    const KvSpan span{output_tile.begin + before * output_tile.tile_cost, tiles, output_tile.tile_cost};
    const int32_t by_rule = count_splits(rule, span);
    const int32_t num_splits = by_rule < most ? by_rule : most;
    if (index < num_splits) {
      const TokenRange split = by_rule > most
                                   ? TokenRange{narrow_div(tiles * index, most), narrow_div(tiles * (index + 1), most)}
                                   : split_of(rule, span, index);
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

/// Calls visit(KvSplit) for every KV split of an output tile that is split, in order. It costs little more than one
/// kv_split_at.
template <typename Ranges, typename Visit>
constexpr void for_each_kv_split(const SplitRule& rule, const OutputTile& output_tile, const Ranges& ranges,
                                 const Visit& visit) {
  const int64_t width = output_tile.kv_tokens;
  const int32_t most = max_range_splits(output_tile, ranges);
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
    for_each_split_run(rule, span, most, [&](const SplitRunOf<int64_t>& run) {
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

/// Work tile `index` of an output tile that is not split: one per range, or one per fixed split.
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
