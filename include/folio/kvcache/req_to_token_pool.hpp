#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "folio/types/export.hpp"
#include "folio/types/kv_cache.hpp"

namespace folio::inline v0 {

/// Which rows of a request table are free. Row 0 is the dummy row: never handed out; padding requests use it, so that
/// they cannot touch a live request's. Requests have rows 1 to size(). Not thread-safe.
class FOLIO_API RequestRows {
 public:
  /// Throws kInvalidArgument for sizes below 1 and for tables of more than 2^31 - 1 rows.
  explicit RequestRows(int32_t max_reqs);

  int32_t size() const noexcept { return max_reqs_; }  ///< requests that can run at once
  int32_t available() const noexcept { return num_free_; }
  bool is_held(int32_t row) const noexcept;

  /// The row that has been free longest; none if all are taken. O(1).
  std::optional<int32_t> alloc();

  /// Fills `rows`, all or nothing: false, and nothing changed, if fewer are free. O(rows).
  [[nodiscard]] bool alloc(std::span<int32_t> rows);

  /// Gives a row back. O(1). Throws kInvalidArgument for a row that is not held: freed twice, row 0, not of this table.
  void free(int32_t row);

  /// Throws kInvalidArgument for a row that is not held, as free. O(1).
  void check_held(int32_t row) const;

  /// All rows free, in ascending order. O(size()).
  void clear();

 private:
  int32_t take() noexcept;

  int32_t max_reqs_;
  std::vector<int32_t> free_rows_;  ///< a ring: num_free_ rows from first_free_ on
  std::vector<bool> held_;
  int32_t first_free_ = 0;
  int32_t num_free_ = 0;
};

/// Which slot each token of each running request lies in: one row a request, one column a position.
///
///     ReqToTokenPool rows(max_requests, max_context_len);
///     std::optional<int32_t> row = rows.alloc();    // none: all rows are taken
///     rows.write(*row, 0, prefix_slots);            // what the prefix cache matched
///     rows.write(*row, prefix_len, new_slots);      // what the allocator gave
///     ... attention reads rows.table(), a page table with pages of one token ...
///     rows.free(*row);
///
/// Row 0 is the dummy row of RequestRows: never written, slot 0 (the dummy slot) throughout. Host memory; not
/// thread-safe. backends::DeviceReqToTokenPool is the same in a GPU's memory.
class FOLIO_API ReqToTokenPool {
 public:
  /// Throws kInvalidArgument for sizes below 1 and for tables of more than 2^31 - 1 rows.
  ReqToTokenPool(int32_t max_reqs, int32_t max_context_len);

  int32_t size() const noexcept { return rows_.size(); }  ///< requests that can run at once
  int32_t max_context_len() const noexcept { return max_context_len_; }
  int32_t available() const noexcept { return rows_.available(); }
  bool is_held(int32_t row) const noexcept { return rows_.is_held(row); }

  /// The row that has been free longest; none if all are taken. O(1).
  std::optional<int32_t> alloc() { return rows_.alloc(); }

  /// Fills `rows`, all or nothing: false, and nothing changed, if fewer are free. O(rows).
  [[nodiscard]] bool alloc(std::span<int32_t> rows) { return rows_.alloc(rows); }

  /// Gives a row back; its contents stay until it is written again. O(1). Throws kInvalidArgument for a row that is
  /// not held: freed twice, row 0, not of this pool.
  void free(int32_t row) { rows_.free(row); }

  /// Writes slots at positions first, first + 1, ... of a held row. Throws kInvalidArgument for a row that is not held
  /// and for positions outside [0, max_context_len); nothing is then written. Slots are not checked.
  void write(int32_t row, int32_t first, std::span<const int32_t> slots);

  /// A row's max_context_len entries. Throws kInvalidArgument for a row outside [0, size()].
  std::span<const int32_t> row(int32_t row) const;

  /// The table, borrowed: size() + 1 rows of max_context_len entries, a dense page table with pages of one token.
  PageTableView table() const noexcept;

  /// All rows free, in ascending order, and all entries 0. O(table).
  void clear();

 private:
  RequestRows rows_;
  int32_t max_context_len_;
  std::vector<int32_t> table_;
};

}  // namespace folio::inline v0
