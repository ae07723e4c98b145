#pragma once

#include <cstddef>
#include <cstdint>

#include "folio/types/attention.hpp"
#include "folio/types/export.hpp"
#include "scheduler/device/scratch.hpp"
#include "scheduler/partition_rule.hpp"
#include "scheduler/plan_image.hpp"
#include "scheduler/plan_layout.hpp"

/// Before a loop: not to be unrolled on the device. Every instruction of the scheduler runs a few times only, so what
/// it mostly waits for are instructions. FOLIO_UNROLL: the opposite, for loops over arrays that are to lie in
/// registers.
#if defined(__CUDACC__)
#define FOLIO_KEEP_LOOP _Pragma("unroll 1")
#define FOLIO_UNROLL _Pragma("unroll")
#else
#define FOLIO_KEEP_LOOP
#define FOLIO_UNROLL
#endif

/// Planning where the lengths are. The same functions run as one CTA on a GPU and as one thread, or several,
/// on the host in tests: `Group` is who runs them together, with rank(), size(), sync() and exclusive_scan().
namespace folio::inline v0::scheduler::device {

/// A segment of requests: addresses on the device, the rest as the host knows it.
struct Segment {
  const int32_t* kv_len;
  const int32_t* first_pos;  ///< or null
  KvSource source;
  SegmentMask mask;
  KvShard shard;
  MaskBounds bounds;
};

/// All that planning reads, apart from the lengths themselves. Passed by value.
struct PlanInput {
  const int32_t* cu_q;
  const int32_t* q_first_pos;  ///< or null
  int32_t num_requests;
  int32_t num_tokens;
  int32_t max_q_len;  ///< the batch's bound and the op's, whichever is lower
  int32_t max_kv_len;
  int32_t num_segments;
  Segment segments[kMaxImageSegments];
  int32_t num_kv_heads;
  int32_t group_size;
  int32_t min_rows;  ///< of the requests that the plan takes
  int32_t max_rows;
  TileShape tile;
  int32_t num_workers;
  int32_t fixed_split_tokens;  ///< 0: splits are not fixed
  int32_t tile_cost;
  int32_t row_cost;
  int32_t start_cost;
  int32_t start_row_cost;
  int32_t start_free_rows;
  int64_t fixed_split_budget;
  int64_t min_split_tiles;
  int64_t split_budget;        ///< per KV head
  int64_t swizzle_tiles;       ///< KV tiles of one head; 0 is any number
  DeviceScratchSizes scratch;  ///< for a batch with these counts
  PlanImageLayout layout;
};

/// One planning: its input and where it writes.
struct Job {
  const PlanInput& in;
  DeviceScratch scratch;
  PlanImageHeader* header;
  SegmentLengths* segments;
  int32_t* cu_q;         ///< [R + 1]
  int32_t* q_first_pos;  ///< [R]
  int32_t* kv_len;       ///< [segments, R]
  int32_t* first_pos;    ///< [segments, R]
  int32_t* worker_indptr;
  CombineTile* combine_tiles;
  int32_t* combine_sources;
  WorkTile* work_tiles;

  FOLIO_HOST_DEVICE Job(const PlanInput& input, std::byte* image, std::byte* scratch_memory)
      : in(input),
        scratch(carve_device_scratch(scratch_memory, input.scratch)),
        header(reinterpret_cast<PlanImageHeader*>(image)),
        segments(reinterpret_cast<SegmentLengths*>(image + input.layout.segments)),
        cu_q(reinterpret_cast<int32_t*>(image + input.layout.lengths)),
        q_first_pos(cu_q + input.num_requests + 1),
        kv_len(q_first_pos + input.num_requests),
        first_pos(kv_len + int64_t{input.num_segments} * input.num_requests),
        worker_indptr(reinterpret_cast<int32_t*>(image + input.layout.worker_indptr)),
        combine_tiles(reinterpret_cast<CombineTile*>(image + input.layout.combine_tiles)),
        combine_sources(reinterpret_cast<int32_t*>(image + input.layout.combine_sources)),
        work_tiles(reinterpret_cast<WorkTile*>(image + input.layout.work_tiles)) {}

  FOLIO_HOST_DEVICE bool dynamic() const { return in.tile.schedule == Schedule::kDynamic; }
  FOLIO_HOST_DEVICE bool lpt() const { return in.tile.order == TileOrder::kLpt; }
  /// The request at a place of the tile space.
  FOLIO_HOST_DEVICE int32_t request_at(int32_t place) const { return lpt() ? scratch.request_at[place] : place; }
  FOLIO_HOST_DEVICE bool fixed_splits() const { return in.fixed_split_tokens > 0; }
  FOLIO_HOST_DEVICE int32_t num_row_tiles() const { return scratch.tile_begin[in.num_requests]; }
};

/// The last i in [0, count) with key(i) <= value; key must ascend, key(0) <= value.
template <typename Value, typename Key>
FOLIO_HOST_DEVICE int32_t last_at_or_below(int32_t count, Value value, const Key& key) {
  int32_t low = 0;
  int32_t high = count;
  FOLIO_KEEP_LOOP
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    if (key(middle) <= value) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

/// One thread's share of `count` things that are to be scanned in order: [begin, end).
struct Share {
  int32_t begin;
  int32_t end;
};
template <typename Group>
FOLIO_HOST_DEVICE Share share_of(const Group& group, int32_t count) {
  const int32_t each = (count + group.size() - 1) / group.size();
  const int64_t begin = int64_t{each} * group.rank();
  return {static_cast<int32_t>(begin < count ? begin : count),
          static_cast<int32_t>(begin + each < count ? begin + each : count)};
}

}  // namespace folio::inline v0::scheduler::device
