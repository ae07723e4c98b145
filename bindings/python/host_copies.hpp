#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "views.hpp"

/// Copies of what a call both checks and then follows: lengths, offsets, page ids. While the GIL is released another
/// thread may rewrite the arrays; what was checked must be what is used.
namespace folio::python {

/// A batch whose lengths, where they lie on the host, are its own.
class BatchCopy {
 public:
  explicit BatchCopy(const Batch& batch);
  BatchCopy(BatchCopy&&) noexcept = default;
  BatchCopy& operator=(BatchCopy&&) noexcept = default;

  BatchView view() const {
    BatchView whole = view_;
    whole.segments = segments_;
    return whole;
  }
  std::span<const KvSegment> segments() const { return segments_; }
  int32_t rows(size_t segment) const {
    const KvSegment& one = segments_[segment];
    return one.group_indptr != nullptr ? one.num_groups : view_.num_requests;
  }

 private:
  BatchView view_;
  std::vector<KvSegment> segments_;
  std::vector<uint8_t> causal_;
  std::vector<int32_t> values_;  ///< moves with the object, and stays where it is
};

/// Throws Error(kInvalidArgument) where a ragged segment has fewer offsets than its rows need.
void require_offsets(const BatchCopy& batch, const Args& args);

/// The tables and offsets of a batch, as far as it uses them: O(pages). To be reused, so that a warm one allocates
/// nothing. Tables of the wrong shape are left as they are, for `run` to refuse.
class TableCopies {
 public:
  /// The arguments with their copies; valid until the next call. Throws Error(kInvalidArgument) where a dense table has
  /// too few columns for a row, kUnsupported for more than 2^31 - 1 pages.
  const AttentionArgs& copy(const BatchCopy& batch, int32_t page_size, const Args& args);
  /// The same for segments that have tables and offsets, but no caches and no arrays of a layer yet.
  std::span<const SegmentArgs> copy(const BatchCopy& batch, int32_t page_size, std::span<const SegmentArg> segments);
  /// Whether every page id of a segment's copy is one of a cache's; not so of a table that was left as it is.
  bool ids_are_pages(size_t segment, int64_t num_pages) const;
  /// The same of all segments, each in its own cache: `validate` has nothing to find.
  bool ids_are_pages() const;

 private:
  void copy_table(const BatchCopy& batch, size_t segment, int32_t page_size, const SegmentArg& args);

  AttentionArgs view_;
  std::vector<SegmentArgs> segments_;
  std::vector<std::vector<int32_t>> indices_, indptrs_;  ///< one a segment
  std::vector<int64_t> id_ends_;  ///< one a segment: above every page id; negative ids count as the highest
};

}  // namespace folio::python
