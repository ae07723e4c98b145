#include "kvcache/page_rows.hpp"

#include "core/error.hpp"

namespace folio::inline v0::kvcache {

using core::require;

void check_table(const PageTableView& table) {
  const bool csr = table.kind == PageTableKind::kCsr;
  require(csr || table.kind == PageTableKind::kDense, "table.kind is ", static_cast<int32_t>(table.kind),
          "; CSR (0) and dense (1) are offered");
  require(table.num_rows >= 0, "table.num_rows is ", table.num_rows, "; it must not be negative");
  require(table.num_indices >= 0, "table.num_indices is ", table.num_indices, "; it must not be negative");
  require(table.indices != nullptr || table.num_indices == 0, "table.indices is null, but num_indices is ",
          table.num_indices);
  require(!csr || table.indptr != nullptr || table.num_rows == 0, "table.indptr is null, but num_rows is ",
          table.num_rows);
  check_fields_of_kind(table);
}

void check_fields_of_kind(const PageTableView& table) {
  if (table.kind == PageTableKind::kCsr) {
    require(table.row_stride == 0 && table.first_column == 0, "table.row_stride is ", table.row_stride,
            " and first_column ", table.first_column, "; a CSR table has neither");
    return;
  }
  require(table.indptr == nullptr, "table.indptr is given; a dense table has none");
  require(table.row_stride >= 0, "table.row_stride is ", table.row_stride, "; it must not be negative");
  require(table.first_column >= 0, "table.first_column is ", table.first_column, "; it must not be negative");
}

void check_table(const PageTableView& table, int64_t num_rows) {
  check_table(table);
  require(num_rows <= table.num_rows, "there are ", num_rows, " lengths for a table of ", table.num_rows, " rows");
}

std::span<const int32_t> row_pages(const PageTableView& table, int32_t row, int64_t pages) {
  require(pages >= 0, "row ", row, " is to have ", pages, " pages; 0 or more are offered");
  if (pages == 0) return {};
  int64_t begin = 0;
  if (table.kind == PageTableKind::kCsr) {
    begin = table.indptr[row];
    const int64_t end = table.indptr[static_cast<int64_t>(row) + 1];
    require(begin >= 0 && begin <= end && end <= table.num_indices, "table.indptr of row ", row, " is [", begin, ", ",
            end, "); it must ascend within [0, ", table.num_indices, "]");
    require(pages <= end - begin, "row ", row, " needs ", pages, " pages; the table has ", end - begin);
  } else {
    // A row may not run into the next one; with stride 0 all rows are the same one.
    const int64_t columns = table.row_stride == 0 || table.num_rows == 1 ? table.num_indices : table.row_stride;
    require(pages <= columns - table.first_column, "row ", row, " needs ", pages, " pages from column ",
            table.first_column, " on; a row of the table has ", columns);
    int64_t row_begin = 0;
    const bool overflow = __builtin_mul_overflow(static_cast<int64_t>(row), table.row_stride, &row_begin);
    require(!overflow && row_begin <= table.num_indices - table.first_column - pages, "row ", row, " needs ", pages,
            " pages from column ", table.first_column, " on, beyond the table's ", table.num_indices,
            " entries (row_stride ", table.row_stride, ")");
    begin = row_begin + table.first_column;
  }
  return {table.indices + begin, static_cast<size_t>(pages)};
}

}  // namespace folio::inline v0::kvcache
