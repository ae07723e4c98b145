#pragma once

#include <cstddef>
#include <cstdint>

#include "folio/types/attention.hpp"
#include "folio/types/export.hpp"
#include "scheduler/plan_image.hpp"
#include "scheduler/split_rule.hpp"
#include "scheduler/static_scheduler.hpp"

/// FOLIO_KEEP_LOOP keeps a loop rolled on the device: each instruction runs only a few times, so instruction fetches
/// dominate. FOLIO_UNROLL unrolls loops over arrays that must stay in registers.
#if defined(__CUDACC__)
#define FOLIO_KEEP_LOOP _Pragma("unroll 1")
#define FOLIO_UNROLL _Pragma("unroll")
#else
#define FOLIO_KEEP_LOOP
#define FOLIO_UNROLL
#endif

namespace folio::inline v0::scheduler {

/// Totals of everything that a plan numbers in order.
struct WorkSums {
  int32_t work_tiles = 0;
  int32_t partial_rows = 0;
  int32_t sources = 0;
  int32_t combine_tiles = 0;
};

/// Where the tile space may be cut before one worker's range, and which choice is taken.
struct CutSearch {
  CutChoices choices;  ///< around the ideal position
  int64_t below;       ///< choices.below and above as KV tiles from the output tile's begin
  int64_t above;
  int64_t price;      ///< fixed splits: partial rows that a first cut of the output tile would cost
  uint32_t followed;  ///< ChoiceMap: the choice that follows from each choice of the previous cut
  uint32_t taken;     ///< the choice that is taken
  int32_t request;    ///< of the output tile that contains the ideal position
  int32_t head;
  int32_t tile;  ///< that output tile's row tile
};

/// The cut before one worker's range, and how the worker's results are numbered.
struct CutPlace {
  int64_t position;
  int32_t work_tile;     ///< uncut work tiles before the one that contains the cut or begins at it
  int32_t token;         ///< the cut within that work tile: a local token, or -1 at its begin
  int32_t output_start;  ///< uncut work tiles before the output tile, if the cut lies within one, else -1
  int32_t output_end;    ///< ... and before the next output tile
  int32_t request;       ///< that output tile's
  int32_t head;
  int32_t row_begin;
  int32_t row_end;
  WorkSums before;            ///< of the earlier workers
  int32_t tail_partial;       ///< first partial row of the output tile that the next worker continues
  int32_t tail_combine_tile;  ///< number of that output tile's combine tile
  FOLIO_HOST_DEVICE bool inside() const { return output_start >= 0; }
};

/// Dynamic schedule: a row tile's KV splits, and the sums over the row tiles before it, per KV head.
struct RowTileSplits {
  int32_t kv_tiles;
  int32_t splits;  ///< KV splits; 1: not split
  int32_t dynamic_tiles;
  int32_t continuations;
  int32_t sources;
  int32_t combine_tiles;
  int32_t partial_rows;
};

/// Scratch memory of one planning on the device, besides the image. If it fits, it lies in shared memory until the
/// work is divided. Then its first `kept_bytes` go to the image, for the kernel that emits work tiles.
struct DeviceScratch {
  CutPlace* places = nullptr;            ///< [workers + 1]; static schedule
  SplitRule* rule = nullptr;             ///< dynamic schedule
  int64_t* cost_before = nullptr;        ///< [row tiles + 1], cost of the row tiles before, per KV head
  RowTileSplits* tile_splits = nullptr;  ///< [row tiles + 1]; dynamic schedule
  int32_t* tile_begin = nullptr;         ///< [requests + 1], row tiles before the request at a place, per KV head
  int32_t* tile_request = nullptr;       ///< [row tiles], the place of the request whose row tile it is
  int32_t* work_tiles_before = nullptr;  ///< [row tiles + 1], work tiles of the row tiles before, uncut, per KV head
  CutSearch* searches = nullptr;         ///< [workers + 1]; static schedule
  /// TileOrder::kLpt: [requests], the request at each place of the order. Otherwise a request's number is its place.
  int32_t* request_at = nullptr;
  /// TileOrder::kLpt: [requests], half_octave of the cost of a request's last row tile; -1 without rows.
  int32_t* request_octave = nullptr;
};

struct DeviceScratchSizes {
  int64_t requests;
  int64_t row_tiles;
  int64_t workers;
  bool dynamic;
  bool lpt;
  /// Bytes that emitting work tiles needs, a multiple of 16.
  FOLIO_HOST_DEVICE constexpr int64_t kept_bytes() const {
    const int64_t of_schedule =
        dynamic ? int64_t{sizeof(SplitRule)} + cost_bytes() + (row_tiles + 1) * int64_t{sizeof(RowTileSplits)}
                : (workers + 1) * int64_t{sizeof(CutPlace)};
    const int64_t ints = requests + 1 + 2 * row_tiles + 1 + (lpt ? 2 * requests : 0);
    const int64_t bytes = of_schedule + ints * int64_t{sizeof(int32_t)};
    return (bytes + 15) / 16 * 16;
  }
  FOLIO_HOST_DEVICE constexpr int64_t bytes() const {
    return kept_bytes() + (dynamic ? 0 : cost_bytes() + (workers + 1) * int64_t{sizeof(CutSearch)});
  }
  FOLIO_HOST_DEVICE constexpr int64_t cost_bytes() const { return (row_tiles + 1) * int64_t{sizeof(int64_t)}; }
};

/// Divides `memory` of sizes.bytes() bytes, aligned to 8.
FOLIO_HOST_DEVICE inline DeviceScratch carve_device_scratch(std::byte* memory, const DeviceScratchSizes& sizes) {
  DeviceScratch scratch;
  std::byte* next = memory;
  if (sizes.dynamic) {
    scratch.rule = reinterpret_cast<SplitRule*>(next);
    scratch.cost_before = reinterpret_cast<int64_t*>(scratch.rule + 1);
    scratch.tile_splits = reinterpret_cast<RowTileSplits*>(scratch.cost_before + sizes.row_tiles + 1);
    next = reinterpret_cast<std::byte*>(scratch.tile_splits + sizes.row_tiles + 1);
  } else {
    scratch.places = reinterpret_cast<CutPlace*>(next);
    scratch.cost_before = reinterpret_cast<int64_t*>(memory + sizes.kept_bytes());
    scratch.searches = reinterpret_cast<CutSearch*>(scratch.cost_before + sizes.row_tiles + 1);
    next = reinterpret_cast<std::byte*>(scratch.places + sizes.workers + 1);
  }
  scratch.tile_begin = reinterpret_cast<int32_t*>(next);
  scratch.tile_request = scratch.tile_begin + sizes.requests + 1;
  scratch.work_tiles_before = scratch.tile_request + sizes.row_tiles;
  if (sizes.lpt) {
    scratch.request_at = scratch.work_tiles_before + sizes.row_tiles + 1;
    scratch.request_octave = scratch.request_at + sizes.requests;
  }
  return scratch;
}

}  // namespace folio::inline v0::scheduler

/// The device scheduler: plans where the lengths are. The same functions run as one CTA on a GPU, and in tests as one
/// or several host threads. `Group` is the group that runs them, with rank(), size(), sync() and exclusive_scan().
namespace folio::inline v0::scheduler::device {

/// A segment of requests: device addresses of its lengths, and what the host knows.
struct Segment {
  const int32_t* kv_len;
  const int32_t* first_pos;  ///< null: where the segment before ends
  KvSource source;
  SegmentMask mask;
  KvShard shard;
  MaskBounds bounds;
};

/// All that planning reads, apart from the lengths. Passed by value.
struct PlanInput {
  const int32_t* cu_q;
  const int32_t* q_first_pos;  ///< or null
  MaskRules rules;
  QueryMasks masks;
  int32_t num_requests;
  int32_t num_tokens;
  int32_t max_q_len;  ///< the batch's bound and the op's, whichever is lower
  int32_t max_kv_len;
  int32_t num_segments;
  Segment segments[kMaxImageSegments];
  int32_t num_kv_heads;
  int32_t group_size;
  int32_t min_rows;  ///< as in SchedulerConfig
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
  int32_t max_splits;          ///< as in SchedulerConfig
  int64_t swizzle_tiles;       ///< KV tiles of one head that the L2 has room for; 0: any number
  DeviceScratchSizes scratch;  ///< for a batch with these counts
  PlanImageLayout layout;
};

/// One planning: its input, its scratch and where it writes.
struct Job {
  const PlanInput& in;
  DeviceScratch scratch;
  PlanImageHeader* header;
  SegmentLengths* segments;
  int32_t* cu_q;               ///< [R + 1]
  int32_t* q_first_pos;        ///< [R]
  int32_t* kv_len;             ///< [segments, R]
  int32_t* first_pos;          ///< [segments, R]
  int32_t* visible_positions;  ///< [num_tokens, 2], or null where the mask has no more rules than causal and window
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
        visible_positions(input.rules.has_more() ? first_pos + int64_t{input.num_segments} * input.num_requests
                                                 : nullptr),
        worker_indptr(reinterpret_cast<int32_t*>(image + input.layout.worker_indptr)),
        combine_tiles(reinterpret_cast<CombineTile*>(image + input.layout.combine_tiles)),
        combine_sources(reinterpret_cast<int32_t*>(image + input.layout.combine_sources)),
        work_tiles(reinterpret_cast<WorkTile*>(image + input.layout.work_tiles)) {}

  FOLIO_HOST_DEVICE bool dynamic() const { return in.tile.schedule == Schedule::kDynamic; }
  FOLIO_HOST_DEVICE bool lpt() const { return in.tile.order == TileOrder::kLpt; }
  /// The request at a place of the order.
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

/// One thread's contiguous share of `count` elements: [begin, end).
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
