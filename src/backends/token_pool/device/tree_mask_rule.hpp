#pragma once

#include <cstdint>

#include "backends/token_pool/device/draft_tree_rule.hpp"
#include "folio/backends/token_pool/draft_tree.hpp"
#include "folio/types/export.hpp"

/// Masks of draft trees, a byte at a time: what a device kernel, a thread a byte, writes.
namespace folio::inline v0::backends::token_pool {

/// A form of the mask and what belongs to it.
struct TreeMaskShape {
  TreeMaskForm form = TreeMaskForm::kFullMask;
  int32_t num_nodes = 1;
  int32_t window_left = -1;

  /// The cached tokens have columns.
  FOLIO_HOST_DEVICE constexpr bool is_full() const {
    return form == TreeMaskForm::kFullMask || form == TreeMaskForm::kFullBits;
  }
  /// A cell is a byte, not a bit.
  FOLIO_HOST_DEVICE constexpr bool is_bytes() const {
    return form == TreeMaskForm::kFullMask || form == TreeMaskForm::kQlenOnly;
  }
  /// Cached tokens that have columns.
  FOLIO_HOST_DEVICE constexpr int64_t cached(int32_t seq_len) const { return is_full() && seq_len > 0 ? seq_len : 0; }
  /// Bytes of a row of kQlenOnlyBitpacking.
  FOLIO_HOST_DEVICE constexpr int64_t word_bytes() const { return num_nodes <= 8 ? 1 : num_nodes <= 16 ? 2 : 4; }
  /// Cells from one row to the next.
  FOLIO_HOST_DEVICE constexpr int64_t row_cells(int64_t cached_tokens) const {
    return form == TreeMaskForm::kQlenOnlyBitpacking ? word_bytes() * 8 : cached_tokens + num_nodes;
  }
  /// Bytes of one request's part, below 2^63: fewer than 2^31 nodes of fewer than 2^32 cells.
  FOLIO_HOST_DEVICE constexpr int64_t request_bytes(int32_t seq_len) const {
    const int64_t cells = num_nodes * row_cells(cached(seq_len));
    return is_bytes() ? cells : (cells + 7) / 8;
  }
};

/// Byte `byte` of a request's part.
FOLIO_HOST_DEVICE constexpr uint8_t mask_byte(const TreeMaskShape& shape, const int32_t* parents, int32_t seq_len,
                                              int64_t byte) {
  const int64_t cached = shape.cached(seq_len);
  const int64_t columns = cached + shape.num_nodes;
  const int64_t row_cells = shape.row_cells(cached);
  const int32_t cells = shape.is_bytes() ? 1 : 8;
  int64_t row = byte * cells / row_cells;
  int64_t column = byte * cells % row_cells;
  uint32_t bits = 0;
  int64_t first = -1;  // the first cached token that the row sees
  for (int32_t i = 0; i < cells && row < shape.num_nodes; ++i) {
    const auto node = static_cast<int32_t>(row);
    bool seen = false;
    if (column < cached) {
      if (first < 0)
        first = first_cached(cached, shape.window_left < 0 ? 0 : depth_of(parents, node), shape.window_left);
      seen = column >= first;
    } else if (column < columns) {
      seen = sees_node(parents, node, static_cast<int32_t>(column - cached), shape.window_left);
    }
    if (seen) bits |= 1u << i;
    if (++column == row_cells) {
      column = 0;
      first = -1;
      ++row;
    }
  }
  return static_cast<uint8_t>(bits);
}

/// The batch's mask, B requests.
struct TreeMaskJob {
  TreeMaskShape shape;
  const int32_t* parents = nullptr;
  const int32_t* seq_lens = nullptr;
  int32_t num_requests = 0;
  uint8_t* mask = nullptr;
  int64_t capacity = 0;  ///< bytes; those behind are not written

  /// Bytes of a request, or one more than fit anywhere: sums of these do not overflow.
  FOLIO_HOST_DEVICE constexpr int64_t bounded_bytes(int32_t r) const {
    const int64_t bytes = shape.request_bytes(seq_lens[r]);
    return bytes <= capacity ? bytes : capacity + 1;
  }
};

/// A thread's share of a request's part, which begins at `offset`.
template <typename Report>
FOLIO_HOST_DEVICE constexpr void write_mask(const TreeMaskJob& job, int32_t r, int64_t offset, int32_t lane,
                                            int32_t lanes, Report&& report) {
  const int32_t* const parents = job.parents + int64_t{r} * job.shape.num_nodes;
  const int32_t seq_len = job.seq_lens[r];
  const int64_t bytes = job.bounded_bytes(r);
  const int64_t room = job.capacity - offset;
  if (lane == 0) {
    if (job.shape.is_full() && seq_len < 0) report(ListReport{0, KvRangeFault::kLength, r, 0, seq_len, 0});
    if (bytes > room) report(ListReport{0, KvRangeFault::kMaskBytes, r, 0, offset + bytes, job.capacity});
  }
  for (int32_t node = lane; node < job.shape.num_nodes; node += lanes) {
    const ListReport found = parent_fault(parents, r, node);
    if (found.fault != KvRangeFault::kNone) report(found);
  }
  const int64_t count = bytes < room ? bytes : room;
  for (int64_t byte = lane; byte < count; byte += lanes) {
    job.mask[offset + byte] = mask_byte(job.shape, parents, seq_len, byte);
  }
}

}  // namespace folio::inline v0::backends::token_pool
