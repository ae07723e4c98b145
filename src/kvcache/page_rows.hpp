#pragma once

#include <cstdint>
#include <span>

#include "folio/types/kv_cache.hpp"

/// Reading page tables without trusting them: every look-up is checked against the memory that the view states.
namespace folio::inline v0::kvcache {

/// Checks what does not depend on a row: the kind, signs, and that arrays with entries are not null. O(1).
void check_table(const PageTableView& table);

/// Fields that the table's kind has: not negative; those of the other kind: at their defaults.
void check_fields_of_kind(const PageTableView& table);

/// As check_table, and that the table has a row for each of `num_rows` lengths.
void check_table(const PageTableView& table, int64_t num_rows);

/// The first `pages` entries of `row` (in [0, num_rows)) of a table that passed check_table. Throws kInvalidArgument,
/// naming the row, for fewer than 0, and where they do not all lie in the table's memory.
std::span<const int32_t> row_pages(const PageTableView& table, int32_t row, int64_t pages);

}  // namespace folio::inline v0::kvcache
