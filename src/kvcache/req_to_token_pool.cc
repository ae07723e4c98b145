#include "folio/kvcache/req_to_token_pool.hpp"

#include <algorithm>

#include "core/checked_math.hpp"
#include "core/error.hpp"

namespace folio::inline v0 {

RequestRows::RequestRows(int32_t max_reqs) : max_reqs_(max_reqs) {
  core::require(max_reqs >= 1 && max_reqs < INT32_MAX, "max_reqs is ", max_reqs, "; it must be in [1, 2^31 - 2]");
  free_rows_.resize(static_cast<size_t>(max_reqs));
  held_.resize(static_cast<size_t>(max_reqs) + 1);
  clear();
}

void RequestRows::clear() {
  std::fill(held_.begin(), held_.end(), false);
  for (int32_t i = 0; i < max_reqs_; ++i) free_rows_[static_cast<size_t>(i)] = i + 1;
  first_free_ = 0;
  num_free_ = max_reqs_;
}

bool RequestRows::is_held(int32_t row) const noexcept {
  return row >= 1 && row <= max_reqs_ && held_[static_cast<size_t>(row)];
}

void RequestRows::check_held(int32_t row) const {
  core::require(row != 0, "row 0 is the dummy row, which no request has; rows 1 to ", max_reqs_, " are handed out");
  core::require(row >= 1 && row <= max_reqs_, "row ", row, " is not of this pool; it has rows 1 to ", max_reqs_);
  core::require(is_held(row), "row ", row, " is not held: it is free (freed twice?)");
}

int32_t RequestRows::take() noexcept {
  const int32_t row = free_rows_[static_cast<size_t>(first_free_)];
  first_free_ = first_free_ + 1 == max_reqs_ ? 0 : first_free_ + 1;
  --num_free_;
  held_[static_cast<size_t>(row)] = true;
  return row;
}

std::optional<int32_t> RequestRows::alloc() {
  if (num_free_ == 0) return std::nullopt;
  return take();
}

bool RequestRows::alloc(std::span<int32_t> rows) {
  if (rows.size() > static_cast<size_t>(num_free_)) return false;
  for (int32_t& row : rows) row = take();
  return true;
}

void RequestRows::free(int32_t row) {
  check_held(row);
  held_[static_cast<size_t>(row)] = false;
  const int64_t end = int64_t{first_free_} + num_free_;
  free_rows_[static_cast<size_t>(end % max_reqs_)] = row;
  ++num_free_;
}

ReqToTokenPool::ReqToTokenPool(int32_t max_reqs, int32_t max_context_len)
    : rows_(max_reqs), max_context_len_(max_context_len) {
  core::require(max_context_len >= 1, "max_context_len is ", max_context_len, "; it must be 1 or more");
  table_.resize(static_cast<size_t>(core::checked_mul(int64_t{max_reqs} + 1, int64_t{max_context_len})));
}

void ReqToTokenPool::clear() {
  std::fill(table_.begin(), table_.end(), 0);
  rows_.clear();
}

void ReqToTokenPool::write(int32_t row, int32_t first, std::span<const int32_t> slots) {
  rows_.check_held(row);
  core::require(
      first >= 0 && first <= max_context_len_ && slots.size() <= static_cast<size_t>(max_context_len_ - first),
      "positions ", first, " to ", first + static_cast<int64_t>(slots.size()), " of row ", row,
      "; rows have positions 0 to ", max_context_len_ - 1);
  std::copy(slots.begin(), slots.end(), table_.begin() + int64_t{row} * max_context_len_ + first);
}

std::span<const int32_t> ReqToTokenPool::row(int32_t row) const {
  core::require(row >= 0 && row <= size(), "row ", row, " is not of this pool; it has rows 0 to ", size());
  return {table_.data() + int64_t{row} * max_context_len_, static_cast<size_t>(max_context_len_)};
}

PageTableView ReqToTokenPool::table() const noexcept {
  PageTableView view;
  view.kind = PageTableKind::kDense;
  view.indices = table_.data();
  view.num_indices = static_cast<int64_t>(table_.size());
  view.row_stride = max_context_len_;
  view.num_rows = size() + 1;
  return view;
}

}  // namespace folio::inline v0
