#pragma once

#include <cstdint>

#include "planner/plan_view.hpp"

namespace folio::inline v0::planner {

/// Writes an item for KV heads [begin, end) to where `place(head)` says. Value by value: an item that is copied whole
/// has to be in memory first, where a wide read of what was just written narrowly waits until all earlier writes are
/// done.
template <typename Place>
void copy_to_heads(const WorkItem& item, int32_t begin, int32_t end, const Place& place) {
  const int32_t segment = item.segment;
  const int32_t kv_row = item.kv_row;
  const int32_t request = item.request;
  const int32_t row_begin = item.row_begin;
  const int32_t row_end = item.row_end;
  const int32_t kv_begin = item.kv_begin;
  const int32_t kv_end = item.kv_end;
  const int32_t partial = item.partial;
  const uint32_t flags = item.flags;
  const int32_t merge = item.merge;
  for (int32_t head = begin; head < end; ++head) {
    *place(head) = {.segment = segment,
                    .kv_row = kv_row,
                    .kv_head = head,
                    .request = request,
                    .row_begin = row_begin,
                    .row_end = row_end,
                    .kv_begin = kv_begin,
                    .kv_end = kv_end,
                    .partial = partial,
                    .flags = flags,
                    .merge = merge};
  }
}

}  // namespace folio::inline v0::planner
