#pragma once

#include <cstdint>

#include "folio/types/attention.hpp"
#include "folio/types/export.hpp"

/// A function that the device calls instead of repeating its code: 64-bit divisions are a hundred instructions each.
#if defined(__CUDACC__)
#define FOLIO_CALLED __noinline__
#else
#define FOLIO_CALLED
#endif

/// The arithmetic of planning: which keys a query sees, and where a line of work is cut between workers. Pure functions
/// of integers, 64-bit inside, without containers or allocation, so that a device scheduler runs the very same ones.
namespace folio::inline v0::scheduler {

/// A half-open range of a segment's local tokens. Empty ranges are {0, 0}.
struct TokenRange {
  int64_t begin = 0;
  int64_t end = 0;
  FOLIO_HOST_DEVICE constexpr bool empty() const { return begin >= end; }
  friend constexpr bool operator==(const TokenRange&, const TokenRange&) = default;
};

/// One row of a segment: where its tokens stand in the request's sequence.
struct SegmentSpan {
  int64_t first_pos = 0;
  int64_t kv_len = 0;  ///< local tokens
  KvShard shard;
};

/// What a query at position p sees: keys at positions [p - left, p + right]; an unbounded side sees everything.
struct MaskBounds {
  bool left_bounded = false;
  bool right_bounded = false;
  int64_t left = 0;
  int64_t right = 0;
};

FOLIO_HOST_DEVICE constexpr int64_t clamp_to(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : (value > high ? high : value);
}

FOLIO_HOST_DEVICE constexpr int64_t ceil_div(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

/// value / divisor of numbers below 2^32: a fraction of a 64-bit division on a GPU.
FOLIO_HOST_DEVICE constexpr int64_t narrow_div(int64_t value, int64_t divisor) {
  return static_cast<int64_t>(static_cast<uint32_t>(value) / static_cast<uint32_t>(divisor));
}

/// Offset from the segment's first position at which local token `local` of the shard stands.
FOLIO_HOST_DEVICE FOLIO_CALLED constexpr int64_t shard_offset(const KvShard& shard, int64_t local) {
  if (shard.world == 1) return local;
  const int64_t interleave = shard.interleave;
  return (local / interleave) * (shard.world * interleave) + shard.rank * interleave + local % interleave;
}

/// shard_count_below for world > 1 and positive offsets.
FOLIO_HOST_DEVICE FOLIO_CALLED constexpr int64_t stripes_below(const KvShard& shard, int64_t offset) {
  const int64_t interleave = shard.interleave;
  const int64_t stripe = shard.world * interleave;
  return (offset / stripe) * interleave + clamp_to(offset % stripe - shard.rank * interleave, 0, interleave);
}

/// The inverse count: how many local tokens of the shard stand at offsets below `offset` (of a shard without end).
FOLIO_HOST_DEVICE constexpr int64_t shard_count_below(const KvShard& shard, int64_t offset) {
  if (offset <= 0) return 0;
  return shard.world == 1 ? offset : stripes_below(shard, offset);
}

/// The bounds of a batch's queries in a segment. The bits of a custom mask are applied by the kernel; here it leaves
/// only the window.
FOLIO_HOST_DEVICE constexpr MaskBounds mask_bounds(MaskKind mask, SegmentMask segment_mask, int32_t window_left,
                                                   int32_t window_right) {
  MaskBounds bounds;
  if (segment_mask == SegmentMask::kAllVisible) return bounds;
  bounds.left_bounded = window_left >= 0;
  bounds.left = bounds.left_bounded ? window_left : 0;
  bounds.right_bounded = window_right >= 0 || mask == MaskKind::kCausal;
  bounds.right = mask == MaskKind::kCausal || window_right < 0 ? 0 : window_right;
  return bounds;
}

/// The local tokens that at least one query at positions [p_lo, p_hi] sees. p_lo <= p_hi; either may be negative.
FOLIO_HOST_DEVICE constexpr TokenRange visible_range(const SegmentSpan& segment, const MaskBounds& bounds, int64_t p_lo,
                                                     int64_t p_hi) {
  TokenRange range{0, segment.kv_len};
  if (bounds.left_bounded) {
    range.begin = shard_count_below(segment.shard, p_lo - bounds.left - segment.first_pos);
  }
  if (bounds.right_bounded) {
    const int64_t below = shard_count_below(segment.shard, p_hi + bounds.right + 1 - segment.first_pos);
    range.end = below < range.end ? below : range.end;
  }
  return range.empty() ? TokenRange{} : range;
}

/// The local tokens that the query at position p sees: exactly these, apart from a custom mask's bits.
FOLIO_HOST_DEVICE constexpr TokenRange visible_range(const SegmentSpan& segment, const MaskBounds& bounds, int64_t p) {
  return visible_range(segment, bounds, p, p);
}

/// Tiles of `width` tokens, counted from local token 0, that a range touches. All below 2^31.
FOLIO_HOST_DEVICE constexpr int64_t tiles_touched(const TokenRange& range, int64_t width) {
  return range.empty() ? 0 : narrow_div(range.end + width - 1, width) - narrow_div(range.begin, width);
}

/// All work of a batch in one line, measured in cost. It consists of output tiles (what one accumulation covers), each
/// of split granules: the splits between which it may be cut.
struct TileSpace {
  int64_t total = 0;
  int64_t granularity = 0;  ///< cost of the longest split granule
  int32_t num_workers = 1;
};

/// total * num_workers must stay below this for cut arithmetic to be exact.
inline constexpr int64_t kMaxScaledCost = int64_t{1} << 61;

/// Where the split of worker `worker` ideally begins, rounded down.
FOLIO_HOST_DEVICE constexpr int64_t ideal_cut(const TileSpace& space, int32_t worker) {
  return space.total * worker / space.num_workers;
}

/// Where the tile space may be cut near an ideal position: the output tile that contains it, and the split granule
/// boundaries around it.
struct CutChoices {
  int64_t output_begin = 0;
  int64_t output_end = 0;
  int64_t below = 0;      ///< the last split granule boundary at or before the ideal position
  int64_t above = 0;      ///< the first one after it
  bool divisible = true;  ///< false: only the output tile's ends
};

/// A cut and its distance from the ideal, times num_workers.
struct Cut {
  int64_t position = 0;
  int64_t deviation = 0;
};

/// Chooses where the split of worker `worker` begins, given where its predecessor's does. An end of an output tile is
/// taken where one lies less than a split granule away, so that nothing is split needlessly, else the nearer split
/// granule boundary; but always such that |deviation| and the change of deviation from cut to cut stay below one split
/// granule. A worker's load is the mean plus that change, hence: every load is less than one split granule (the
/// longest) away from the mean, and where all split granules cost the same, loads differ by at most one split granule.
/// Indivisible output tiles are exempt: they go to the nearer end.
FOLIO_HOST_DEVICE constexpr Cut choose_cut(const TileSpace& space, int32_t worker, const Cut& previous,
                                           const CutChoices& choices) {
  const int64_t limit = space.granularity * space.num_workers;
  // Where indivisible output tiles have thrown the tile space out of its bounds, it continues as if it stood at the
  // bound.
  const int64_t reference = clamp_to(previous.deviation, 1 - limit, limit - 1);
  const int64_t positions[4] = {choices.output_begin, choices.output_end, choices.below, choices.above};
  const int64_t ideal = space.total * worker;  // times num_workers, as deviations are
  const int64_t staying = previous.position * space.num_workers - ideal;
  Cut best;
  int best_rank = 3;
  int64_t best_distance = 0;
  for (int i = 0; i < 4; ++i) {
    if (i >= 2 && !choices.divisible) continue;
    const bool passed = positions[i] < previous.position;
    const int64_t position = passed ? previous.position : positions[i];
    const int64_t deviation = passed ? staying : positions[i] * space.num_workers - ideal;
    const int64_t distance = deviation < 0 ? -deviation : deviation;
    const int64_t change = deviation - reference;
    const bool within = distance < limit && change < limit && -change < limit;
    const int rank = within ? (i < 2 && !passed ? 0 : 1) : 2;
    if (rank < best_rank || (rank == best_rank && distance < best_distance)) {
      best = Cut{position, deviation};
      best_rank = rank;
      best_distance = distance;
    }
  }
  return best;
}

}  // namespace folio::inline v0::scheduler
