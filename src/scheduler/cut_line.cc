#include "scheduler/cut_line.hpp"

#include <algorithm>

namespace folio::inline v0::scheduler {
namespace {

class LineCutter {
 public:
  LineCutter(const SchedulerConfig& config, const WorkLine& line, PlanStorage::Arrays& arrays)
      : config_(config),
        line_(line),
        arrays_(arrays),
        fixed_splits_(config.determinism >= Determinism::kBatchInvariant),
        budget_(fixed_split_budget(config)) {}

  void cut() {
    LinePlace* cuts = arrays_.cuts.resize(int64_t{config_.num_workers} + 1);
    cuts[0] = LinePlace{};
    cuts[config_.num_workers] = end_of_line();
    Cut previous;
    // ideal_cut(line_, w) without a division each: its whole part and what is left over, step by step.
    const int64_t step = line_.total / line_.num_workers;
    const int64_t step_left = line_.total % line_.num_workers;
    int64_t ideal = 0;
    int64_t left = 0;
    for (int32_t w = 1; w < config_.num_workers; ++w) {
      ideal += step;
      left += step_left;
      if (left >= line_.num_workers) {
        left -= line_.num_workers;
        ++ideal;
      }
      if (ideal >= line_.total) {
        cuts[w] = end_of_line();
        continue;
      }
      LinePlace place = find(ideal);
      const CutChoices choices = choices_at(place);
      const Cut chosen = choose_cut(line_, w, previous, choices);
      // The previous cut, which may be chosen again, lies in this chain, at its end, or before it.
      if (chosen.position == choices.chain_end) {
        place = next_chain(place);
      } else {
        if (chosen.position != choices.chain_begin) pay(place);
        // Most stay where the ideal place is, or go one KV tile on: nothing to divide.
        const int64_t in_chain = chosen.position - choices.chain_begin;
        const RowTile& tile = arrays_.tiles[place.tile];
        if (in_chain == tile.offset_of(place.kv_tile + 1)) {
          ++place.kv_tile;
        } else if (in_chain != tile.offset_of(place.kv_tile)) {
          place.kv_tile = tile.kv_tile_at(in_chain);
        }
      }
      LinePlace& cut = cuts[w];  // value by value: a wide read of what was just written narrowly would have to wait
      cut.chain = place.chain;
      cut.kv_tile = place.kv_tile;
      cut.block = place.block;
      cut.head = place.head;
      cut.tile = place.tile;
      previous = chosen;
    }
  }

 private:
  LinePlace end_of_line() const {
    const int64_t blocks = arrays_.blocks.size();
    LinePlace end{};
    end.block = static_cast<int32_t>(blocks);
    end.tile = static_cast<int32_t>(arrays_.tiles.size());
    if (blocks > 0) {
      const Block& last = arrays_.blocks[blocks - 1];
      end.chain = last.chain(config_.num_kv_heads, last.tile_begin);
    }
    return end;
  }

  /// The chain that contains `position`, which is before the line's end. Positions come in ascending order.
  LinePlace find(int64_t position) {
    while (position >= arrays_.blocks[block_].line_begin + arrays_.blocks[block_].head_cost * config_.num_kv_heads)
      ++block_;
    const Block& block = arrays_.blocks[block_];
    const int64_t in_block = position - block.line_begin;
    const int64_t head = quotient(in_block, block.head_cost);
    const int64_t in_head = in_block - head * block.head_cost;
    LinePlace place{};
    place.block = block_;
    place.head = static_cast<int32_t>(head);
    place.tile = block.tile_end - block.tile_begin == 1 ? block.tile_begin : tile_at(block, in_head);
    place.chain = block.chain(place.head, place.tile);
    const RowTile& tile = arrays_.tiles[place.tile];
    place.kv_tile = tile.kv_tile_at(in_head - tile.line_offset);
    return place;
  }

  /// The last row tile that begins at or before an offset in a head: one without work shares its successor's.
  int32_t tile_at(const Block& block, int64_t in_head) const {
    const RowTile* const tiles = arrays_.tiles.data();
    const RowTile* after =
        std::upper_bound(tiles + block.tile_begin, tiles + block.tile_end, in_head,
                         [](int64_t offset, const RowTile& tile) { return offset < tile.line_offset; });
    return static_cast<int32_t>(after - 1 - tiles);
  }

  LinePlace next_chain(LinePlace place) const {
    const Block& block = arrays_.blocks[place.block];
    ++place.chain;
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

  CutChoices choices_at(const LinePlace& place) const {
    const Block& block = arrays_.blocks[place.block];
    const RowTile& tile = arrays_.tiles[place.tile];
    CutChoices choices;
    choices.chain_begin = block.line_begin + place.head * block.head_cost + tile.line_offset;
    choices.chain_end = choices.chain_begin + tile.cost();
    choices.divisible = tile.divisible;
    int64_t below = place.kv_tile;
    int64_t above = place.kv_tile + 1;
    if (fixed_splits_) {
      split_around(tile, place.kv_tile, below, above);
      choices.divisible = choices.divisible && (is_cut(place) || price(tile, place.kv_tile) <= budget_);
    }
    choices.below = choices.chain_begin + tile.offset_of(below);
    choices.above = choices.chain_begin + tile.offset_of(above);
    return choices;
  }

  /// The bounds, in KV tiles from the chain's begin, of the fixed split that contains a KV tile.
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

  bool is_cut(const LinePlace& place) const { return place.chain == paid_chain_; }

  void pay(const LinePlace& place) {
    if (!fixed_splits_ || is_cut(place)) return;
    budget_ -= price(arrays_.tiles[place.tile], place.kv_tile);
    paid_chain_ = place.chain;
  }

  const SchedulerConfig& config_;
  const WorkLine& line_;
  PlanStorage::Arrays& arrays_;
  const bool fixed_splits_;
  int64_t budget_;
  int32_t block_ = 0;
  int64_t paid_chain_ = -1;
};

}  // namespace

int64_t fixed_split_budget(const SchedulerConfig& config) {
  // Enough for decode requests of a hundred splits on every worker (8 rows and more), and for 16 splits of full row
  // tiles.
  return config.num_workers * std::max<int64_t>(int64_t{16} * config.tile.rows, 1024);
}

void cut_work_line(const SchedulerConfig& config, const WorkLine& line, PlanStorage::Arrays& arrays) {
  LineCutter(config, line, arrays).cut();
}

}  // namespace folio::inline v0::scheduler
