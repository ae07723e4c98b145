#include "backends/token_pool/request_table.hpp"

#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "folio/page_table.hpp"

namespace folio::inline v0::backends::token_pool {

using core::fail;
using core::require;

SlotTable slot_table(const PageTableView& req_to_token) {
  require(req_to_token.kind == PageTableKind::kDense, "req_to_token is not a dense table; it has a slot per position");
  validate(req_to_token, {}, /*page_size=*/1, /*num_pages=*/0);  // no rows: the view alone
  const int64_t entries = req_to_token.num_indices - req_to_token.first_column;
  SlotTable table;
  table.slots = req_to_token.indices + (entries > 0 ? req_to_token.first_column : 0);
  table.row_stride = req_to_token.row_stride;
  table.num_rows = req_to_token.num_rows;
  table.num_entries = entries > 0 ? entries : 0;
  core::checked_mul(table.row_stride, int64_t{table.num_rows});
  // With one row, or with all rows the same, there is no next one that a row could run into.
  const bool alone = table.row_stride == 0 || table.num_rows == 1;
  table.num_columns = alone ? table.num_entries : table.row_stride - req_to_token.first_column;
  return table;
}

void fail_row(const SlotTable& table, int64_t request, int32_t row) {
  fail(ErrorCode::kInvalidArgument, "request ", request, " has row ", row, "; req_to_token has rows 0 to ",
       table.num_rows - 1);
}

void fail_end(const SlotTable& table, int64_t request, int32_t row, int64_t end) {
  const int64_t columns = table.columns_of(row);
  fail(ErrorCode::kInvalidArgument, "request ", request, " reads positions up to ", end, " of row ", row,
       ", which has ", columns > 0 ? columns : 0);
}

void fail_slot(const SlotTable& table, int64_t request, int32_t row, int64_t position, int64_t num_slots) {
  fail(ErrorCode::kInvalidArgument, "request ", request, " has slot ", table.at(row, position), " at position ",
       position, " of row ", row, "; the pool has slots 0 to ", num_slots - 1);
}

void check_count(const char* name, int64_t size, int64_t num_requests) {
  require(size == num_requests, name, " has ", size, " entries for ", num_requests, " requests");
}

}  // namespace folio::inline v0::backends::token_pool
