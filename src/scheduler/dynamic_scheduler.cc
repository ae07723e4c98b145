#include "scheduler/dynamic_scheduler.hpp"

#include <algorithm>
#include <limits>

#include "core/error.hpp"
#include "scheduler/combine_tiles.hpp"
#include "scheduler/plan_storage.hpp"
#include "scheduler/static_scheduler.hpp"

namespace folio::inline v0::scheduler {

namespace {

constexpr int64_t kMax = std::numeric_limits<int32_t>::max();

/// Puts the blocks into LPT order: Arrays::block_order. Returns the longest last row tile. O(blocks).
LongestTile lpt_order(PlanStorage::Arrays& arrays) {
  const int64_t count = arrays.blocks.size();
  const auto last_tile = [&arrays](int64_t b) -> const RowTile& { return arrays.tiles[arrays.blocks[b].tile_end - 1]; };
  LongestTile longest;
  for (int64_t b = 0; b < count; ++b) {
    longest = longer(longest, {last_tile(b).cost(), last_tile(b).num_kv_tiles});
  }
  const int32_t octave = half_octave(longest.cost);
  const auto class_of = [&](int64_t b) { return cost_class(half_octave(last_tile(b).cost()), octave); };
  ClassCounts next;  // first counts, then the place of each class's next block
  for (int64_t b = 0; b < count; ++b) ++next.of[class_of(b)];
  int32_t before = 0;
  for (int32_t& of : next.of) {
    const int32_t here = of;
    of = before;
    before += here;
  }
  int32_t* const order = arrays.block_order.resize(count);
  for (int64_t b = 0; b < count; ++b) order[next.of[class_of(b)]++] = static_cast<int32_t>(b);
  return longest;
}

/// Visits every row tile that has work, in claim order: visit(block, index of the row tile).
template <typename Visit>
void for_each_row_tile(const PlanStorage::Arrays& arrays, TileOrder order, const Visit& visit) {
  const int64_t count = arrays.blocks.size();
  if (order == TileOrder::kRequestOrder) {
    for (int64_t b = 0; b < count; ++b) {
      const Block& block = arrays.blocks[b];
      for (int32_t t = block.tile_begin; t < block.tile_end; ++t) {
        if (arrays.tiles[t].num_kv_tiles > 0) visit(block, t);
      }
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const Block& block = arrays.blocks[arrays.block_order[i]];
    for (int32_t t = block.tile_end - 1; t >= block.tile_begin; --t) {
      if (arrays.tiles[t].num_kv_tiles > 0) visit(block, t);
    }
  }
}

/// KV heads of one claim: SchedulerConfig::heads_together, as many as have room in a work tile, if heads would be
/// divided over workers otherwise: because there are few row tiles, or because one of them is longer than half a
/// worker's share. (With more row tiles, claims of some heads balance better.)
int32_t claimed_heads(const SchedulerConfig& config, const TileSpaceTotals& totals, const PlanStorage::Arrays& arrays) {
  const int64_t count = arrays.tiles.size();
  if (config.heads_together == 1) return 1;
  int32_t rows = 1;
  int64_t longest = 0;
  for (int64_t t = 0; t < count; ++t) {
    const RowTile& tile = arrays.tiles[t];
    rows = std::max(rows, tile.row_end - tile.row_begin);
    longest = std::max(longest, tile.divisible ? tile.cost() : 0);
  }
  const bool few = 2 * count <= config.num_workers;
  if (!few && longest <= totals.space.total / config.num_workers / 2) return 1;
  return std::clamp(config.tile.rows / rows, 1, max_claimed_heads(config));
}

/// Orders, splits and emits the output tiles. All counts are of one KV head; heads differ only in order. All costs are
/// of the heads of one claim.
class DynamicScheduler {
 public:
  DynamicScheduler(const SchedulerConfig& config, const TileSpaceTotals& totals, PlanStorage::Arrays& arrays)
      : config_(config),
        arrays_(arrays),
        heads_(config.num_kv_heads),
        claimed_heads_(claimed_heads(config, totals, arrays)),
        order_(config.tile.order),
        fixed_splits_(config.determinism >= Determinism::kBatchInvariant),
        space_{.total = totals.space.total / config.num_kv_heads * claimed_heads_,
               .num_kv_heads = static_cast<int32_t>(ceil_div(config.num_kv_heads, claimed_heads_)),
               .num_workers = config.num_workers,
               .min_split_tiles = ceil_div(config.min_split_tokens, config.tile.kv_tokens),
               .min_tile_cost = (int64_t{config.tile_cost} + config.row_cost) * claimed_heads_} {}

  void schedule(int64_t num_output_tiles) {
    arrays_.combine_tiles.clear();
    arrays_.combine_sources.clear();
    arrays_.partials.clear();
    if (arrays_.shared.size() > 0) arrays_.output_partials.resize(num_output_tiles);
    choose_rule();
    count();
    const int64_t num_work_tiles = heads_ * (dynamic_tiles_ + continuations_);
    if (num_work_tiles > kMax || heads_ * partial_rows_ > kMax) {
      core::fail(ErrorCode::kInvalidArgument, "the batch needs ", num_work_tiles, " work tiles and ",
                 heads_ * partial_rows_, " partial rows; a plan has at most 2^31 - 1 of each");
    }
    work_tiles_ = arrays_.work_tiles.resize(num_work_tiles);
    next_continuation_ = heads_ * dynamic_tiles_;
    all_dynamic_tiles_ = dynamic_tiles_;
    dynamic_tiles_ = partial_rows_ = space_begin_ = 0;
    for_each_row_tile(arrays_, order_, [this](const Block& block, int32_t t) { emit(block, t); });
    if (arrays_.shared.size() > 0) combine_shared(config_, arrays_);
    PlanView& view = arrays_.view;
    view.num_work_tiles = static_cast<int32_t>(num_work_tiles);
    view.num_dynamic_tiles = static_cast<int32_t>(heads_ * all_dynamic_tiles_);
    view.num_combine_tiles = static_cast<int32_t>(arrays_.combine_tiles.size());
    view.num_partial_rows = static_cast<int32_t>(heads_ * partial_rows_);
    view.claimed_heads = claimed_heads_;
    view.work_cost = heads_ * (space_.total / claimed_heads_);
    view.work_tiles = work_tiles_;
    view.combine_tiles = arrays_.combine_tiles.data();
    view.combine_sources = arrays_.combine_sources.data();
  }

 private:
  /// The ranges of a row tile, in the form that split_rule.hpp takes.
  auto ranges_of(const RowTile& tile) const {
    return [this, &tile](int32_t i) {
      const KeyRange& range = arrays_.ranges[tile.range_begin + i];
      return TokenRange{range.begin, range.end};
    };
  }

  int64_t cost_of(const RowTile& tile) const { return tile.cost() * claimed_heads_; }

  /// The output tile, in one claim's tile space, of the next row tile in claim order.
  OutputTile output_tile_of(const RowTile& tile) const {
    return {.begin = space_begin_,
            .kv_tiles = tile.num_kv_tiles,
            .tile_cost = tile.kv_tile_cost * claimed_heads_,
            .kv_tokens = config_.tile.kv_tokens,
            .split_tokens = fixed_splits_ ? config_.fixed_split_tokens : 0,
            .num_ranges = tile.range_end - tile.range_begin,
            .max_splits = config_.max_splits};
  }

  /// Work tiles of a row tile that is not split.
  int32_t unsplit_tiles(const RowTile& tile) const {
    if (!fixed_splits_) return tile.range_end - tile.range_begin;
    int64_t work_tiles = 0;
    for (int32_t i = tile.range_begin; i < tile.range_end; ++i) {
      const KeyRange& range = arrays_.ranges[i];
      work_tiles += range.begin == range.end ? 1 : tiles_touched({range.begin, range.end}, config_.fixed_split_tokens);
    }
    return static_cast<int32_t>(work_tiles);
  }

  void choose_rule() {
    if (order_ == TileOrder::kRequestOrder) {
      rule_ = split_rule(space_, is_short(space_) ? try_splits() : TrialSplits{});
      rule_.swizzle_heads = heads_;
      return;
    }
    LongestTile longest = lpt_order(arrays_);
    longest.cost *= claimed_heads_;
    const Waves waves = find_waves();
    const bool even = ends_evenly(space_, waves);
    rule_ = !even && config_.uneven_workers && !is_short(space_)
                ? factoring_rule(space_)
                : lpt_rule(space_, waves, even ? TrialSplits{} : try_splits());
    const int32_t swizzle = choose_swizzle_heads(space_, longest, config_.l2_swizzle_tokens / config_.tile.kv_tokens);
    rule_.swizzle_heads = std::min(heads_, swizzle * claimed_heads_);
  }

  Waves find_waves() const {
    Waves waves;
    int32_t wave = 0;
    int64_t place = 0;
    for_each_row_tile(arrays_, order_, [&](const Block&, int32_t t) {
      while (wave < kMaxWaves && first_of_wave(space_, wave) == place) waves.cost[wave++] = cost_of(arrays_.tiles[t]);
      ++place;
    });
    return waves;
  }

  /// Number of KV splits of the batch at each trial size.
  TrialSplits try_splits() const {
    TrialSplits trials;
    for (int32_t i = 0; i < kSplitTrials; ++i) {
      const int64_t split_cost = trial_split_cost(space_, i);
      int64_t splits = 0;
      for (int64_t t = 0; t < arrays_.tiles.size(); ++t) {
        const RowTile& tile = arrays_.tiles[t];
        splits += tile.num_kv_tiles == 0 ? 0
                                         : trial_splits(split_cost, space_.min_split_tiles, tile.num_kv_tiles,
                                                        tile.kv_tile_cost * claimed_heads_);
      }
      trials.of[i] = static_cast<int32_t>(std::min(splits, kMax));
    }
    return trials;
  }

  /// Counts every row tile's KV splits and what they need in total.
  void count() {
    int32_t* const splits = arrays_.tile_splits.resize(arrays_.tiles.size());
    // A claim has no more rows than a work tile: so many splits are as many rows as the budget's.
    const int64_t budget = split_budget(config_) * (fixed_splits_ ? 1 : claimed_heads_) / heads_;
    int64_t spent = 0;
    for_each_row_tile(arrays_, order_, [&](const Block&, int32_t t) {
      const RowTile& tile = arrays_.tiles[t];
      splits[t] = tile.divisible ? count_kv_splits(rule_, output_tile_of(tile), ranges_of(tile)) : 1;
      if (splits[t] > 1) spent += fixed_splits_ ? int64_t{splits[t]} * (tile.row_end - tile.row_begin) : splits[t];
      if (splits[t] > 1 && spent > budget) splits[t] = 1;
      dynamic_tiles_ += splits[t];
      if (splits[t] == 1) continuations_ += unsplit_tiles(tile) - 1;
      if (splits[t] > 1 || tile.to_partial) partial_rows_ += int64_t{splits[t]} * (tile.row_end - tile.row_begin);
      space_begin_ += cost_of(tile);
    });
  }

  /// Calls visit(index, head) for every KV head, with the index of the work tile of the next row tile's KV split
  /// `split`.
  template <typename Visit>
  void for_each_head(int32_t split, const Visit& visit) const {
    const int32_t together = rule_.swizzle_heads;
    for (int32_t first = 0; first < heads_; first += together) {
      const int32_t count = std::min(together, heads_ - first);
      const int64_t dynamic_tile = first * all_dynamic_tiles_ + (dynamic_tiles_ + split) * count;
      for (int32_t i = 0; i < count; ++i) visit(dynamic_tile + i, first + i);
    }
  }

  /// The work tiles of one row tile, split by split. The KV heads of a swizzle group are neighbours.
  void emit(const Block& block, int32_t t) {
    const RowTile& tile = arrays_.tiles[t];
    const int32_t splits = arrays_.tile_splits[t];
    const bool partial = splits > 1 || tile.to_partial;
    if (!partial && !fixed_splits_ && tile.range_end - tile.range_begin == 1) {
      emit_one_work_tile(tile);
      return;
    }
    const OutputTile output_tile = output_tile_of(tile);
    const auto ranges = ranges_of(tile);
    if (splits == 1) {
      emit_unsplit(tile, output_tile, ranges, partial);
    } else {
      int32_t i = 0;
      for_each_kv_split(rule_, output_tile, ranges, [&](const KvSplit& split) {
        const WorkTileWriter work_tile = work_tile_of(tile, split, kStart | kFinish);
        const int32_t first = partial_row(tile, splits, 0, i);
        const int32_t head_stride = partial_row(tile, splits, 1, i) - first;
        for_each_head(i++, [&](int64_t dynamic_tile, int32_t head) {
          work_tile.write(work_tiles_ + dynamic_tile, head, first + head * head_stride);
        });
      });
    }
    if (partial) record_partials(block, t, splits);
    dynamic_tiles_ += splits;
    space_begin_ += cost_of(tile);
    if (partial) partial_rows_ += int64_t{splits} * (tile.row_end - tile.row_begin);
  }

  /// The common case: one work tile per KV head.
  void emit_one_work_tile(const RowTile& tile) {
    const KeyRange& range = arrays_.ranges[tile.range_begin];
    const WorkTileWriter work_tile = work_tile_of(tile, {0, {range.begin, range.end}}, kStart | kFinish);
    for_each_head(0, [&](int64_t dynamic_tile, int32_t head) { work_tile.write(work_tiles_ + dynamic_tile, head); });
    ++dynamic_tiles_;
    space_begin_ += cost_of(tile);
  }

  template <typename Ranges>
  void emit_unsplit(const RowTile& tile, const OutputTile& output_tile, const Ranges& ranges, bool partial) {
    const int32_t count = unsplit_tiles(tile);
    const bool nothing_visible = arrays_.ranges[tile.range_begin].begin == arrays_.ranges[tile.range_begin].end;
    for (int32_t k = 0; k < count; ++k) {
      const KvSplit split = nothing_visible ? KvSplit{} : unsplit_tile_at(output_tile, ranges, k);
      const bool last = k + 1 == count;
      const WorkTileWriter work_tile = work_tile_of(tile, split, (k == 0 ? kStart : 0u) | (last ? kFinish : 0u));
      for_each_head(0, [&](int64_t dynamic_tile, int32_t head) {
        // Continuations lie behind all dynamic tiles, those of one dynamic tile after those of the other.
        const int64_t continuation = next_continuation_ + int64_t{head} * (count - 1) + k - 1;
        const int32_t at_end = partial ? partial_row(tile, 1, head, 0) : -1;
        work_tile.write(work_tiles_ + (k == 0 ? dynamic_tile : continuation), head,
                        last ? at_end : static_cast<int32_t>(continuation + 1));
      });
    }
    next_continuation_ += int64_t{heads_} * (count - 1);
  }

  /// Partial rows are numbered by row tile, then head, then KV split.
  int32_t partial_row(const RowTile& tile, int32_t splits, int32_t head, int32_t split) const {
    return static_cast<int32_t>(partial_rows_ * heads_ +
                                (int64_t{head} * splits + split) * (tile.row_end - tile.row_begin));
  }

  /// Combines a row tile's splits, or lists them for combine_shared.
  void record_partials(const Block& block, int32_t t, int32_t splits) {
    const RowTile& tile = arrays_.tiles[t];
    for (int32_t head = 0; head < heads_; ++head) {
      GrowBuffer<int32_t>& list = tile.to_partial ? arrays_.partials : arrays_.combine_sources;
      const int64_t begin = list.size();
      for (int32_t i = 0; i < splits; ++i) list.push_back(partial_row(tile, splits, head, i));
      if (tile.to_partial) {
        arrays_.output_partials[block.output_tile(head, t)] = {begin, list.size()};
      } else {
        arrays_.combine_tiles.push_back({.kv_head = head,
                                         .request = tile.request,
                                         .row_begin = tile.row_begin,
                                         .row_end = tile.row_end,
                                         .source_begin = static_cast<int32_t>(begin),
                                         .source_end = static_cast<int32_t>(list.size())});
      }
    }
  }

  /// A work tile of a row tile, to be written for each KV head.
  WorkTileWriter work_tile_of(const RowTile& tile, const KvSplit& split, uint32_t flags) const {
    const KeyRange& range = arrays_.ranges[tile.range_begin + split.range];
    return WorkTileWriter({.segment = range.segment,
                           .kv_row = range.kv_row,
                           .kv_head = 0,
                           .request = tile.request,
                           .row_begin = tile.row_begin,
                           .row_end = tile.row_end,
                           .kv_begin = static_cast<int32_t>(split.keys.begin),
                           .kv_end = static_cast<int32_t>(split.keys.end),
                           .partial = -1,
                           .flags = flags | (fixed_splits_ ? kFold : 0u),
                           .combine_tile = -1});
  }

  const SchedulerConfig& config_;
  PlanStorage::Arrays& arrays_;
  const int32_t heads_;
  const int32_t claimed_heads_;
  const TileOrder order_;
  const bool fixed_splits_;
  const HeadTileSpace space_;
  SplitRule rule_;
  WorkTile* work_tiles_ = nullptr;
  int64_t next_continuation_ = 0;
  int64_t space_begin_ = 0;        ///< cost of the earlier row tiles
  int64_t all_dynamic_tiles_ = 0;  ///< per KV head, as the next three
  int64_t dynamic_tiles_ = 0;
  int64_t continuations_ = 0;
  int64_t partial_rows_ = 0;
};

}  // namespace

int64_t split_budget(const SchedulerConfig& config) {
  if (config.determinism >= Determinism::kBatchInvariant) return fixed_split_budget(config);
  // The rule makes at most two splits a worker in each of four split waves, and rarely half as many. For uneven workers
  // it is the one below, from a batch's largest row tile on: 0.8 a worker and wave, 1.6 in the last of seven.
  if (config.tile.order == TileOrder::kLpt) return int64_t{config.uneven_workers ? 10 : 6} * config.num_workers;
  // The rule makes two or three splits a worker of the bulk, and one or two per later split wave.
  return int64_t{16} * config.num_workers;
}

int32_t max_claimed_heads(const SchedulerConfig& config) {
  return std::min(config.heads_together, config.num_kv_heads);
}

void schedule_dynamic(const SchedulerConfig& config, const TileSpaceTotals& totals, PlanStorage::Arrays& arrays) {
  DynamicScheduler(config, totals, arrays).schedule(totals.num_output_tiles);
}

}  // namespace folio::inline v0::scheduler
