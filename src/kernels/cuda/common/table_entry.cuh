#pragma once

#include <cstdint>

#include "folio/types/kv_cache.hpp"

/// Reading page tables without trusting them, as kvcache/page_rows.hpp does on the host.
namespace folio::inline v0::kernels::cuda {

/// Where entry `column` of a row stands among the table's indices, -1 where the row or the table's memory has none.
__device__ inline int64_t entry_place(const PageTableView& table, int64_t row, int64_t column) {
  if (row < 0 || row >= table.num_rows || column < 0) return -1;
  if (table.kind == PageTableKind::kCsr) {
    const int64_t begin = table.indptr[row];
    const int64_t end = table.indptr[row + 1];
    return begin < 0 || end > table.num_indices || column >= end - begin ? -1 : begin + column;
  }
  const int64_t columns = table.row_stride == 0 || table.num_rows == 1 ? table.num_indices : table.row_stride;
  if (column >= columns - table.first_column) return -1;
  const int64_t at = row * table.row_stride + table.first_column + column;
  return at < table.num_indices ? at : -1;
}

__device__ inline bool has_entry(const PageTableView& table, int64_t row, int64_t column) {
  return entry_place(table, row, column) >= 0;
}

/// The entry, -1 where there is none.
__device__ inline int64_t table_entry(const PageTableView& table, int64_t row, int64_t column) {
  const int64_t place = entry_place(table, row, column);
  return place < 0 ? -1 : int64_t{table.indices[place]};
}

}  // namespace folio::inline v0::kernels::cuda
