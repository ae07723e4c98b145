#include "scheduler/describe.hpp"

#include "core/error.hpp"

namespace folio::inline v0::scheduler {

namespace {

std::string line_of(const WorkTile& item) {
  std::string text =
      core::message("  request ", item.request, " head ", item.kv_head, " rows ", item.row_begin, '-', item.row_end,
                    " segment ", item.segment, " row ", item.kv_row, " keys ", item.kv_begin, '-', item.kv_end);
  if ((item.flags & kStart) != 0) text += " start";
  if ((item.flags & kFold) != 0) text += " fold";
  if ((item.flags & kFinish) != 0) text += " finish -> ";
  if ((item.flags & kFinish) != 0) text += item.partial < 0 ? "out" : core::message("partial ", item.partial);
  return text + '\n';
}

}  // namespace

std::string describe(const PlanView& plan) {
  std::string text;
  for (int32_t w = 0; w < plan.num_workers && plan.worker_indptr != nullptr; ++w) {
    text += core::message("worker ", w, '\n');
    for (int32_t i = plan.worker_indptr[w]; i < plan.worker_indptr[w + 1]; ++i) text += line_of(plan.work_tiles[i]);
  }
  for (int32_t claim = 0; claim < plan.num_dynamic_tiles; ++claim) {
    text += core::message("claim ", claim, '\n');
    for (int32_t i = claim;; i = plan.work_tiles[i].partial) {
      text += line_of(plan.work_tiles[i]);
      if ((plan.work_tiles[i].flags & kFinish) != 0) break;
    }
  }
  for (int32_t m = 0; m < plan.num_combine_tiles; ++m) {
    const CombineTile& merge = plan.merges[m];
    text += core::message("merge request ", merge.request, " head ", merge.kv_head, " rows ", merge.row_begin, '-',
                          merge.row_end, " <-");
    for (int32_t i = merge.source_begin; i < merge.source_end; ++i) text += core::message(' ', plan.combine_sources[i]);
    text += '\n';
  }
  return text;
}

}  // namespace folio::inline v0::scheduler
