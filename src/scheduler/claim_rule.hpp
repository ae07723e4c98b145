#pragma once

#include <cstdint>

#include "folio/types/export.hpp"
#include "scheduler/divisor32.hpp"
#include "scheduler/partition_rule.hpp"

/// How finely work is cut that workers claim split by split (Schedule::kDynamic). Pure functions of integers, which the
/// host's scheduler and the device's both run.
///
/// The work stands in one line, a KV head's worth of it (all heads have the same), in order of claiming. It is cut in
/// split waves, each of half of what is left, in splits of about half a worker's share of that ("factoring": Hummel,
/// Schonberg and Flynn, 1992). Units that are no longer stay whole. So workers that differ in speed end at about the
/// same time, and the number of splits grows with the workers and the logarithm of the work, not with the work. Where a
/// worker's share is short, what a second split costs to begin is more than any balance gains: then every worker gets
/// one split, if equal splits can be had.
namespace folio::inline v0::scheduler {

/// Work from the tile space's last boundary up to `end`, in splits of up to `split`: cost of one KV head.
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
  DivisorOf<Int> min_split_tiles = 1;  ///< KV tiles of a split at least, unless there are no more
  int32_t swizzle_heads = 1;           ///< KV heads whose claims of the same keys are neighbours
};

/// What the rule depends on.
template <typename Int>
struct HeadTileSpaceOf {
  Int total = 0;  ///< cost of one KV head's work
  int32_t num_kv_heads = 1;
  DivisorOf<Int> num_workers = 1;
  DivisorOf<Int> min_split_tiles = 1;  ///< KV tiles that are worth a split of their own
  Int min_tile_cost = 1;               ///< cost of the cheapest KV tile
  FOLIO_HOST_DEVICE constexpr Int min_split_cost() const { return min_split_tiles * min_tile_cost; }
  /// A worker's share of what is left from `begin` on.
  FOLIO_HOST_DEVICE constexpr Int share(Int begin) const {
    return (total - begin) * static_cast<Int>(num_kv_heads) / num_workers;
  }
};

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

/// Whether split wave `index`, which all before it leave something to, is the last.
template <typename Int>
FOLIO_HOST_DEVICE constexpr bool is_last_split_wave(const HeadTileSpaceOf<Int>& space, int32_t index) {
  return index + 1 == kMaxSplitWaves || half_share(space, index) <= space.min_split_cost();
}

template <typename Int>
FOLIO_HOST_DEVICE constexpr SplitWaveOf<Int> split_wave(const HeadTileSpaceOf<Int>& space, int32_t index) {
  const Int split_cost = half_share(space, index);
  const Int least = space.min_split_cost();
  const Int end = is_last_split_wave(space, index) ? space.total : space.total - (space.total >> index) / 2;
  // A quarter more: what is a little longer than a split is not worth two of little more than half.
  return {end, split_cost < least ? least : split_cost + split_cost / 4};
}

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

/// Sizes that are tried for one equal split a worker: sixteenths of a worker's share.
inline constexpr int32_t kSplitTrials = 5;

/// Whether one split a worker is to be tried at all.
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

/// Splits of a unit at one trial, whatever its ranges are.
template <typename Int>
FOLIO_HOST_DEVICE constexpr Int trial_splits(const DivisorOf<Int>& split_cost, const DivisorOf<Int>& min_split_tiles,
                                             Int kv_tiles, Int tile_cost) {
  const Int wanted = ceil_div(kv_tiles * tile_cost, split_cost);
  const Int max = kv_tiles / min_split_tiles;
  const Int splits = wanted < max ? wanted : max;
  return splits < 1 ? 1 : splits;
}

/// Splits that the whole batch makes of one KV head's work, for each trial.
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

/// The rule, given what the trials came to; they are not looked at where the tile space is not short.
template <typename Int>
FOLIO_HOST_DEVICE constexpr SplitRuleOf<Int> split_rule(const HeadTileSpaceOf<Int>& space, const TrialSplits& trials) {
  if (is_short(space)) {
    for (int32_t i = 0; i < kSplitTrials; ++i) {
      if (int64_t{trials.of[i]} * space.num_kv_heads <= space.num_workers) return trial_rule(space, i);
    }
  }
  return factoring_rule(space);
}

/// A row tile's keys in one segment, or all of its keys, in the tile space.
template <typename Int>
struct KvSpanOf {
  Int begin = 0;     ///< place in the tile space
  Int kv_tiles = 0;  ///< at least 1
  DivisorOf<Int> tile_cost = 1;
};

/// Zeros in front of a number's leading bit.
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

/// The split wave that a place of the tile space is in. Every split wave leaves half, rounded down, of what it finds:
/// split wave r lies where at most total >> r is left, but more than total >> (r + 1).
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

/// Whether a unit of this cost, which begins at `place`, is to be cut at all.
template <typename Int>
FOLIO_HOST_DEVICE constexpr bool needs_split(const SplitRuleOf<Int>& rule, Int place, Int cost) {
  return cost > rule.split_waves[split_wave_at(rule, place)].split_cost;
}

/// Some neighbouring splits of a span, of about the same size: those of one split wave.
template <typename Int>
struct SplitRunOf {
  Int begin = 0;  ///< KV tiles of the span
  Int end = 0;
  int32_t num_splits = 0;
};

/// Calls visit(SplitRunOf) for the split waves that a span that is to be cut lies in, in order.
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
      // A remnant of less than half a split is not worth one.
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

/// How many splits a span that is to be cut makes.
template <typename Int>
FOLIO_HOST_DEVICE constexpr int32_t count_splits(const SplitRuleOf<Int>& rule, const KvSpanOf<Int>& span) {
  int32_t count = 0;
  for_each_split_run(rule, span, [&count](const SplitRunOf<Int>& run) { count += run.num_splits; });
  return count;
}

/// KV tiles of split number `index` of a span that is to be cut.
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

}  // namespace folio::inline v0::scheduler
