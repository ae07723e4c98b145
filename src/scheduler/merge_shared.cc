#include "scheduler/merge_shared.hpp"

#include "scheduler/work_line.hpp"

namespace folio::inline v0::scheduler {
namespace {

class SharedCombiner {
 public:
  SharedCombiner(const SchedulerConfig& config, PlanStorage::Arrays& arrays) : config_(config), arrays_(arrays) {}

  void combine_tile() {
    for (int64_t b = 0; b < arrays_.blocks.size(); ++b) {
      const Block& block = arrays_.blocks[b];
      for (int32_t t = block.tile_begin; t < block.tile_end; ++t) {
        const RowTile& tile = arrays_.tiles[t];
        // Blocks of groups are left out: every row has a tile of its request, even where that has no work.
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

  /// Combines the stretch of rows from `row` on, for every KV head; returns its end.
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

  /// The partial results of one output tile as sources of a combine tile that begins at `row`.
  void add_sources(int64_t block_index, const RowTile& tile, int32_t head, int32_t row) {
    const Block& block = arrays_.blocks[block_index];
    const PartialRange splits =
        arrays_.output_partials[block.output_tile(head, static_cast<int32_t>(&tile - arrays_.tiles.data()))];
    for (int64_t i = splits.begin; i < splits.end; ++i) {
      arrays_.combine_sources.push_back(arrays_.splits[i] + (row - tile.row_begin));
    }
  }

  const SchedulerConfig& config_;
  PlanStorage::Arrays& arrays_;
};

}  // namespace

void combine_shared(const SchedulerConfig& config, PlanStorage::Arrays& arrays) {
  SharedCombiner(config, arrays).combine_tile();
}

}  // namespace folio::inline v0::scheduler
