#pragma once

#include "scheduler/claim_order.hpp"
#include "scheduler/plan_storage.hpp"

namespace folio::inline v0::scheduler {

/// Puts the blocks into the order of their claims (TileOrder::kLpt): Arrays::block_order. Returns what the
/// longest last row tile is. O(blocks).
LongestTile lpt_order(PlanStorage::Arrays& arrays);

/// Visits every row tile that has work, in the order of claims: visit(block, index of the tile).
template <typename Visit>
void for_each_dynamic_tile(const PlanStorage::Arrays& arrays, TileOrder order, const Visit& visit) {
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

}  // namespace folio::inline v0::scheduler
