#pragma once

#include <cstdint>

#include "folio/types/attention.hpp"
#include "folio/types/export.hpp"

/// Keeps a function out of line on the device. A 64-bit division inlines to about a hundred instructions.
#if defined(__CUDACC__)
#define FOLIO_CALLED __noinline__
#else
#define FOLIO_CALLED
#endif

/// Which keys a query may attend to: mask bounds, visible ranges, shards. All functions are pure and work on 64-bit
/// integers. They allocate nothing, so the host, the device scheduler and the kernels run the same code.
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

/// Bounds of the keys visible to a query at position p: [p - left, p + right]. An unbounded side has no limit.
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

/// value / divisor for numbers below 2^32. On a GPU it costs a fraction of a 64-bit division.
FOLIO_HOST_DEVICE constexpr int64_t narrow_div(int64_t value, int64_t divisor) {
  return static_cast<int64_t>(static_cast<uint32_t>(value) / static_cast<uint32_t>(divisor));
}

/// Offset of local token `local` of a shard from the segment's first position.
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

/// The inverse of shard_offset: number of local tokens of the shard at offsets below `offset`. The shard counts as
/// endless.
FOLIO_HOST_DEVICE constexpr int64_t shard_count_below(const KvShard& shard, int64_t offset) {
  if (offset <= 0) return 0;
  return shard.world == 1 ? offset : stripes_below(shard, offset);
}

/// The bounds of a batch's queries in a segment. The kernel applies the bits of a custom mask; here only the window
/// bounds it.
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

/// The local tokens visible to at least one query at positions [p_lo, p_hi]. p_lo <= p_hi; either may be negative.
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

/// The local tokens visible to the query at position p: exactly these, apart from a custom mask's bits.
FOLIO_HOST_DEVICE constexpr TokenRange visible_range(const SegmentSpan& segment, const MaskBounds& bounds, int64_t p) {
  return visible_range(segment, bounds, p, p);
}

/// KV tiles of `width` tokens, counted from local token 0, that a range overlaps. All numbers are below 2^31.
FOLIO_HOST_DEVICE constexpr int64_t tiles_touched(const TokenRange& range, int64_t width) {
  return range.empty() ? 0 : narrow_div(range.end + width - 1, width) - narrow_div(range.begin, width);
}

}  // namespace folio::inline v0::scheduler
