#include "scheduler/plan_digest_test_util.hpp"

#include <algorithm>

namespace folio::inline v0::scheduler::testing {

std::vector<int64_t> worker_loads(const SchedulerConfig& config, const PlanView& plan) {
  std::vector<int64_t> loads;
  for (int32_t w = 0; w < plan.num_workers; ++w) {
    int64_t load = 0;
    for (int32_t i = plan.worker_indptr[w]; i < plan.worker_indptr[w + 1]; ++i) {
      const WorkTile& work_tile = plan.work_tiles[i];
      const int64_t width = config.tile.kv_tokens;
      const int64_t tiles = std::max<int64_t>(1, (work_tile.kv_end + width - 1) / width - work_tile.kv_begin / width);
      load += tiles * (config.tile_cost + int64_t{work_tile.row_end - work_tile.row_begin} * config.row_cost);
    }
    loads.push_back(load);
  }
  return loads;
}

std::vector<int32_t> running_order(const PlanView& plan) {
  std::vector<int32_t> order;
  if (plan.num_dynamic_tiles == 0) {
    for (int32_t i = 0; i < plan.num_work_tiles; ++i) order.push_back(i);
    return order;
  }
  for (int32_t dynamic_tile = 0; dynamic_tile < plan.num_dynamic_tiles; ++dynamic_tile) {
    int32_t i = dynamic_tile;
    order.push_back(i);
    while ((plan.work_tiles[i].flags & kFinish) == 0) {
      i = plan.work_tiles[i].partial;
      // Continuations that lead back to a dynamic tile, or in a circle, would never end.
      if (i < plan.num_dynamic_tiles || i >= plan.num_work_tiles ||
          order.size() > static_cast<size_t>(plan.num_work_tiles))
        return {};
      order.push_back(i);
    }
  }
  return order;
}

std::map<std::pair<int32_t, int32_t>, std::string> fold_orders(const PlanView& plan) {
  std::map<std::pair<int32_t, int32_t>, std::string> orders;
  std::map<int32_t, std::string> partials;
  std::string state;
  const auto fold = [](const std::string& left, const std::string& right) {
    return left.empty() ? right : "(" + left + "+" + right + ")";
  };
  for (const int32_t i : running_order(plan)) {
    const WorkTile& work_tile = plan.work_tiles[i];
    if ((work_tile.flags & kStart) != 0) state.clear();
    state = fold(state, std::to_string(work_tile.segment) + ":" + std::to_string(work_tile.kv_begin) + "-" +
                            std::to_string(work_tile.kv_end));
    if ((work_tile.flags & kFinish) == 0) continue;
    for (int32_t row = work_tile.row_begin; row < work_tile.row_end; ++row) {
      if (work_tile.partial < 0) {
        orders[{work_tile.kv_head, row}] = state;
      } else {
        partials[work_tile.partial + row - work_tile.row_begin] = state;
      }
    }
  }
  for (int32_t m = 0; m < plan.num_combine_tiles; ++m) {
    const CombineTile& combine_tile = plan.combine_tiles[m];
    for (int32_t row = combine_tile.row_begin; row < combine_tile.row_end; ++row) {
      std::string& combined = orders[{combine_tile.kv_head, row}];
      for (int32_t i = combine_tile.source_begin; i < combine_tile.source_end; ++i) {
        combined = fold(combined, partials[plan.combine_sources[i] + row - combine_tile.row_begin]);
      }
    }
  }
  return orders;
}

std::vector<int64_t> serialise(const PlanView& plan) {
  std::vector<int64_t> all{plan.num_requests,      plan.num_tokens,
                           plan.num_segments,      plan.num_workers,
                           plan.num_work_tiles,    plan.num_dynamic_tiles,
                           plan.num_combine_tiles, plan.num_partial_rows,
                           plan.work_cost,         static_cast<int64_t>(plan.custom_mask_scope)};
  const auto add = [&all](const auto* data, int64_t count) {
    all.push_back(data == nullptr && count > 0 ? -1 : count);
    if (data != nullptr) all.insert(all.end(), data, data + count);
  };
  add(plan.cu_q, plan.num_requests + 1);
  add(plan.q_first_pos, plan.num_requests);
  for (int32_t s = 0; s < plan.num_segments; ++s) {
    const SegmentLengths& segment = plan.segments[s];
    all.insert(all.end(),
               {static_cast<int64_t>(segment.source), static_cast<int64_t>(segment.mask), segment.shard.world,
                segment.shard.rank, segment.shard.interleave, segment.shared, segment.num_rows});
    add(segment.kv_len, segment.num_rows);
    add(segment.first_pos, segment.num_rows);
    add(segment.row_of_request, plan.num_requests);
    add(segment.key_offset, plan.num_requests);
  }
  if (plan.num_dynamic_tiles == 0) add(plan.worker_indptr, plan.num_workers + 1);
  for (int32_t i = 0; i < plan.num_work_tiles; ++i) {
    const WorkTile& work_tile = plan.work_tiles[i];
    all.insert(all.end(), {work_tile.segment, work_tile.kv_row, work_tile.kv_head, work_tile.request,
                           work_tile.row_begin, work_tile.row_end, work_tile.kv_begin, work_tile.kv_end,
                           work_tile.partial, work_tile.flags, work_tile.combine_tile});
  }
  for (int32_t m = 0; m < plan.num_combine_tiles; ++m) {
    const CombineTile& combine_tile = plan.combine_tiles[m];
    all.insert(all.end(), {combine_tile.kv_head, combine_tile.request, combine_tile.row_begin, combine_tile.row_end,
                           combine_tile.source_begin, combine_tile.source_end});
  }
  add(plan.combine_sources,
      plan.num_combine_tiles == 0 ? 0 : plan.combine_tiles[plan.num_combine_tiles - 1].source_end);
  add(plan.mask_columns, plan.num_requests);
  add(plan.mask_first_column, plan.num_requests);
  add(plan.mask_byte_indptr, plan.num_requests + 1);
  if (plan.visible_positions != nullptr) add(plan.visible_positions, 2 * int64_t{plan.num_tokens});
  return all;
}

}  // namespace folio::inline v0::scheduler::testing
