#include "scheduler/describe.hpp"

#include "core/error.hpp"

namespace folio::inline v0::scheduler {

namespace {

std::string tile_space_of(const WorkTile& work_tile) {
  std::string text = core::message("  request ", work_tile.request, " head ", work_tile.kv_head, " rows ",
                                   work_tile.row_begin, '-', work_tile.row_end, " segment ", work_tile.segment, " row ",
                                   work_tile.kv_row, " keys ", work_tile.kv_begin, '-', work_tile.kv_end);
  if ((work_tile.flags & kStart) != 0) text += " start";
  if ((work_tile.flags & kFold) != 0) text += " fold";
  if ((work_tile.flags & kFinish) != 0) text += " finish -> ";
  if ((work_tile.flags & kFinish) != 0)
    text += work_tile.partial < 0 ? "out" : core::message("partial ", work_tile.partial);
  return text + '\n';
}

}  // namespace

std::string describe(const PlanView& plan) {
  std::string text;
  for (int32_t w = 0; w < plan.num_workers && plan.worker_indptr != nullptr; ++w) {
    text += core::message("worker ", w, '\n');
    for (int32_t i = plan.worker_indptr[w]; i < plan.worker_indptr[w + 1]; ++i)
      text += tile_space_of(plan.work_tiles[i]);
  }
  for (int32_t dynamic_tile = 0; dynamic_tile < plan.num_dynamic_tiles; ++dynamic_tile) {
    text += core::message("claim ", dynamic_tile, '\n');
    for (int32_t i = dynamic_tile;; i = plan.work_tiles[i].partial) {
      text += tile_space_of(plan.work_tiles[i]);
      if ((plan.work_tiles[i].flags & kFinish) != 0) break;
    }
  }
  for (int32_t m = 0; m < plan.num_combine_tiles; ++m) {
    const CombineTile& combine_tile = plan.combine_tiles[m];
    text += core::message("merge request ", combine_tile.request, " head ", combine_tile.kv_head, " rows ",
                          combine_tile.row_begin, '-', combine_tile.row_end, " <-");
    for (int32_t i = combine_tile.source_begin; i < combine_tile.source_end; ++i)
      text += core::message(' ', plan.combine_sources[i]);
    text += '\n';
  }
  return text;
}

}  // namespace folio::inline v0::scheduler
