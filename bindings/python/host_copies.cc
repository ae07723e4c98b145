#include "host_copies.hpp"

#include <limits>
#include <string>

#include "folio/types/error.hpp"

namespace folio::python {
namespace {

int64_t pages_of(int32_t kv_len, int32_t page_size) {
  return kv_len <= 0 ? 0 : (int64_t{kv_len} + page_size - 1) / page_size;
}

/// Of a table that was not copied.
constexpr int64_t kUnknownEnd = std::numeric_limits<int64_t>::max();

/// Copies page ids; returns one more than the highest. A negative one is above every page.
int64_t copy_ids(const int32_t* from, int64_t count, int32_t* to) {
  uint32_t highest = 0;
  for (int64_t i = 0; i < count; ++i) {
    to[i] = from[i];
    highest = std::max(highest, static_cast<uint32_t>(to[i]));
  }
  return count > 0 ? int64_t{highest} + 1 : 0;
}

/// Where a row's page ids begin; null if the table does not hold as many.
const int32_t* find_row(const PageTableView& table, int32_t row, int64_t pages) {
  if (table.kind == PageTableKind::kDense) return table.indices + row * table.row_stride + table.first_column;
  const int64_t begin = table.indptr[row];
  const int64_t end = table.indptr[row + 1];
  const bool inside = begin >= 0 && begin <= end && end <= table.num_indices && end - begin >= pages;
  return inside ? table.indices + begin : nullptr;
}

}  // namespace

BatchCopy::BatchCopy(const Batch& batch) : view_(batch.view), segments_(batch.segment_views) {
  if (view_.where != Where::kHost) return;
  const auto requests = static_cast<size_t>(view_.num_requests);
  struct Part {
    const int32_t** pointer;
    size_t count;
  };
  std::vector<Part> parts = {{&view_.cu_q, requests + 1}, {&view_.q_first_pos, requests}};
  parts.push_back({&view_.custom_mask.tail_len, requests});
  parts.push_back({&view_.kv_start, requests});
  parts.push_back({&view_.spans, 2 * static_cast<size_t>(view_.num_tokens)});
  if (view_.causal != nullptr) {
    causal_.reserve(requests + 1);  // an address also where there is nothing
    causal_.assign(view_.causal, view_.causal + requests);
    view_.causal = causal_.data();
  }
  for (size_t i = 0; i < segments_.size(); ++i) {
    const auto count = static_cast<size_t>(rows(i));
    parts.push_back({&segments_[i].kv_len, count});
    parts.push_back({&segments_[i].first_pos, count});
    parts.push_back({&segments_[i].group_indptr, count + 1});
  }
  size_t total = 0;
  for (const Part& part : parts) total += *part.pointer == nullptr ? 0 : part.count;
  values_.reserve(total);
  for (const Part& part : parts) {
    if (*part.pointer == nullptr) continue;
    const int32_t* const copied = values_.data() + values_.size();
    values_.insert(values_.end(), *part.pointer, *part.pointer + part.count);
    *part.pointer = copied;
  }
}

void require_offsets(const BatchCopy& batch, const Args& args) {
  const size_t count = std::min(batch.segments().size(), args.segments.size());
  for (size_t i = 0; i < count; ++i) {
    const SegmentArg& segment = args.segments[i];
    if (batch.segments()[i].source != KvSource::kRagged || segment.view.ragged.indptr == nullptr) continue;
    if (segment.ragged_offsets <= batch.rows(i)) {
      refuse("segments[" + std::to_string(i) + "].ragged.indptr has " + std::to_string(segment.ragged_offsets) +
             " entries; the plan's " + std::to_string(batch.rows(i)) + " rows need one more than rows");
    }
  }
}

const AttentionArgs& TableCopies::copy(const BatchCopy& batch, int32_t page_size, const Args& args) {
  view_ = args.view;
  view_.segments = copy(batch, page_size, std::span<const SegmentArg>(args.segments));
  return view_;
}

std::span<const SegmentArgs> TableCopies::copy(const BatchCopy& batch, int32_t page_size,
                                               std::span<const SegmentArg> segments) {
  segments_.clear();
  for (const SegmentArg& segment : segments) segments_.push_back(segment.view);
  id_ends_.assign(segments_.size(), 0);
  if (batch.view().where != Where::kHost || segments_.size() != batch.segments().size()) return segments_;
  if (indices_.size() < segments_.size()) {
    indices_.resize(segments_.size());
    indptrs_.resize(segments_.size());
  }
  for (size_t i = 0; i < segments_.size(); ++i) {
    if (batch.segments()[i].source == KvSource::kPaged) {
      copy_table(batch, i, page_size, segments[i]);
    } else if (segments_[i].ragged.indptr != nullptr) {
      const auto entries = static_cast<size_t>(batch.rows(i)) + 1;
      indptrs_[i].assign(segments_[i].ragged.indptr, segments_[i].ragged.indptr + entries);
      segments_[i].ragged.indptr = indptrs_[i].data();
    }
  }
  return segments_;
}

bool TableCopies::ids_are_pages(size_t segment, int64_t num_pages) const {
  return id_ends_[segment] <= std::min(num_pages, int64_t{1} << 31);
}

bool TableCopies::ids_are_pages() const {
  for (size_t i = 0; i < segments_.size(); ++i) {
    if (!ids_are_pages(i, segments_[i].cache.num_pages)) return false;
  }
  return true;
}

void TableCopies::copy_table(const BatchCopy& batch, size_t segment, int32_t page_size, const SegmentArg& args) {
  const int32_t rows = batch.rows(segment);
  const int32_t* const kv_len = batch.segments()[segment].kv_len;
  PageTableView table = args.view.table;
  id_ends_[segment] = kUnknownEnd;
  if (table.indices == nullptr || table.num_rows < rows || table.first_column < 0) return;
  std::vector<int32_t>& offsets = indptrs_[segment];
  if (table.kind == PageTableKind::kCsr) {
    offsets.assign(table.indptr, table.indptr + rows + 1);
    table.indptr = offsets.data();
    segments_[segment].table.indptr = offsets.data();
    segments_[segment].table.num_rows = rows;
  }
  int64_t total = 0;
  for (int32_t row = 0; row < rows; ++row) {
    const int64_t pages = pages_of(kv_len[row], page_size);
    if (table.kind == PageTableKind::kDense && pages > 0 && table.first_column + pages > args.table_columns) {
      refuse("segments[" + std::to_string(segment) + "].table.entries has " + std::to_string(args.table_columns) +
             " columns; row " + std::to_string(row) + " needs " + std::to_string(pages) + " pages from column " +
             std::to_string(table.first_column));
    }
    if (pages > 0 && find_row(table, row, pages) == nullptr) return;
    total += pages;
  }
  if (total > std::numeric_limits<int32_t>::max()) {
    throw Error(ErrorCode::kUnsupported,
                "a segment's rows have " + std::to_string(total) + " pages; at most 2147483647 are taken");
  }
  std::vector<int32_t>& ids = indices_[segment];
  ids.resize(static_cast<size_t>(total));
  offsets.resize(static_cast<size_t>(rows) + 1);
  int32_t next = 0;
  int64_t end = 0;
  for (int32_t row = 0; row < rows; ++row) {
    const int64_t pages = pages_of(kv_len[row], page_size);
    if (pages > 0) end = std::max(end, copy_ids(find_row(table, row, pages), pages, ids.data() + next));
    offsets[static_cast<size_t>(row)] = next;  // read by find_row before
    next += static_cast<int32_t>(pages);
  }
  offsets[static_cast<size_t>(rows)] = next;
  id_ends_[segment] = end;
  segments_[segment].table = {.kind = PageTableKind::kCsr,
                              .indices = ids.data(),
                              .num_indices = total,
                              .indptr = offsets.data(),
                              .num_rows = rows};
}

}  // namespace folio::python
