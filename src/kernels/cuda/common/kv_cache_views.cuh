#pragma once

#include <cstdint>

#include "folio/types/kv_cache.hpp"

/// Device-side reads of the public types Scale and PageTableView. Page tables are not trusted: reads are checked, as
/// kvcache/page_rows.hpp does on the host.
namespace folio::inline v0::kernels::cuda {

/// The scale of a request and a head.
template <typename Index>
__device__ inline float scale_at(const Scale& scale, Index request, Index head) {
  if (scale.data == nullptr) return scale.value;
  switch (scale.granularity) {
    case ScaleGranularity::kPerHead: return scale.data[head];
    case ScaleGranularity::kPerRequest: return scale.data[request];
    case ScaleGranularity::kPerRequestAndHead: return scale.data[request * scale.request_stride + head];
    case ScaleGranularity::kPerTensor: break;
  }
  return scale.data[0];
}

/// Where a table says that a row's entries lie. Only loads: nothing waits for them yet.
struct RowBounds {
  int64_t begin = 0;
  int64_t end = 0;
  bool exists = false;

  RowBounds() = default;
  __device__ RowBounds(const PageTableView& table, int64_t row) : exists(row >= 0 && row < table.num_rows) {
    if (table.kind == PageTableKind::kCsr) {
      if (exists) begin = table.indptr[row];
      if (exists) end = table.indptr[row + 1];
      return;
    }
    const int64_t columns = table.row_stride == 0 || table.num_rows == 1 ? table.num_indices : table.row_stride;
    begin = row * table.row_stride + table.first_column;
    end = min(begin + columns - table.first_column, table.num_indices);
  }
};

/// The entries of a row that the row and the table's memory have; none for a row that the table does not have.
struct RowEntries {
  const int32_t* first = nullptr;
  int64_t count = 0;

  __device__ RowEntries(const PageTableView& table, int64_t row) : RowEntries(table, RowBounds(table, row)) {}
  __device__ RowEntries(const PageTableView& table, const RowBounds& bounds) {
    const bool inside = bounds.exists && bounds.begin >= 0 && bounds.end <= table.num_indices;
    first = table.indices + bounds.begin;
    count = inside ? bounds.end - bounds.begin : 0;
  }
};

/// An entry, -1 where there is none.
__device__ inline int64_t table_entry(const PageTableView& table, int64_t row, int64_t column) {
  const RowEntries entries(table, row);
  return column >= 0 && column < entries.count ? int64_t{entries.first[column]} : -1;
}

}  // namespace folio::inline v0::kernels::cuda
