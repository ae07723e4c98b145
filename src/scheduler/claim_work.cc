#include "scheduler/claim_work.hpp"

#include <algorithm>
#include <limits>

#include "core/error.hpp"
#include "scheduler/claim_parts.hpp"
#include "scheduler/cut_line.hpp"
#include "scheduler/item_heads.hpp"
#include "scheduler/merge_shared.hpp"
#include "scheduler/order_claims.hpp"

namespace folio::inline v0::scheduler {
namespace {

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();

class Claimer {
 public:
  Claimer(const SchedulerConfig& config, const LineTotals& totals, PlanStorage::Arrays& arrays)
      : config_(config),
        arrays_(arrays),
        heads_(config.num_kv_heads),
        order_(config.tile.order),
        fixed_splits_(config.determinism >= Determinism::kBatchInvariant),
        line_{.total = totals.line.total / config.num_kv_heads,
              .num_kv_heads = config.num_kv_heads,
              .num_workers = config.num_workers,
              .least_tiles = ceil_div(config.min_split_tokens, config.tile.kv_tokens),
              .least_tile_cost = int64_t{config.tile_cost} + config.row_cost} {}

  void claim(int64_t num_chains) {
    arrays_.merges.clear();
    arrays_.combine_sources.clear();
    arrays_.parts.clear();
    if (arrays_.shared.size() > 0) arrays_.chain_parts.resize(num_chains);
    choose_rule();
    count();
    const int64_t num_work_tiles = heads_ * (claims_ + followers_);
    if (num_work_tiles > kMost || heads_ * partial_rows_ > kMost) {
      core::fail(ErrorCode::kInvalidArgument, "the batch needs ", num_work_tiles, " work_tiles and ",
                 heads_ * partial_rows_, " partial rows; a plan has at most 2^31 - 1 of each");
    }
    items_ = arrays_.work_tiles.resize(num_work_tiles);
    next_follower_ = heads_ * claims_;
    all_claims_ = claims_;
    claims_ = partial_rows_ = line_begin_ = 0;
    for_each_claimed_tile(arrays_, order_, [this](const Block& block, int32_t t) { emit(block, t); });
    if (arrays_.shared.size() > 0) merge_shared(config_, arrays_);
    PlanView& view = arrays_.view;
    view.num_work_tiles = static_cast<int32_t>(num_work_tiles);
    view.num_dynamic_tiles = static_cast<int32_t>(heads_ * all_claims_);
    view.num_combine_tiles = static_cast<int32_t>(arrays_.merges.size());
    view.num_partial_rows = static_cast<int32_t>(heads_ * partial_rows_);
    view.work_tiles = items_;
    view.merges = arrays_.merges.data();
    view.combine_sources = arrays_.combine_sources.data();
  }

 private:
  /// The ranges of a row tile, as claim_parts.hpp asks for them.
  auto ranges_of(const RowTile& tile) const {
    return [this, &tile](int32_t i) {
      const KeyRange& range = arrays_.ranges[tile.range_begin + i];
      return TokenRange{range.begin, range.end};
    };
  }

  /// Of the row tile that comes next in the line.
  ClaimChain chain_of(const RowTile& tile) const {
    return {.begin = line_begin_,
            .kv_tiles = tile.num_kv_tiles,
            .tile_cost = tile.kv_tile_cost,
            .kv_tokens = config_.tile.kv_tokens,
            .split_tokens = fixed_splits_ ? config_.fixed_split_tokens : 0,
            .num_ranges = tile.range_end - tile.range_begin};
  }

  /// Items of a row tile that is not cut.
  int32_t whole_items(const RowTile& tile) const {
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
      rule_ = claim_rule(line_, is_short(line_) ? try_pieces() : TrialPieces{});
      rule_.heads_together = heads_;
      return;
    }
    const Dearest dearest = order_blocks(arrays_);
    const Waves waves = find_waves();
    rule_ = dearest_first_rule(line_, waves, ends_evenly(line_, waves) ? TrialPieces{} : try_pieces());
    rule_.heads_together = heads_of_section(line_, dearest, config_.l2_swizzle_tokens / config_.tile.kv_tokens);
  }

  Waves find_waves() const {
    Waves waves;
    int32_t wave = 0;
    int64_t place = 0;
    for_each_claimed_tile(arrays_, order_, [&](const Block&, int32_t t) {
      while (wave < kWavesLookedAt && first_of_wave(line_, wave) == place) waves.cost[wave++] = arrays_.tiles[t].cost();
      ++place;
    });
    return waves;
  }

  /// How many parts each size of pieces would make.
  TrialPieces try_pieces() const {
    TrialPieces trials;
    for (int32_t i = 0; i < kPieceTrials; ++i) {
      const int64_t piece = trial_piece(line_, i);
      int64_t parts = 0;
      for (int64_t t = 0; t < arrays_.tiles.size(); ++t) {
        const RowTile& tile = arrays_.tiles[t];
        parts +=
            tile.num_kv_tiles == 0 ? 0 : trial_parts(piece, line_.least_tiles, tile.num_kv_tiles, tile.kv_tile_cost);
      }
      trials.of[i] = static_cast<int32_t>(std::min(parts, kMost));
    }
    return trials;
  }

  /// Parts of every row tile, and how much of everything they make, per KV head.
  void count() {
    int32_t* const parts = arrays_.tile_parts.resize(arrays_.tiles.size());
    const int64_t budget = claim_budget(config_) / heads_;
    int64_t spent = 0;
    for_each_claimed_tile(arrays_, order_, [&](const Block&, int32_t t) {
      const RowTile& tile = arrays_.tiles[t];
      parts[t] = tile.divisible ? count_parts(rule_, chain_of(tile), ranges_of(tile)) : 1;
      if (parts[t] > 1) spent += fixed_splits_ ? int64_t{parts[t]} * (tile.row_end - tile.row_begin) : parts[t];
      if (parts[t] > 1 && spent > budget) parts[t] = 1;
      claims_ += parts[t];
      if (parts[t] == 1) followers_ += whole_items(tile) - 1;
      if (parts[t] > 1 || tile.to_partial) partial_rows_ += int64_t{parts[t]} * (tile.row_end - tile.row_begin);
      line_begin_ += tile.cost();
    });
  }

  /// Calls visit(claim, head) for every KV head: where the claim of its part number `part` of the next row tile stands.
  template <typename Visit>
  void for_each_head(int32_t part, const Visit& visit) const {
    const int32_t together = rule_.heads_together;
    for (int32_t first = 0; first < heads_; first += together) {
      const int32_t count = std::min(together, heads_ - first);
      const int64_t claim = first * all_claims_ + (claims_ + part) * count;
      for (int32_t i = 0; i < count; ++i) visit(claim + i, first + i);
    }
  }

  /// The claims of one row tile: part by part, all KV heads of a part side by side.
  void emit(const Block& block, int32_t t) {
    const RowTile& tile = arrays_.tiles[t];
    const int32_t parts = arrays_.tile_parts[t];
    const bool partial = parts > 1 || tile.to_partial;
    if (!partial && !fixed_splits_ && tile.range_end - tile.range_begin == 1) {
      emit_one_item(tile);
      return;
    }
    const ClaimChain chain = chain_of(tile);
    const auto ranges = ranges_of(tile);
    if (parts == 1) {
      emit_whole(tile, chain, ranges, partial);
    } else {
      int32_t i = 0;
      for_each_part(rule_, chain, ranges, [&](const ClaimPart& part) {
        const ItemForHeads item = item_of(tile, part, kStart | kFinish);
        const int32_t first = partial_row(tile, parts, 0, i);
        const int32_t a_head = partial_row(tile, parts, 1, i) - first;
        for_each_head(i++,
                      [&](int64_t claim, int32_t head) { item.write(items_ + claim, head, first + head * a_head); });
      });
    }
    if (partial) note_parts(block, t, parts);
    claims_ += parts;
    line_begin_ += tile.cost();
    if (partial) partial_rows_ += int64_t{parts} * (tile.row_end - tile.row_begin);
  }

  /// Most row tiles of most batches: one item a KV head.
  void emit_one_item(const RowTile& tile) {
    const KeyRange& range = arrays_.ranges[tile.range_begin];
    const ItemForHeads item = item_of(tile, {0, {range.begin, range.end}}, kStart | kFinish);
    for_each_head(0, [&](int64_t claim, int32_t head) { item.write(items_ + claim, head); });
    ++claims_;
    line_begin_ += tile.cost();
  }

  template <typename Ranges>
  void emit_whole(const RowTile& tile, const ClaimChain& chain, const Ranges& ranges, bool partial) {
    const int32_t count = whole_items(tile);
    const bool sees_nothing = arrays_.ranges[tile.range_begin].begin == arrays_.ranges[tile.range_begin].end;
    for (int32_t k = 0; k < count; ++k) {
      const ClaimPart part = sees_nothing ? ClaimPart{} : whole_item_at(chain, ranges, k);
      const bool last = k + 1 == count;
      const ItemForHeads item = item_of(tile, part, (k == 0 ? kStart : 0u) | (last ? kFinish : 0u));
      for_each_head(0, [&](int64_t claim, int32_t head) {
        // Those that follow a claim's first lie behind all claims, one claim's after the other's.
        const int64_t follower = next_follower_ + int64_t{head} * (count - 1) + k - 1;
        const int32_t at_end = partial ? partial_row(tile, 1, head, 0) : -1;
        item.write(items_ + (k == 0 ? claim : follower), head, last ? at_end : static_cast<int32_t>(follower + 1));
      });
    }
    next_follower_ += int64_t{heads_} * (count - 1);
  }

  /// Partial rows are numbered row tile by row tile, head by head, part by part.
  int32_t partial_row(const RowTile& tile, int32_t parts, int32_t head, int32_t part) const {
    return static_cast<int32_t>(partial_rows_ * heads_ +
                                (int64_t{head} * parts + part) * (tile.row_end - tile.row_begin));
  }

  /// Merges a row tile's parts, or notes them for the merge with a shared segment's.
  void note_parts(const Block& block, int32_t t, int32_t parts) {
    const RowTile& tile = arrays_.tiles[t];
    for (int32_t head = 0; head < heads_; ++head) {
      GrowBuffer<int32_t>& list = tile.to_partial ? arrays_.parts : arrays_.combine_sources;
      const int64_t begin = list.size();
      for (int32_t i = 0; i < parts; ++i) list.push_back(partial_row(tile, parts, head, i));
      if (tile.to_partial) {
        arrays_.chain_parts[block.chain(head, t)] = {begin, list.size()};
      } else {
        arrays_.merges.push_back({.kv_head = head,
                                  .request = tile.request,
                                  .row_begin = tile.row_begin,
                                  .row_end = tile.row_end,
                                  .source_begin = static_cast<int32_t>(begin),
                                  .source_end = static_cast<int32_t>(list.size())});
      }
    }
  }

  /// An item of a row tile, for all KV heads.
  ItemForHeads item_of(const RowTile& tile, const ClaimPart& part, uint32_t flags) const {
    const KeyRange& range = arrays_.ranges[tile.range_begin + part.range];
    return ItemForHeads({.segment = range.segment,
                         .kv_row = range.kv_row,
                         .kv_head = 0,
                         .request = tile.request,
                         .row_begin = tile.row_begin,
                         .row_end = tile.row_end,
                         .kv_begin = static_cast<int32_t>(part.keys.begin),
                         .kv_end = static_cast<int32_t>(part.keys.end),
                         .partial = -1,
                         .flags = flags | (fixed_splits_ ? kFold : 0u),
                         .merge = -1});
  }

  const SchedulerConfig& config_;
  PlanStorage::Arrays& arrays_;
  const int32_t heads_;
  const TileOrder order_;
  const bool fixed_splits_;
  const ClaimLine line_;
  ClaimRule rule_;
  WorkTile* items_ = nullptr;
  int64_t next_follower_ = 0;
  int64_t line_begin_ = 0;  ///< cost of the row tiles before
  int64_t all_claims_ = 0;  ///< per KV head, as the next three
  int64_t claims_ = 0;
  int64_t followers_ = 0;
  int64_t partial_rows_ = 0;
};

}  // namespace

int64_t claim_budget(const SchedulerConfig& config) {
  if (config.determinism >= Determinism::kBatchInvariant) return fixed_split_budget(config);
  // At most two pieces a worker in each of four rounds, seldom half as many.
  if (config.tile.order == TileOrder::kLpt) return int64_t{6} * config.num_workers;
  // The rule asks for two or three pieces a worker of the bulk and one or two a round of the rest.
  return int64_t{16} * config.num_workers;
}

void claim_work(const SchedulerConfig& config, const LineTotals& totals, PlanStorage::Arrays& arrays) {
  Claimer(config, totals, arrays).claim(totals.num_chains);
}

}  // namespace folio::inline v0::scheduler
