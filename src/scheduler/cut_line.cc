#include "scheduler/cut_line.hpp"

#include <algorithm>

namespace folio::inline v0::scheduler {
namespace {

class TileSpaceCutter {
 public:
  TileSpaceCutter(const SchedulerConfig& config, const TileSpace& space, PlanStorage::Arrays& arrays)
      : config_(config),
        space_(space),
        arrays_(arrays),
        fixed_splits_(config.determinism >= Determinism::kBatchInvariant),
        budget_(fixed_split_budget(config)) {}

  void cut() {
    TileCoord* cuts = arrays_.cuts.resize(int64_t{config_.num_workers} + 1);
    cuts[0] = TileCoord{};
    cuts[config_.num_workers] = end_of_space();
    Cut previous;
    // ideal_cut(space_, w) without a division each: its whole split and what is left over, step by step.
    const int64_t step = space_.total / space_.num_workers;
    const int64_t step_left = space_.total % space_.num_workers;
    int64_t ideal = 0;
    int64_t left = 0;
    for (int32_t w = 1; w < config_.num_workers; ++w) {
      ideal += step;
      left += step_left;
      if (left >= space_.num_workers) {
        left -= space_.num_workers;
        ++ideal;
      }
      if (ideal >= space_.total) {
        cuts[w] = end_of_space();
        continue;
      }
      TileCoord place = find(ideal);
      const CutChoices choices = choices_at(place);
      const Cut chosen = choose_cut(space_, w, previous, choices);
      // The previous cut, which may be chosen again, lies in this output tile, at its end, or before it.
      if (chosen.position == choices.output_end) {
        place = next_output_tile(place);
      } else {
        if (chosen.position != choices.output_begin) pay(place);
        // Most stay where the ideal place is, or go one KV tile on: nothing to divide.
        const int64_t in_output_tile = chosen.position - choices.output_begin;
        const RowTile& tile = arrays_.tiles[place.tile];
        if (in_output_tile == tile.offset_of(place.kv_tile + 1)) {
          ++place.kv_tile;
        } else if (in_output_tile != tile.offset_of(place.kv_tile)) {
          place.kv_tile = tile.kv_tile_at(in_output_tile);
        }
      }
      TileCoord& cut = cuts[w];  // value by value: a wide read of what was just written narrowly would have to wait
      cut.output_tile = place.output_tile;
      cut.kv_tile = place.kv_tile;
      cut.block = place.block;
      cut.head = place.head;
      cut.tile = place.tile;
      previous = chosen;
    }
  }

 private:
  TileCoord end_of_space() const {
    const int64_t blocks = arrays_.blocks.size();
    TileCoord end{};
    end.block = static_cast<int32_t>(blocks);
    end.tile = static_cast<int32_t>(arrays_.tiles.size());
    if (blocks > 0) {
      const Block& last = arrays_.blocks[blocks - 1];
      end.output_tile = last.output_tile(config_.num_kv_heads, last.tile_begin);
    }
    return end;
  }

  /// The output tile that contains `position`, which is before the tile space's end. Positions come in ascending order.
  TileCoord find(int64_t position) {
    while (position >= arrays_.blocks[block_].space_begin + arrays_.blocks[block_].head_cost * config_.num_kv_heads)
      ++block_;
    const Block& block = arrays_.blocks[block_];
    const int64_t in_block = position - block.space_begin;
    const int64_t head = quotient(in_block, block.head_cost);
    const int64_t in_head = in_block - head * block.head_cost;
    TileCoord place{};
    place.block = block_;
    place.head = static_cast<int32_t>(head);
    place.tile = block.tile_end - block.tile_begin == 1 ? block.tile_begin : tile_at(block, in_head);
    place.output_tile = block.output_tile(place.head, place.tile);
    const RowTile& tile = arrays_.tiles[place.tile];
    place.kv_tile = tile.kv_tile_at(in_head - tile.block_offset);
    return place;
  }

  /// The last row tile that begins at or before an offset in a head: one without work shares its successor's.
  int32_t tile_at(const Block& block, int64_t in_head) const {
    const RowTile* const tiles = arrays_.tiles.data();
    const RowTile* after =
        std::upper_bound(tiles + block.tile_begin, tiles + block.tile_end, in_head,
                         [](int64_t offset, const RowTile& tile) { return offset < tile.block_offset; });
    return static_cast<int32_t>(after - 1 - tiles);
  }

  TileCoord next_output_tile(TileCoord place) const {
    const Block& block = arrays_.blocks[place.block];
    ++place.output_tile;
    place.kv_tile = 0;
    if (++place.tile < block.tile_end) return place;
    if (++place.head < config_.num_kv_heads) {
      place.tile = block.tile_begin;
    } else {
      place.head = 0;
      ++place.block;  // whose first row tile is this block's end
    }
    return place;
  }

  CutChoices choices_at(const TileCoord& place) const {
    const Block& block = arrays_.blocks[place.block];
    const RowTile& tile = arrays_.tiles[place.tile];
    CutChoices choices;
    choices.output_begin = block.space_begin + place.head * block.head_cost + tile.block_offset;
    choices.output_end = choices.output_begin + tile.cost();
    choices.divisible = tile.divisible;
    int64_t below = place.kv_tile;
    int64_t above = place.kv_tile + 1;
    if (fixed_splits_) {
      split_around(tile, place.kv_tile, below, above);
      choices.divisible = choices.divisible && (is_cut(place) || price(tile, place.kv_tile) <= budget_);
    }
    choices.below = choices.output_begin + tile.offset_of(below);
    choices.above = choices.output_begin + tile.offset_of(above);
    return choices;
  }

  /// The bounds, in KV tiles from the output tile's begin, of the fixed split that contains a KV tile.
  void split_around(const RowTile& tile, int64_t kv_tile, int64_t& below, int64_t& above) const {
    const int64_t split = config_.fixed_split_tokens / config_.tile.kv_tokens;
    int64_t before = 0;  // KV tiles of earlier ranges
    for (int32_t i = tile.range_begin; i < tile.range_end; ++i) {
      const KeyRange& range = arrays_.ranges[i];
      const int64_t first = range.begin / config_.tile.kv_tokens;
      const int64_t count = std::max<int64_t>(1, tiles_touched({range.begin, range.end}, config_.tile.kv_tokens));
      if (kv_tile < before + count) {
        const int64_t absolute = first + kv_tile - before;
        below = before + std::max<int64_t>(0, absolute / split * split - first);
        above = before + std::min(count, (absolute / split + 1) * split - first);
        return;
      }
      before += count;
    }
  }

  /// Partial rows that a first cut near `kv_tile` makes at most: the prefix's and one result for each later split.
  int64_t price(const RowTile& tile, int64_t kv_tile) const {
    int64_t later_splits = 0;
    int64_t before = 0;
    for (int32_t i = tile.range_begin; i < tile.range_end; ++i) {
      const KeyRange& range = arrays_.ranges[i];
      const int64_t count = tiles_touched({range.begin, range.end}, config_.tile.kv_tokens);
      if (kv_tile < before + count) {
        const int64_t skipped = std::max<int64_t>(0, kv_tile - before) * config_.tile.kv_tokens;
        later_splits += tiles_touched({range.begin + skipped, range.end}, config_.fixed_split_tokens);
      }
      before += count;
    }
    return (later_splits + 1) * (tile.row_end - tile.row_begin);
  }

  bool is_cut(const TileCoord& place) const { return place.output_tile == paid_output_tile_; }

  void pay(const TileCoord& place) {
    if (!fixed_splits_ || is_cut(place)) return;
    budget_ -= price(arrays_.tiles[place.tile], place.kv_tile);
    paid_output_tile_ = place.output_tile;
  }

  const SchedulerConfig& config_;
  const TileSpace& space_;
  PlanStorage::Arrays& arrays_;
  const bool fixed_splits_;
  int64_t budget_;
  int32_t block_ = 0;
  int64_t paid_output_tile_ = -1;
};

}  // namespace

int64_t fixed_split_budget(const SchedulerConfig& config) {
  // Enough for decode requests of a hundred splits on every worker (8 rows and more), and for 16 splits of full row
  // tiles.
  return config.num_workers * std::max<int64_t>(int64_t{16} * config.tile.rows, 1024);
}

void cut_tile_space(const SchedulerConfig& config, const TileSpace& space, PlanStorage::Arrays& arrays) {
  TileSpaceCutter(config, space, arrays).cut();
}

}  // namespace folio::inline v0::scheduler
