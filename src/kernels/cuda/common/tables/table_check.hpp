#pragma once

#include <cstdint>

#include "folio/types/device.hpp"
#include "folio/types/export.hpp"
#include "folio/types/kv_cache.hpp"
#include "kernels/cuda/attention_kernel.hpp"
#include "scheduler/plan_view.hpp"

/// The check of ContextOptions::validate_tables: everything that attention reads of page tables and indptrs, by a
/// plan's work tiles. The same functions run on the host and on a GPU.
namespace folio::inline v0::kernels::cuda {

enum class TableProblem : int32_t {
  kNone = 0,
  kRow = 1,       ///< `value` is the row, `bound` how many rows the table has
  kRowEnds = 2,   ///< the row is [column, value) of `bound` entries, or of tokens of a ragged segment
  kShortRow = 3,  ///< the row has `value` entries, or tokens; its keys need `bound`
  kPage = 4,      ///< `value` is the page id at `column` of the row, `bound` how many pages the cache has
};

/// The first thing that is wrong, by segment, row and column.
struct TableFault {
  TableProblem problem = TableProblem::kNone;
  int32_t segment = 0;
  int32_t request = 0;
  int32_t row = 0;
  int64_t column = 0;
  int64_t value = 0;
  int64_t bound = 0;
};

/// What a run is given for one segment.
struct CheckedSegment {
  bool paged = true;
  PageTableView table;              ///< paged
  int32_t page_size = 1;            ///< paged
  int64_t num_pages = 0;            ///< paged
  const int32_t* indptr = nullptr;  ///< ragged
  int64_t num_tokens = 0;           ///< ragged
};

/// A check as a kernel takes it. `fault` is page-locked memory that the device writes at the host's address, once: its
/// owner sets `problem` back to kNone.
struct TableCheckParams {
  const scheduler::PlanImageHeader* plan = nullptr;
  CheckedSegment segments[kMaxSegments];
  TableFault* fault = nullptr;
};
/// Enqueues the check. Throws Error(kDeviceError) where the launch fails.
void enqueue(const TableCheckParams& params, Stream stream);

FOLIO_HOST_DEVICE inline bool comes_before(const TableFault& a, const TableFault& b) {
  if (a.problem == TableProblem::kNone || b.problem == TableProblem::kNone) return a.problem != TableProblem::kNone;
  if (a.segment != b.segment) return a.segment < b.segment;
  if (a.row != b.row) return a.row < b.row;
  return a.column < b.column;
}

/// Checks what one work tile reads. The calling threads take every `lanes`-th page, from `lane` on.
FOLIO_HOST_DEVICE inline TableFault check_tile(const CheckedSegment& segment, const scheduler::WorkTile& tile,
                                               int32_t lane, int32_t lanes) {
  TableFault fault{.segment = tile.segment, .request = tile.request, .row = tile.kv_row};
  const auto found = [&fault](TableProblem problem, int64_t column, int64_t value, int64_t bound) {
    fault.problem = problem;
    fault.column = column;
    fault.value = value;
    fault.bound = bound;
    return fault;
  };
  const PageTableView& table = segment.table;
  if (segment.paged && (tile.kv_row < 0 || tile.kv_row >= table.num_rows)) {
    return found(TableProblem::kRow, 0, tile.kv_row, table.num_rows);
  }
  const int32_t* const indptr = segment.paged ? table.indptr : segment.indptr;
  const int64_t all = segment.paged ? table.num_indices : segment.num_tokens;
  int64_t begin = 0;
  int64_t end = 0;
  if (segment.paged && table.kind == PageTableKind::kDense) {
    const bool one_row = table.row_stride == 0 || table.num_rows == 1;
    begin = tile.kv_row * table.row_stride + table.first_column;
    end = one_row ? all : (tile.kv_row + 1) * table.row_stride;
    if (end > all) end = all;
    if (end < begin) end = begin;
  } else {
    begin = indptr[tile.kv_row];
    end = indptr[tile.kv_row + 1];
    if (begin < 0 || begin > end || end > all) return found(TableProblem::kRowEnds, begin, end, all);
  }
  const int32_t unit = segment.paged ? segment.page_size : 1;
  const int64_t needed = (int64_t{tile.kv_end} + unit - 1) / unit;
  if (needed > end - begin) return found(TableProblem::kShortRow, 0, end - begin, needed);
  if (!segment.paged) return fault;
  for (int64_t column = tile.kv_begin / unit + lane; column < needed; column += lanes) {
    const int64_t page = table.indices[begin + column];
    if (page < 0 || page >= segment.num_pages) return found(TableProblem::kPage, column, page, segment.num_pages);
  }
  return fault;
}

/// The first fault of work tiles `first`, `first` + `step` and so on. KV heads read the same pages: one is enough.
FOLIO_HOST_DEVICE inline TableFault check_tiles(const CheckedSegment* segments, const scheduler::PlanView& plan,
                                                int32_t first, int32_t step, int32_t lane, int32_t lanes) {
  TableFault lowest;
  for (int32_t i = first; i < plan.num_work_tiles; i += step) {
    const scheduler::WorkTile& tile = plan.work_tiles[i];
    if (tile.kv_head != 0 || tile.kv_begin >= tile.kv_end) continue;
    const TableFault fault = check_tile(segments[tile.segment], tile, lane, lanes);
    if (comes_before(fault, lowest)) lowest = fault;
  }
  return lowest;
}

}  // namespace folio::inline v0::kernels::cuda
