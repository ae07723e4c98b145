#pragma once

#include <cstdint>
#include <string>

#include "backends/token_pool/device/kv_indices_rule.hpp"
#include "folio/types/kv_cache.hpp"

/// The request table as an argument: taking it in, and saying what is wrong with a request that reads it.
namespace folio::inline v0::backends::token_pool {

/// The table that a view names. Throws kInvalidArgument for other than dense tables and for sizes that contradict one
/// another. O(1).
SlotTable slot_table(const PageTableView& req_to_token);

/// Throws kInvalidArgument: `row` is not one of the table's.
[[noreturn]] void fail_row(const SlotTable& table, int64_t request, int32_t row);

/// Throws kInvalidArgument: a request wants positions up to `end` of a row that ends before.
[[noreturn]] void fail_end(const SlotTable& table, int64_t request, int32_t row, int64_t end);

/// Throws kInvalidArgument: the slot at a position of the row is outside the pool.
[[noreturn]] void fail_slot(const SlotTable& table, int64_t request, int32_t row, int64_t position, int64_t num_slots);

/// Throws kInvalidArgument unless an array of `size` entries has one for each of `num_requests`.
void check_count(const char* name, int64_t size, int64_t num_requests);

}  // namespace folio::inline v0::backends::token_pool
