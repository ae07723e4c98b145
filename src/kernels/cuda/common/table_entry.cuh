#pragma once

#include <cstdint>

#include "folio/types/kv_cache.hpp"

/// Reading page tables without trusting them, as kvcache/page_rows.hpp does on the host.
namespace folio::inline v0::kernels::cuda {

/// The entries of a row that the row and the table's memory have; none for a row that the table does not have.
struct RowEntries {
  const int32_t* first = nullptr;
  int64_t count = 0;

  __device__ RowEntries(const PageTableView& table, int64_t row) {
    if (row < 0 || row >= table.num_rows) return;
    int64_t begin = 0;
    if (table.kind == PageTableKind::kCsr) {
      begin = table.indptr[row];
      const int64_t end = table.indptr[row + 1];
      if (begin < 0 || end > table.num_indices) return;
      count = end - begin;
    } else {
      const int64_t columns = table.row_stride == 0 || table.num_rows == 1 ? table.num_indices : table.row_stride;
      begin = row * table.row_stride + table.first_column;
      count = min(columns - table.first_column, table.num_indices - begin);
    }
    first = table.indices + begin;
  }
};

/// An entry, -1 where there is none.
__device__ inline int64_t table_entry(const PageTableView& table, int64_t row, int64_t column) {
  const RowEntries entries(table, row);
  return column >= 0 && column < entries.count ? int64_t{entries.first[column]} : -1;
}

}  // namespace folio::inline v0::kernels::cuda
