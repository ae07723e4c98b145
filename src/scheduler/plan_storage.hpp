#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#include "core/error.hpp"
#include "scheduler/plan_view.hpp"
#include "scheduler/scheduler.hpp"
#include "scheduler/tile_space.hpp"

namespace folio::inline v0::scheduler {

/// An array that only grows, so that planning allocates nothing once it has seen its largest batch. Unlike std::vector
/// it never initialises elements.
template <typename T>
class GrowBuffer {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  /// Room for `count` elements; the first `size()` keep their values.
  void reserve(int64_t count) {
    if (count <= capacity_) return;
    const int64_t grown = capacity_ + capacity_ / 2 > count ? capacity_ + capacity_ / 2 : count;
    try {
      auto larger = std::make_unique_for_overwrite<T[]>(static_cast<size_t>(grown));
      if (size_ > 0) std::memcpy(larger.get(), data_.get(), static_cast<size_t>(size_) * sizeof(T));
      data_ = std::move(larger);
    } catch (const std::bad_alloc&) {
      core::fail(ErrorCode::kOutOfMemory, "a plan needs an array of ", grown, " elements of ", sizeof(T),
                 " bytes, which the system does not have");
    }
    capacity_ = grown;
  }

  /// Forgets the elements, keeps the memory.
  void clear() noexcept { size_ = 0; }

  /// `count` elements with any values.
  T* resize(int64_t count) {
    reserve(count);
    size_ = count;
    return data_.get();
  }

  void push_back(const T& value) {
    if (size_ == capacity_) [[unlikely]] {
      const T copy = value;
      reserve(size_ + 1);
      data_[static_cast<size_t>(size_++)] = copy;
      return;
    }
    data_[static_cast<size_t>(size_++)] = value;
  }

  /// One more element, of any value, to be filled where it lies.
  T& add() {
    reserve(size_ + 1);
    return data_[static_cast<size_t>(size_++)];
  }

  int64_t size() const noexcept { return size_; }
  T* data() noexcept { return data_.get(); }
  const T* data() const noexcept { return data_.get(); }
  T& operator[](int64_t i) noexcept { return data_[static_cast<size_t>(i)]; }
  const T& operator[](int64_t i) const noexcept { return data_[static_cast<size_t>(i)]; }

 private:
  std::unique_ptr<T[]> data_;
  int64_t size_ = 0;
  int64_t capacity_ = 0;
};

/// Partial results of one output tile: [begin, end) of Arrays::partials.
struct PartialRange {
  int64_t begin;
  int64_t end;
};

/// All memory of a plan and of its making.
struct PlanStorage::Arrays {
  PlanView view;  ///< the plan; empty while there is none

  GrowBuffer<int32_t> lengths;  ///< every int32 array of lengths in the view, one after the other
  GrowBuffer<int64_t> mask_byte_indptr;
  GrowBuffer<SegmentLengths> segments;
  GrowBuffer<int32_t> worker_indptr;
  GrowBuffer<WorkTile> work_tiles;
  GrowBuffer<CombineTile> combine_tiles;
  GrowBuffer<int32_t> combine_sources;

  GrowBuffer<MaskBounds> mask_bounds;  ///< of each segment
  GrowBuffer<SharedSegment> shared;
  GrowBuffer<int32_t> group_blocks;  ///< of each group of each shared segment its block, or -1 without rows
  GrowBuffer<KeyRange> ranges;
  GrowBuffer<RowTile> tiles;
  GrowBuffer<Block> blocks;
  GrowBuffer<TileCoord> cuts;       ///< [num_workers + 1]; static schedule only
  GrowBuffer<int32_t> block_order;  ///< blocks in claim order; TileOrder::kLpt only
  GrowBuffer<int32_t> tile_splits;  ///< of each row tile: KV splits; dynamic schedule only
  GrowBuffer<int32_t> partials;     ///< partial rows of the output tiles with to_partial, one tile after the other
  GrowBuffer<PartialRange> output_partials;  ///< of each output tile with to_partial; only with shared segments
};

/// Writes one work tile for one KV head after the other. Work tiles are most of what planning writes, so the values
/// stand in vectors as they lie in memory: two wide stores replace eight narrow ones. Copying a WorkTile instead
/// would read widely what was just written narrowly, and stall on store forwarding.
class WorkTileWriter {
 public:
  /// Everything but kv_head comes from `work_tile`.
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
