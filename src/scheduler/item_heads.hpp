#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "scheduler/plan_view.hpp"

namespace folio::inline v0::scheduler {

/// A work tile as it is written for one KV head after the other. Its values stand in vectors as they lie in memory: a
/// plan's work tiles are most of what planning writes, and two wide stores take the place of eight narrow ones. (An
/// work tile that is copied whole has to be in memory first, where a wide read of what was just written narrowly waits
/// until all earlier writes are done.)
class WorkTileWriter {
 public:
  /// But for its kv_head.
  explicit WorkTileWriter(const WorkTile& work_tile)
      : keys_{work_tile.segment, work_tile.kv_row, 0, work_tile.request},
        rows_{work_tile.row_begin, work_tile.row_end, work_tile.kv_begin, work_tile.kv_end},
        partial_(work_tile.partial),
        flags_(work_tile.flags),
        combine_tile_(work_tile.combine_tile) {}

  void write(WorkTile* to, int32_t head) const { write(to, head, partial_); }
  void write(WorkTile* to, int32_t head, int32_t partial) const {
    const Four keys = keys_ | Four{0, 0, head, 0};
    std::memcpy(&to->segment, &keys, sizeof(Four));
    std::memcpy(&to->row_begin, &rows_, sizeof(Four));
    to->partial = partial;
    to->flags = flags_;
    to->combine_tile = combine_tile_;
  }

 private:
  using Four = int32_t __attribute__((vector_size(16)));
  static_assert(offsetof(WorkTile, segment) == 0 && offsetof(WorkTile, kv_row) == 4 &&
                offsetof(WorkTile, kv_head) == 8 && offsetof(WorkTile, request) == 12 &&
                offsetof(WorkTile, row_begin) == 16 && offsetof(WorkTile, row_end) == 20 &&
                offsetof(WorkTile, kv_begin) == 24 && offsetof(WorkTile, kv_end) == 28);

  Four keys_;
  Four rows_;
  int32_t partial_;
  uint32_t flags_;
  int32_t combine_tile_;
};

}  // namespace folio::inline v0::scheduler
