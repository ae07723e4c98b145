#include "scheduler/static_scheduler.hpp"

#include <algorithm>
#include <limits>

#include "core/error.hpp"
#include "scheduler/combine_tiles.hpp"
#include "scheduler/plan_storage.hpp"

namespace folio::inline v0::scheduler {

namespace {

/// Cuts the tile space: fills Arrays::cuts.
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
    // ideal_cut(space_, w), with one division for all workers: quotient and remainder advance step by step.
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
      // The previous cut may be chosen again. It lies in this output tile, at its end, or before it.
      if (chosen.position == choices.output_end) {
        place = next_output_tile(place);
      } else {
        if (chosen.position != choices.output_begin) pay(place);
        // Most cuts stay at the ideal KV tile or move one on, which avoids the division.
        const int64_t in_output_tile = chosen.position - choices.output_begin;
        const RowTile& tile = arrays_.tiles[place.tile];
        if (in_output_tile == tile.offset_of(place.kv_tile + 1)) {
          ++place.kv_tile;
        } else if (in_output_tile != tile.offset_of(place.kv_tile)) {
          place.kv_tile = tile.kv_tile_at(in_output_tile);
        }
      }
      TileCoord& cut = cuts[w];  // by value: a struct copy would stall on store forwarding
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

  /// The output tile that contains `position`, which lies before the tile space's end. Called with ascending
  /// positions.
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

  /// The last row tile that begins at or before an offset within a head. A row tile without work shares its
  /// successor's offset.
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
      ++place.block;  // its first row tile is this block's tile_end
    }
    return place;
  }

  CutChoices choices_at(const TileCoord& place) const {
    const Block& block = arrays_.blocks[place.block];
    const RowTile& tile = arrays_.tiles[place.tile];
    CutChoices choices;
    choices.output_begin = block.space_begin + place.head * block.head_cost + tile.block_offset;
    choices.output_end = choices.output_begin + tile.cost();
    choices.divisible = tile.divisible && config_.max_splits != 1;
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

  /// The fixed split that contains a KV tile, as KV tiles from the output tile's begin.
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

  /// Upper bound of the partial rows that a first cut near `kv_tile` makes: the prefix's, and one result per later
  /// split.
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

/// Emits the work tiles, partial rows and combine tiles of the cut tile space.
class StaticEmitter {
 public:
  StaticEmitter(const SchedulerConfig& config, const TileSpaceTotals& totals, PlanStorage::Arrays& arrays)
      : config_(config),
        arrays_(arrays),
        fixed_splits_(config.determinism >= Determinism::kBatchInvariant),
        fold_(fixed_splits_ ? kFold : 0u),
        work_tiles_(arrays.work_tiles.resize(totals.max_work_tiles)),
        next_(work_tiles_) {
    arrays.combine_tiles.clear();
    arrays.combine_sources.clear();
    arrays.partials.clear();
    output_partials_ = arrays.shared.size() > 0 ? arrays.output_partials.resize(totals.num_output_tiles) : nullptr;
  }

  void emit() {
    int32_t* worker_indptr = arrays_.worker_indptr.resize(int64_t{config_.num_workers} + 1);
    if (are_single_tiles()) {
      emit_single_tiles(worker_indptr);
    } else {
      emit_lists(worker_indptr);
    }
    worker_indptr[config_.num_workers] = static_cast<int32_t>(next_ - work_tiles_);
    if (output_partials_ != nullptr) combine_shared(config_, arrays_);
    finish_view(worker_indptr);
  }

 private:
  /// Whether every block is one row tile with one range, as in decode. Then block b is row tile b with range b.
  bool are_single_tiles() const {
    return !fixed_splits_ && arrays_.shared.size() == 0 && arrays_.tiles.size() == arrays_.blocks.size() &&
           arrays_.ranges.size() == arrays_.blocks.size();
  }

  /// emit_lists for such blocks: the same result with fewer branches.
  void emit_single_tiles(int32_t* worker_indptr) {
    const int32_t heads = config_.num_kv_heads;
    // Each of W - 1 cuts splits at most one output tile, which adds one KV split.
    CombineTile* const combine_tiles = arrays_.combine_tiles.resize(config_.num_workers);
    int32_t* const sources = arrays_.combine_sources.resize(int64_t{2} * config_.num_workers);
    int32_t num_combine_tiles = 0;
    int32_t num_sources = 0;
    TileCoord place{};
    for (int32_t w = 0; w < config_.num_workers; ++w) {
      worker_indptr[w] = static_cast<int32_t>(next_ - work_tiles_);
      const TileCoord& stop = arrays_.cuts[w + 1];
      for (;; ++place.block, place.head = 0) {
        const bool stops_here = place.block == stop.block;
        if (stops_here && place.head == stop.head && place.kv_tile == stop.kv_tile) break;
        const RowTile& tile = arrays_.tiles[place.block];
        const KeyRange& range = arrays_.ranges[place.block];
        const auto emit_split = [&](int64_t kv_tile_end) {
          const int64_t width = config_.tile.kv_tokens;
          const int64_t first_tile = range.begin == 0 ? 0 : narrow_div(range.begin, width);  // most begin at 0
          const bool last = kv_tile_end == tile.num_kv_tiles;
          if (place.kv_tile == 0) first_source_ = num_sources;
          WorkTile& work_tile = *next_++;
          work_tile = work_tile_of(tile, place.head, range, range.begin, range.end, kStart | kFinish);
          if (place.kv_tile > 0) work_tile.kv_begin = static_cast<int32_t>((first_tile + place.kv_tile) * width);
          if (!last) work_tile.kv_end = static_cast<int32_t>((first_tile + kv_tile_end) * width);
          work_tile.partial = sources[num_sources++] = static_cast<int32_t>(num_partial_rows_);
          work_tile.combine_tile = num_combine_tiles;
          num_partial_rows_ += tile.row_end - tile.row_begin;
          if (last) combine_tiles[num_combine_tiles++] = combine_tile_of(tile, place.head, num_sources);
        };
        const int32_t end = stops_here ? stop.head : heads;
        if (place.kv_tile > 0 && place.head < end) {
          emit_split(tile.num_kv_tiles);
          place.kv_tile = 0;
          ++place.head;
        }
        const WorkTileWriter whole(work_tile_of(tile, 0, range, range.begin, range.end, kStart | kFinish));
        for (; place.head < end; ++place.head) whole.write(next_++, place.head);
        if (!stops_here) continue;
        if (stop.kv_tile > place.kv_tile) emit_split(stop.kv_tile);
        place.kv_tile = stop.kv_tile;
        break;
      }
    }
    check_partial_rows();
    arrays_.combine_tiles.resize(num_combine_tiles);
    arrays_.combine_sources.resize(num_sources);
  }

  void emit_lists(int32_t* worker_indptr) {
    TileCoord place{};
    for (int32_t w = 0; w < config_.num_workers; ++w) {
      worker_indptr[w] = static_cast<int32_t>(next_ - work_tiles_);
      const TileCoord& stop = arrays_.cuts[w + 1];
      while (place.output_tile < stop.output_tile) {
        const Block& block = arrays_.blocks[place.block];
        const int32_t whole_heads = (stop.block > place.block ? config_.num_kv_heads : stop.head) - place.head;
        if (whole_heads > 0 && block.direct && place.tile == block.tile_begin && place.kv_tile == 0) {
          emit_heads(block, place.head, whole_heads);
          place.output_tile += int64_t{whole_heads} * (block.tile_end - block.tile_begin);
          place.head += whole_heads;
        } else {
          const RowTile& tile = arrays_.tiles[place.tile];
          emit_split(tile, place, tile.num_kv_tiles);
          place.kv_tile = 0;
          ++place.output_tile;
          if (++place.tile < block.tile_end) continue;
          ++place.head;
        }
        if (place.head < config_.num_kv_heads) {
          place.tile = block.tile_begin;
        } else {
          place.tile = block.tile_end;
          place.head = 0;
          ++place.block;
        }
      }
      if (stop.kv_tile > place.kv_tile) {
        emit_split(arrays_.tiles[place.tile], place, stop.kv_tile);
        place.kv_tile = stop.kv_tile;
      }
    }
  }

  /// Unsplit output tiles of some KV heads, which write the output: emitted for one head, copied for the others.
  void emit_heads(const Block& block, int32_t head, int32_t count) {
    WorkTile* const begin = next_;
    for (int32_t t = block.tile_begin; t < block.tile_end; ++t) emit_unsplit(arrays_.tiles[t], head);
    const auto work_tiles_a_head = next_ - begin;
    for (WorkTile* first = begin; first != begin + work_tiles_a_head; ++first) {
      const WorkTileWriter work_tile(*first);
      for (int32_t i = 1; i < count; ++i) work_tile.write(first + i * work_tiles_a_head, head + i);
    }
    next_ = begin + count * work_tiles_a_head;
  }

  void emit_unsplit(const RowTile& tile, int32_t head) {
    WorkTile* const begin = next_;
    emit_ranges(tile, head, 0, tile.num_kv_tiles);
    begin->flags |= kStart;
    next_[-1].flags |= kFinish;
  }

  /// One worker's KV split of an output tile: KV tiles [place.kv_tile, kv_tile_end).
  void emit_split(const RowTile& tile, const TileCoord& place, int64_t kv_tile_end) {
    const bool first = place.kv_tile == 0;
    const bool last = kv_tile_end == tile.num_kv_tiles;
    if (tile.num_kv_tiles == 0) return;
    PartialRange* const partials = tile.to_partial ? &output_partials_[place.output_tile] : nullptr;
    if (partials != nullptr && first) partials->begin = arrays_.partials.size();
    if (first && last && !tile.to_partial) {
      emit_unsplit(tile, place.head);
      return;
    }
    if (first && !tile.to_partial) first_source_ = static_cast<int32_t>(arrays_.combine_sources.size());
    WorkTile* const begin = next_;
    emit_ranges(tile, place.head, place.kv_tile, kv_tile_end);
    if (fixed_splits_ && !first) {
      // Each later fixed split is a result of its own, so that combining folds what one worker would have folded.
      for (WorkTile* work_tile = begin; work_tile != next_; ++work_tile) {
        work_tile->flags |= kStart | kFinish;
        finish_in_partial(tile, *work_tile);
      }
    } else {
      begin->flags |= kStart;
      next_[-1].flags |= kFinish;
      finish_in_partial(tile, next_[-1]);
    }
    if (partials != nullptr) {
      partials->end = arrays_.partials.size();
    } else if (last) {
      arrays_.combine_tiles.push_back(
          combine_tile_of(tile, place.head, static_cast<int32_t>(arrays_.combine_sources.size())));
    }
  }

  /// The combine tile of a split output tile whose last source is before `source_end`.
  CombineTile combine_tile_of(const RowTile& tile, int32_t head, int32_t source_end) const {
    return {.kv_head = head,
            .request = tile.request,
            .row_begin = tile.row_begin,
            .row_end = tile.row_end,
            .source_begin = first_source_,
            .source_end = source_end};
  }

  void finish_in_partial(const RowTile& tile, WorkTile& work_tile) {
    work_tile.partial = take_partial(tile);
    // Output tiles are emitted one after the other, each with its combine tile behind its last split.
    if (output_partials_ == nullptr) work_tile.combine_tile = static_cast<int32_t>(arrays_.combine_tiles.size());
  }

  void check_partial_rows() const {
    if (num_partial_rows_ > std::numeric_limits<int32_t>::max()) {
      core::fail(ErrorCode::kInvalidArgument, "the batch needs more than 2^31 - 1 partial rows");
    }
  }

  /// Takes partial rows for one result of a row tile and lists them as a source.
  int32_t take_partial(const RowTile& tile) {
    const int32_t first_row = static_cast<int32_t>(num_partial_rows_);
    num_partial_rows_ += tile.row_end - tile.row_begin;
    check_partial_rows();
    (tile.to_partial ? arrays_.partials : arrays_.combine_sources).push_back(first_row);
    return first_row;
  }

  /// The work tiles of KV tiles [tile_begin, tile_end) of an output tile, without kStart and kFinish.
  void emit_ranges(const RowTile& tile, int32_t head, int64_t tile_begin, int64_t tile_end) {
    const int64_t width = config_.tile.kv_tokens;
    const bool whole = tile_begin == 0 && tile_end == tile.num_kv_tiles;
    int64_t before = 0;  // KV tiles of earlier ranges
    for (int32_t i = tile.range_begin; i < tile.range_end; ++i) {
      const KeyRange& range = arrays_.ranges[i];
      int64_t begin = range.begin;
      int64_t end = range.end;
      if (!whole) {
        const int64_t first = range.begin == 0 ? 0 : narrow_div(range.begin, width);  // most begin at 0
        begin = std::max(begin, (first + tile_begin - before) * width);
        end = std::min(end, (first + tile_end - before) * width);
        if (i + 1 < tile.range_end) before += tiles_touched({range.begin, range.end}, width);
        if (begin >= end) continue;
      }
      if (fixed_splits_) {
        emit_fixed_splits(tile, head, range, begin, end);
      } else {
        emit_work_tile(tile, head, range, begin, end);
      }
    }
  }

  void emit_fixed_splits(const RowTile& tile, int32_t head, const KeyRange& range, int64_t begin, int64_t end) {
    const int64_t split = config_.fixed_split_tokens;
    do {
      const int64_t split_end = std::min(end, (begin / split + 1) * split);
      emit_work_tile(tile, head, range, begin, split_end);
      begin = split_end;
    } while (begin < end);
  }

  void emit_work_tile(const RowTile& tile, int32_t head, const KeyRange& range, int64_t begin, int64_t end) {
    *next_++ = work_tile_of(tile, head, range, begin, end, fold_);
  }

  static WorkTile work_tile_of(const RowTile& tile, int32_t head, const KeyRange& range, int64_t begin, int64_t end,
                               uint32_t flags) {
    return {.segment = range.segment,
            .kv_row = range.kv_row,
            .kv_head = head,
            .request = tile.request,
            .row_begin = tile.row_begin,
            .row_end = tile.row_end,
            .kv_begin = static_cast<int32_t>(begin),
            .kv_end = static_cast<int32_t>(end),
            .partial = -1,
            .flags = flags,
            .combine_tile = -1};
  }

  void finish_view(const int32_t* worker_indptr) {
    PlanView& view = arrays_.view;
    view.num_work_tiles = static_cast<int32_t>(next_ - work_tiles_);
    view.num_combine_tiles = static_cast<int32_t>(arrays_.combine_tiles.size());
    view.num_partial_rows = static_cast<int32_t>(num_partial_rows_);
    view.worker_indptr = worker_indptr;
    view.work_tiles = work_tiles_;
    view.combine_tiles = arrays_.combine_tiles.data();
    view.combine_sources = arrays_.combine_sources.data();
  }

  const SchedulerConfig& config_;
  PlanStorage::Arrays& arrays_;
  const bool fixed_splits_;
  const uint32_t fold_;
  WorkTile* const work_tiles_;
  WorkTile* next_;
  PartialRange* output_partials_ = nullptr;
  int64_t num_partial_rows_ = 0;
  int32_t first_source_ = 0;
};

}  // namespace

int64_t fixed_split_budget(const SchedulerConfig& config) {
  // Per worker: a hundred splits of decode requests (8 rows and more), or 16 splits of full row tiles.
  return config.num_workers * std::max<int64_t>(int64_t{16} * config.tile.rows, 1024);
}

void schedule_static(const SchedulerConfig& config, const TileSpaceTotals& totals, PlanStorage::Arrays& arrays) {
  TileSpaceCutter(config, totals.space, arrays).cut();
  StaticEmitter(config, totals, arrays).emit();
}

}  // namespace folio::inline v0::scheduler
