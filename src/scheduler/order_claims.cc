#include "scheduler/order_claims.hpp"

namespace folio::inline v0::scheduler {

LongestTile lpt_order(PlanStorage::Arrays& arrays) {
  const int64_t count = arrays.blocks.size();
  const auto last_tile = [&arrays](int64_t b) -> const RowTile& { return arrays.tiles[arrays.blocks[b].tile_end - 1]; };
  LongestTile longest;
  for (int64_t b = 0; b < count; ++b) {
    longest = longer(longest, {last_tile(b).cost(), last_tile(b).num_kv_tiles});
  }
  const int32_t octave = half_octave(longest.cost);
  const auto class_of = [&](int64_t b) { return cost_class(half_octave(last_tile(b).cost()), octave); };
  ClassCounts next;  // first the counts, then where each class's next block goes
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

}  // namespace folio::inline v0::scheduler
