#include "scheduler/combine_tiles.hpp"

#include <algorithm>

#include "scheduler/plan_storage.hpp"

namespace folio::inline v0::scheduler {

namespace {

/// Emits the combine tiles of one batch with shared segments.
class SharedCombiner {
 public:
  SharedCombiner(const SchedulerConfig& config, PlanStorage::Arrays& arrays) : config_(config), arrays_(arrays) {}

  void combine_tile() {
    for (int64_t b = 0; b < arrays_.blocks.size(); ++b) {
      const Block& block = arrays_.blocks[b];
      for (int32_t t = block.tile_begin; t < block.tile_end; ++t) {
        const RowTile& tile = arrays_.tiles[t];
        // Group blocks are skipped: every row also has a row tile of its request, even one without work.
        if (!tile.to_partial || is_group_block(b, tile)) continue;
        for (int32_t row = tile.row_begin; row < tile.row_end;) row = combine_stretch(b, tile, row);
      }
    }
  }

 private:
  bool is_group_block(int64_t block, const RowTile& tile) const {
    for (int64_t i = 0; i < arrays_.shared.size(); ++i) {
      const SharedSegment& shared = arrays_.shared[i];
      const int32_t group = arrays_.view.segments[shared.segment].row_of_request[tile.request];
      if (group >= 0 && arrays_.group_blocks[shared.first_group_block + group] == block) return true;
    }
    return false;
  }

  /// Combines the rows from `row` on that have the same contributors, for every KV head. Returns their end.
  int32_t combine_stretch(int64_t own_block, const RowTile& own, int32_t row) {
    int32_t end = own.row_end;
    for (int64_t i = 0; i < arrays_.shared.size(); ++i) shared_tile(arrays_, arrays_.shared[i], own.request, row, &end);
    for (int32_t head = 0; head < config_.num_kv_heads; ++head) {
      const int32_t source_begin = static_cast<int32_t>(arrays_.combine_sources.size());
      for (int64_t i = 0; i < arrays_.shared.size(); ++i) {
        const SharedSegment& shared = arrays_.shared[i];
        const RowTile* tile = shared_tile(arrays_, shared, own.request, row, nullptr);
        if (tile == nullptr) continue;
        const int32_t group = arrays_.view.segments[shared.segment].row_of_request[own.request];
        add_sources(arrays_.group_blocks[shared.first_group_block + group], *tile, head, row);
      }
      if (own.num_kv_tiles > 0) add_sources(own_block, own, head, row);
      arrays_.combine_tiles.push_back({.kv_head = head,
                                       .request = own.request,
                                       .row_begin = row,
                                       .row_end = end,
                                       .source_begin = source_begin,
                                       .source_end = static_cast<int32_t>(arrays_.combine_sources.size())});
    }
    return end;
  }

  /// Appends the partial results of one output tile as sources of a combine tile that begins at `row`.
  void add_sources(int64_t block_index, const RowTile& tile, int32_t head, int32_t row) {
    const Block& block = arrays_.blocks[block_index];
    const PartialRange splits =
        arrays_.output_partials[block.output_tile(head, static_cast<int32_t>(&tile - arrays_.tiles.data()))];
    for (int64_t i = splits.begin; i < splits.end; ++i) {
      arrays_.combine_sources.push_back(arrays_.partials[i] + (row - tile.row_begin));
    }
  }

  const SchedulerConfig& config_;
  PlanStorage::Arrays& arrays_;
};

}  // namespace

void combine_shared(const SchedulerConfig& config, PlanStorage::Arrays& arrays) {
  SharedCombiner(config, arrays).combine_tile();
}

const RowTile* shared_tile(const PlanStorage::Arrays& arrays, const SharedSegment& shared, int32_t request, int32_t row,
                           int32_t* next_row) {
  const int32_t group = arrays.view.segments[shared.segment].row_of_request[request];
  if (group < 0) return nullptr;
  const int32_t block_index = arrays.group_blocks[shared.first_group_block + group];
  if (block_index == kNoBlock) return nullptr;
  const Block& block = arrays.blocks[block_index];
  // All row tiles of a block but the last have as many rows as the first.
  const RowTile& first = arrays.tiles[block.tile_begin];
  const RowTile& tile = arrays.tiles[block.tile_begin + (row - first.row_begin) / (first.row_end - first.row_begin)];
  if (next_row != nullptr) *next_row = std::min(*next_row, tile.row_end);
  return tile.num_kv_tiles > 0 ? &tile : nullptr;
}

}  // namespace folio::inline v0::scheduler
