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

/// An op's mask, as its config has it.
struct MaskRules {
  MaskKind kind = MaskKind::kCausal;
  int32_t window_left = -1;
  int32_t window_right = -1;
  int32_t attention_chunk = 0;
  int32_t span_window_left = 0;
  bool per_query = false;  ///< a batch may have arrays of QueryMasks
  /// Whether there is more than causal and window.
  FOLIO_HOST_DEVICE constexpr bool has_more() const { return per_query || attention_chunk > 0; }
};

/// The mask's rules in a config that has them under the names of AttentionConfig.
template <typename Config>
constexpr MaskRules mask_rules(const Config& config) {
  const bool per_query = config.features.has(Feature::kSpans) || config.features.has(Feature::kRequestCausal) ||
                         config.features.has(Feature::kKvStart);
  return {config.mask, config.window_left, config.window_right, config.attention_chunk, config.span_window_left,
          per_query};
}

/// Bounds of the keys visible to a query at position p: [p - left, p + right]. An unbounded side has no limit. Masks
/// with more rules (MaskRules::has_more) have an interval a query instead: PlanView::visible_positions.
struct MaskBounds {
  bool left_bounded = false;
  bool right_bounded = false;
  bool by_query = false;
  int64_t left = 0;
  int64_t right = 0;
};

/// What a batch says of single requests and queries; see BatchView. Null: nothing.
struct QueryMasks {
  const int32_t* kv_start = nullptr;  ///< [R]
  const uint8_t* causal = nullptr;    ///< [R]
  const int32_t* spans = nullptr;     ///< [num_tokens, 2]
};

/// What they say of one query.
struct QueryMask {
  bool has_start = false;
  bool causal = true;
  int32_t kv_start = 0;
  int32_t span_begin = 0;
  int32_t span_end = 0;
};

/// Key positions [first, last]. Empty where first > last.
struct PositionRange {
  int64_t first = 0;
  int64_t last = 0;
  FOLIO_HOST_DEVICE constexpr bool empty() const { return first > last; }
};

/// No position is beyond +-kPositionLimit: a side that has it is unbounded.
inline constexpr int64_t kPositionLimit = int64_t{1} << 40;

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

/// The bounds of a batch's queries in a segment. The kernel applies the bits of a custom mask; here only the other
/// rules bound it.
FOLIO_HOST_DEVICE constexpr MaskBounds mask_bounds(const MaskRules& rules, SegmentMask segment_mask) {
  MaskBounds bounds;
  if (segment_mask == SegmentMask::kAllVisible) return bounds;
  bounds.left_bounded = rules.window_left >= 0;
  bounds.left = bounds.left_bounded ? rules.window_left : 0;
  bounds.right_bounded = rules.window_right >= 0 || rules.kind == MaskKind::kCausal;
  bounds.right = rules.kind == MaskKind::kCausal || rules.window_right < 0 ? 0 : rules.window_right;
  bounds.by_query = rules.has_more();
  return bounds;
}

/// What the batch says of the query that is token `token` of the batch and belongs to `request`.
FOLIO_HOST_DEVICE constexpr QueryMask query_mask(const QueryMasks& masks, int32_t request, int32_t token) {
  QueryMask mask;
  if (masks.kv_start != nullptr) {
    mask.has_start = true;
    mask.kv_start = masks.kv_start[request];
  }
  if (masks.causal != nullptr) mask.causal = masks.causal[request] != 0;
  if (masks.spans != nullptr) {
    mask.span_begin = masks.spans[2 * int64_t{token}];
    mask.span_end = masks.spans[2 * int64_t{token} + 1];
  }
  return mask;
}

/// The first position of the chunk that contains `position`. Chunks begin at `start` and go on below it.
FOLIO_HOST_DEVICE FOLIO_CALLED constexpr int64_t chunk_begin(int64_t position, int64_t start, int32_t chunk) {
  const int64_t offset = position - start;
  const int64_t into = offset % chunk;
  return position - (into < 0 ? into + chunk : into);
}

/// The positions that the query at p may see: an interval, whatever the rules. Each rule gives one interval. Start,
/// chunk and window cut; a span adds. What lies between the mask's keys and the span's is visible, too.
FOLIO_HOST_DEVICE constexpr PositionRange visible_positions(const MaskRules& rules, const QueryMask& query, int64_t p) {
  PositionRange within{-kPositionLimit, kPositionLimit};
  if (query.has_start) within.first = query.kv_start;
  if (rules.attention_chunk > 0) {
    const int64_t begin = chunk_begin(p, query.kv_start, rules.attention_chunk);
    within.first = begin > within.first ? begin : within.first;
    within.last = begin + rules.attention_chunk - 1;
  }
  PositionRange own = within;
  if (rules.window_left >= 0 && p - rules.window_left > own.first) own.first = p - rules.window_left;
  const int64_t right = rules.window_right >= 0 ? p + rules.window_right : kPositionLimit;
  const int64_t last = rules.kind == MaskKind::kCausal && query.causal ? p : right;
  if (last < own.last) own.last = last;
  if (query.span_begin >= query.span_end) return own;
  PositionRange span{query.span_begin, int64_t{query.span_end} - 1};
  if (span.first < within.first) span.first = within.first;
  if (span.last > within.last) span.last = within.last;
  if (rules.span_window_left >= 0 && p - rules.span_window_left > span.first) {
    span.first = p - rules.span_window_left;
  }
  if (right < span.last) span.last = right;
  if (span.empty()) return own;
  if (own.empty()) return span;
  return {span.first < own.first ? span.first : own.first, span.last > own.last ? span.last : own.last};
}

/// The same as it stands in PlanView::visible_positions: two numbers, the first above the second where nothing is
/// visible. No key stands at 2^31 - 1.
FOLIO_HOST_DEVICE constexpr void store_visible_positions(const MaskRules& rules, const QueryMask& query, int64_t p,
                                                         int32_t* to) {
  constexpr int64_t kMost = 0x7fffffff;
  const PositionRange range = visible_positions(rules, query, p);
  to[0] = static_cast<int32_t>(range.empty() ? kMost : clamp_to(range.first, -kMost - 1, kMost));
  to[1] = static_cast<int32_t>(range.empty() ? -kMost - 1 : clamp_to(range.last, -kMost - 1, kMost));
}

/// A segment's local tokens at positions [first, last].
FOLIO_HOST_DEVICE constexpr TokenRange tokens_at(const SegmentSpan& segment, int64_t first, int64_t last) {
  TokenRange range{0, segment.kv_len};
  if (first > -kPositionLimit) range.begin = shard_count_below(segment.shard, first - segment.first_pos);
  if (last < kPositionLimit) {
    const int64_t below = shard_count_below(segment.shard, last + 1 - segment.first_pos);
    range.end = below < range.end ? below : range.end;
  }
  return range.empty() ? TokenRange{} : range;
}

/// The local tokens visible to at least one query at positions [p_lo, p_hi]. p_lo <= p_hi; either may be negative. Of
/// bounds without by_query.
FOLIO_HOST_DEVICE constexpr TokenRange visible_range(const SegmentSpan& segment, const MaskBounds& bounds, int64_t p_lo,
                                                     int64_t p_hi) {
  return tokens_at(segment, bounds.left_bounded ? p_lo - bounds.left : -kPositionLimit,
                   bounds.right_bounded ? p_hi + bounds.right : kPositionLimit);
}

/// The local tokens visible to the query that is token `token` of the batch, at position p: exactly these, apart from a
/// custom mask's bits. `positions`: PlanView::visible_positions.
FOLIO_HOST_DEVICE constexpr TokenRange visible_to_token(const SegmentSpan& segment, const MaskBounds& bounds,
                                                        const int32_t* positions, int32_t token, int64_t p) {
  int64_t first = bounds.left_bounded ? p - bounds.left : -kPositionLimit;
  int64_t last = bounds.right_bounded ? p + bounds.right : kPositionLimit;
  if (bounds.by_query) {
    first = positions[2 * int64_t{token}];
    last = positions[2 * int64_t{token} + 1];
  }
  return tokens_at(segment, first, last);
}

/// The local tokens visible to at least one of tokens [begin, end) of the batch, at positions from p on, and those
/// between them. O(1), or O(tokens) where positions count.
FOLIO_HOST_DEVICE constexpr TokenRange visible_to_tokens(const SegmentSpan& segment, const MaskBounds& bounds,
                                                         const int32_t* positions, int32_t begin, int32_t end,
                                                         int64_t p) {
  if (!bounds.by_query) return visible_range(segment, bounds, p, p + (end - begin) - 1);
  PositionRange all{kPositionLimit, -kPositionLimit};
  for (int32_t token = begin; token < end; ++token) {
    const int64_t first = positions[2 * int64_t{token}];
    const int64_t last = positions[2 * int64_t{token} + 1];
    if (first > last) continue;
    all.first = first < all.first ? first : all.first;
    all.last = last > all.last ? last : all.last;
  }
  return all.empty() ? TokenRange{} : tokens_at(segment, all.first, all.last);
}

/// KV tiles of `width` tokens, counted from local token 0, that a range overlaps. All numbers are below 2^31.
FOLIO_HOST_DEVICE constexpr int64_t tiles_touched(const TokenRange& range, int64_t width) {
  return range.empty() ? 0 : narrow_div(range.end + width - 1, width) - narrow_div(range.begin, width);
}

}  // namespace folio::inline v0::scheduler
