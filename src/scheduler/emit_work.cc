#include "scheduler/emit_work.hpp"

#include <algorithm>
#include <limits>

#include "core/error.hpp"
#include "scheduler/item_heads.hpp"
#include "scheduler/merge_shared.hpp"

namespace folio::inline v0::scheduler {
namespace {

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
    arrays.splits.clear();
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
  /// Whether every block is one row tile that sees one range, as decode's are: block b then is tile b and sees range b.
  bool are_single_tiles() const {
    return !fixed_splits_ && arrays_.shared.size() == 0 && arrays_.tiles.size() == arrays_.blocks.size() &&
           arrays_.ranges.size() == arrays_.blocks.size();
  }

  /// The lists of such blocks: the same as emit_lists', with fewer questions.
  void emit_single_tiles(int32_t* worker_indptr) {
    const int32_t heads = config_.num_kv_heads;
    // Of W - 1 cuts each cuts one output tile at most, and makes one split more.
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

  /// Whole output tiles of some KV heads that write the output: those of one head, and copies for the others.
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

  /// One worker's split of an output tile: KV tiles [place.kv_tile, kv_tile_end).
  void emit_split(const RowTile& tile, const TileCoord& place, int64_t kv_tile_end) {
    const bool first = place.kv_tile == 0;
    const bool last = kv_tile_end == tile.num_kv_tiles;
    if (tile.num_kv_tiles == 0) return;
    PartialRange* const splits = tile.to_partial ? &output_partials_[place.output_tile] : nullptr;
    if (splits != nullptr && first) splits->begin = arrays_.splits.size();
    if (first && last && !tile.to_partial) {
      emit_unsplit(tile, place.head);
      return;
    }
    if (first && !tile.to_partial) first_source_ = static_cast<int32_t>(arrays_.combine_sources.size());
    WorkTile* const begin = next_;
    emit_ranges(tile, place.head, place.kv_tile, kv_tile_end);
    if (fixed_splits_ && !first) {
      // Each later split is a result of its own, so that the combine tile folds what one worker alone would have
      // folded.
      for (WorkTile* work_tile = begin; work_tile != next_; ++work_tile) {
        work_tile->flags |= kStart | kFinish;
        finish_in_partial(tile, *work_tile);
      }
    } else {
      begin->flags |= kStart;
      next_[-1].flags |= kFinish;
      finish_in_partial(tile, next_[-1]);
    }
    if (splits != nullptr) {
      splits->end = arrays_.splits.size();
    } else if (last) {
      arrays_.combine_tiles.push_back(
          combine_tile_of(tile, place.head, static_cast<int32_t>(arrays_.combine_sources.size())));
    }
  }

  /// The combine tile of an output tile that is cut, whose last split is before `source_end`.
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
    // An output tile's combine tile is appended when its last split has been emitted, and output tiles follow each
    // other.
    if (output_partials_ == nullptr) work_tile.combine_tile = static_cast<int32_t>(arrays_.combine_tiles.size());
  }

  void check_partial_rows() const {
    if (num_partial_rows_ > std::numeric_limits<int32_t>::max()) {
      core::fail(ErrorCode::kInvalidArgument, "the batch needs more than 2^31 - 1 partial rows");
    }
  }

  /// Partial rows for one result of a row tile, noted among its output tile's.
  int32_t take_partial(const RowTile& tile) {
    const int32_t first_row = static_cast<int32_t>(num_partial_rows_);
    num_partial_rows_ += tile.row_end - tile.row_begin;
    check_partial_rows();
    (tile.to_partial ? arrays_.splits : arrays_.combine_sources).push_back(first_row);
    return first_row;
  }

  /// The work tiles of KV tiles [tile_begin, tile_end) of an output tile, with neither kStart nor kFinish.
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
        emit_item(tile, head, range, begin, end);
      }
    }
  }

  void emit_fixed_splits(const RowTile& tile, int32_t head, const KeyRange& range, int64_t begin, int64_t end) {
    const int64_t split = config_.fixed_split_tokens;
    do {
      const int64_t split_end = std::min(end, (begin / split + 1) * split);
      emit_item(tile, head, range, begin, split_end);
      begin = split_end;
    } while (begin < end);
  }

  void emit_item(const RowTile& tile, int32_t head, const KeyRange& range, int64_t begin, int64_t end) {
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

void emit_tiles(const SchedulerConfig& config, const TileSpaceTotals& totals, PlanStorage::Arrays& arrays) {
  StaticEmitter(config, totals, arrays).emit();
}

}  // namespace folio::inline v0::scheduler
