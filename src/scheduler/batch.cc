#include "scheduler/batch.hpp"

#include <limits>

#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "scheduler/plan_storage.hpp"

namespace folio::inline v0::scheduler {

namespace {

using core::kMaxInt32;

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... splits) {
  core::fail(ErrorCode::kInvalidArgument, splits...);
}

template <typename... Parts>
[[noreturn]] void refuse_request(int64_t request, const Parts&... splits) {
  refuse("request ", request, ": ", splits...);
}

template <typename... Parts>
[[noreturn]] void refuse_segment(int64_t segment, const Parts&... splits) {
  refuse("segment ", segment, ": ", splits...);
}

template <typename... Parts>
[[noreturn]] void refuse_row(int64_t segment, int64_t row, const Parts&... splits) {
  refuse("segment ", segment, ", row ", row, ": ", splits...);
}

void check_query_lengths(const SchedulerConfig& config, const BatchView& batch) {
  if (batch.where != Where::kHost) refuse("the batch's lengths are on a device; this scheduler takes host memory only");
  const int32_t num_requests = batch.num_requests;
  if (num_requests == 0) return;
  const int32_t* cu_q = batch.cu_q;
  if (cu_q[0] != 0) refuse("cu_q[0] is ", cu_q[0], "; it must be 0");
  int32_t longest = 0;
  int32_t longest_request = 0;
  for (int32_t r = 0; r < num_requests; ++r) {
    if (cu_q[r + 1] < cu_q[r]) {
      refuse_request(r, "cu_q falls from ", cu_q[r], " to ", cu_q[r + 1]);
    }
    if (cu_q[r + 1] - cu_q[r] > longest) {
      longest = cu_q[r + 1] - cu_q[r];
      longest_request = r;
    }
  }
  if (cu_q[num_requests] > batch.num_tokens) {
    refuse("cu_q[num_requests] is ", cu_q[num_requests], ", more than num_tokens, ", batch.num_tokens);
  }
  if (batch.max_q_len != 0 && longest > batch.max_q_len) {
    refuse_request(longest_request, "q_len is ", longest, ", but max_q_len says at most ", batch.max_q_len);
  }
  if (config.bounds && longest > config.bounds->max_q_len) {
    refuse_request(longest_request, "q_len is ", longest, "; the op was prepared for at most ",
                   config.bounds->max_q_len);
  }
  const int64_t group_size = config.num_q_heads / config.num_kv_heads;
  if (cu_q[num_requests] * group_size > kMaxInt32) {
    refuse("the batch has ", cu_q[num_requests], " query tokens in groups of ", group_size,
           " heads; at most 2^31 - 1 packed rows are offered");
  }
}

void check_bounds(const SchedulerConfig& config, const BatchView& batch) {
  if (!config.bounds) return;
  const GraphBounds& bounds = *config.bounds;
  int32_t shared_levels = 0;
  for (const KvSegment& segment : batch.segments) shared_levels += segment.group_indptr != nullptr ? 1 : 0;
  const auto within = [](const char* what, int32_t given, int32_t max) {
    if (given > max) {
      refuse(what, " is ", given, "; the op was prepared for at most ", max);
    }
  };
  within("num_requests", batch.num_requests, bounds.max_requests);
  within("num_tokens", batch.num_tokens, bounds.max_tokens);
  within("the number of shared segments", shared_levels, bounds.max_shared_levels);
}

/// Hands out consecutive ranges of one array whose size is known beforehand.
class Carver {
 public:
  explicit Carver(int32_t* next) : next_(next) {}
  int32_t* take(int64_t count) {
    int32_t* taken = next_;
    next_ += count;
    return taken;
  }

 private:
  int32_t* next_;
};

/// Where the row of a group begins without a first_pos: where the keys before it end. All requests of the group that
/// have queries must say the same.
int32_t end_before_group(const BatchView& batch, int64_t s, int32_t group, const int32_t* ends) {
  const int32_t* indptr = batch.segments[static_cast<size_t>(s)].group_indptr;
  int32_t first = -1;
  for (int32_t r = indptr[group]; r < indptr[group + 1]; ++r) {
    if (batch.cu_q[r] == batch.cu_q[r + 1]) continue;
    if (first < 0) first = r;
    if (ends[r] != ends[first]) {
      refuse_row(s, group, "first_pos is left out, but the keys before it end at position ", ends[first],
                 " in request ", first, " and at ", ends[r], " in request ", r, "; give first_pos");
    }
  }
  return first < 0 ? 0 : ends[first];
}

/// `ends`: where each request's keys in earlier segments end; then, where they end with this one.
void copy_segment(const BatchView& batch, int64_t s, Carver& carver, int32_t* ends, SegmentLengths& out) {
  const KvSegment& segment = batch.segments[static_cast<size_t>(s)];
  const int64_t rows = segment_rows(batch, segment);
  const bool shared = segment.group_indptr != nullptr;
  int32_t* kv_len = carver.take(rows);
  int32_t* first_pos = carver.take(rows);
  for (int64_t row = 0; row < rows; ++row) {
    kv_len[row] = segment.kv_len[row];
    if (segment.first_pos != nullptr) {
      first_pos[row] = segment.first_pos[row];
    } else {
      first_pos[row] = shared ? end_before_group(batch, s, static_cast<int32_t>(row), ends) : ends[row];
    }
    if (kv_len[row] < 0) {
      refuse_row(s, row, "kv_len is ", kv_len[row], "; it is 0 or more");
    }
    if (kv_len[row] > kMaxKvLen) {
      refuse_row(s, row, "kv_len is ", kv_len[row], "; at most ", kMaxKvLen, " keys are offered");
    }
    // Cannot overflow 64 bits: both of a shard offset's terms are products of two 31-bit numbers.
    const int64_t last = kv_len[row] == 0 ? 0 : shard_offset(segment.shard, kv_len[row] - 1);
    if (first_pos[row] + last >= kMaxInt32) {
      refuse_row(s, row, "first_pos ", first_pos[row], " with ", kv_len[row], " tokens goes beyond position 2^31 - 2");
    }
  }
  // Fits: no key stands beyond position 2^31 - 2.
  for (int64_t r = 0; !shared && r < rows; ++r) ends[r] = first_pos[r] + kv_len[r];
  int32_t* row_of_request = nullptr;
  if (shared) {
    row_of_request = carver.take(batch.num_requests);
    for (int32_t r = 0; r < batch.num_requests; ++r) row_of_request[r] = -1;
    for (int32_t g = 0; g < segment.num_groups; ++g) {
      for (int32_t r = segment.group_indptr[g]; r < segment.group_indptr[g + 1]; ++r) {
        row_of_request[r] = g;
        ends[r] = first_pos[g] + kv_len[g];
      }
    }
  }
  out = SegmentLengths{.source = segment.source,
                       .mask = segment.mask,
                       .shard = segment.shard,
                       .shared = shared,
                       .num_rows = static_cast<int32_t>(rows),
                       .kv_len = kv_len,
                       .first_pos = first_pos,
                       .row_of_request = row_of_request,
                       .key_offset = nullptr};
}

int32_t row_of(const SegmentLengths& segment, int32_t request) {
  return segment.shared ? segment.row_of_request[request] : request;
}

/// Positions of the first queries: given, or such that the last query stands at the end of the request's keys. `ends`
/// becomes these positions.
void set_query_positions(const BatchView& batch, const int32_t* cu_q, int32_t* ends) {
  int32_t* const q_first_pos = ends;
  for (int32_t r = 0; r < batch.num_requests; ++r) {
    const int64_t q_len = cu_q[r + 1] - cu_q[r];
    const int64_t first = batch.q_first_pos != nullptr ? int64_t{batch.q_first_pos[r]} : ends[r] - q_len;
    if (first + q_len > kMaxInt32 || first < std::numeric_limits<int32_t>::min()) {
      refuse_request(r, "its ", q_len, " queries from position ", first, " do not fit in 32-bit positions");
    }
    q_first_pos[r] = static_cast<int32_t>(first);
  }
}

/// Without a first_pos a segment begins where the one before it ends, which is not known of a shard.
void check_follows_whole_segments(const BatchView& batch, int64_t s) {
  const KvSegment& given = batch.segments[static_cast<size_t>(s)];
  if (given.first_pos != nullptr || segment_rows(batch, given) == 0) return;
  for (int64_t before = s; before-- > 0;) {
    const KvSegment& segment = batch.segments[static_cast<size_t>(before)];
    if (segment.shard.world > 1) {
      refuse_segment(s, "first_pos is left out behind segment ", before, ", a shard (world ", segment.shard.world,
                     ") whose whole length is not known here; give first_pos");
    }
    if (segment.group_indptr == nullptr) return;  // every request has a row of it
  }
}

/// Checks every request's number of keys. For custom masks, also records where each segment's keys begin among them.
void count_keys(const SchedulerConfig& config, const BatchView& batch, SegmentLengths* segments, Carver& carver,
                PlanStorage::Arrays& arrays) {
  const int64_t num_segments = static_cast<int64_t>(batch.segments.size());
  const int32_t num_requests = batch.num_requests;
  const bool custom = config.mask == MaskKind::kCustom;
  const bool tail = custom && batch.custom_mask.scope == CustomMaskScope::kTail;
  int32_t* columns = custom ? carver.take(num_requests) : nullptr;
  int32_t* first_column = custom ? carver.take(num_requests) : nullptr;
  int64_t* byte_indptr = custom ? arrays.mask_byte_indptr.resize(int64_t{num_requests} + 1) : nullptr;
  int32_t* key_offsets = custom ? carver.take(num_segments * num_requests) : nullptr;
  if (custom) byte_indptr[0] = 0;
  for (int32_t r = 0; r < num_requests; ++r) {
    int64_t keys = 0;
    for (int64_t s = 0; s < num_segments; ++s) {
      if (custom) key_offsets[s * num_requests + r] = static_cast<int32_t>(keys);
      const int32_t row = row_of(segments[s], r);
      if (row >= 0) keys += segments[s].kv_len[row];
      if (keys > kMaxInt32) refuse_request(r, "its segments hold more than 2^31 - 1 keys");
    }
    if (batch.max_kv_len != 0 && keys > batch.max_kv_len) {
      refuse_request(r, "it has ", keys, " keys, but max_kv_len says at most ", batch.max_kv_len);
    }
    if (config.bounds && keys > config.bounds->max_kv_len) {
      refuse_request(r, "it has ", keys, " keys; the op was prepared for at most ", config.bounds->max_kv_len);
    }
    if (!custom) continue;
    const int64_t given = tail ? batch.custom_mask.tail_len[r] : keys;
    if (given < 0 || given > keys) {
      refuse_request(r, "tail_len is ", given, "; it is 0 to its number of keys, ", keys);
    }
    columns[r] = static_cast<int32_t>(given);
    first_column[r] = static_cast<int32_t>(keys - given);
    byte_indptr[r + 1] = byte_indptr[r] + ceil_div((batch.cu_q[r + 1] - batch.cu_q[r]) * given, 8);
  }
  for (int64_t s = 0; custom && s < num_segments; ++s) segments[s].key_offset = key_offsets + s * num_requests;
  arrays.view.custom_mask_scope = batch.custom_mask.scope;
  arrays.view.mask_columns = columns;
  arrays.view.mask_first_column = first_column;
  arrays.view.mask_byte_indptr = byte_indptr;
}

/// What every query sees; null where causal and window say it.
const int32_t* find_visible_positions(const MaskRules& rules, const BatchView& batch, const int32_t* q_first_pos,
                                      Carver& carver) {
  if (!rules.has_more()) return nullptr;
  const QueryMasks masks{batch.kv_start, batch.causal, batch.spans};
  const int64_t tokens = batch.num_requests == 0 ? 0 : batch.cu_q[batch.num_requests];
  int32_t* const positions = carver.take(2 * tokens);
  for (int32_t r = 0; r < batch.num_requests; ++r) {
    const int32_t begin = batch.cu_q[r];
    for (int32_t token = begin; token < batch.cu_q[r + 1]; ++token) {
      store_visible_positions(rules, query_mask(masks, r, token), int64_t{q_first_pos[r]} + (token - begin),
                              positions + 2 * int64_t{token});
    }
  }
  return positions;
}

}  // namespace

void check_config(const SchedulerConfig& config) {
  if (config.num_kv_heads < 1 || config.num_q_heads < 1 || config.num_q_heads % config.num_kv_heads != 0) {
    refuse("num_q_heads is ", config.num_q_heads, " and num_kv_heads ", config.num_kv_heads,
           "; the first must be a positive multiple of the second");
  }
  if (config.window_left < -1 || config.window_right < -1) {
    refuse("the window is (", config.window_left, ", ", config.window_right, "); sides are -1 (unbounded) or more");
  }
  if (config.attention_chunk < 0 || config.span_window_left < -1) {
    refuse("attention_chunk is ", config.attention_chunk, " and span_window_left ", config.span_window_left,
           "; the first is 0 (none) or more, the second -1 (unbounded) or more");
  }
  if (config.tile.rows < 1 || config.tile.kv_tokens < 1) {
    refuse("the tile is ", config.tile.rows, " rows by ", config.tile.kv_tokens, " tokens; both are 1 or more");
  }
  if (config.num_workers < 1) refuse("num_workers is ", config.num_workers, "; it is 1 or more");
  const int64_t longest = int64_t{config.tile_cost} + int64_t{config.tile.rows} * config.row_cost;
  if (config.tile_cost < 0 || config.row_cost < 0 || int64_t{config.tile_cost} + config.row_cost < 1 ||
      longest > kMaxInt32) {
    refuse("tile_cost is ", config.tile_cost, " and row_cost ", config.row_cost,
           "; they are 0 or more, not both 0, and a whole tile costs at most 2^31 - 1");
  }
  if (config.start_cost < 0 || config.start_row_cost < 0 || config.start_free_rows < 0 ||
      config.start_cost + int64_t{config.tile.rows} * config.start_row_cost > kMaxInt32) {
    refuse("start_cost is ", config.start_cost, ", start_row_cost ", config.start_row_cost, " and start_free_rows ",
           config.start_free_rows, "; they are 0 or more, and a whole tile's start costs at most 2^31 - 1");
  }
  if (config.min_split_tokens < 1) refuse("min_split_tokens is ", config.min_split_tokens, "; 1 or more is offered");
  if (config.min_rows < 0 || config.min_rows > config.max_rows) {
    refuse("the plan takes requests of ", config.min_rows, " to ", config.max_rows,
           " packed rows; the first is 0 or more and no more than the second");
  }
  if (config.l2_swizzle_tokens < 0) refuse("l2_swizzle_tokens is ", config.l2_swizzle_tokens, "; 0 or more is offered");
  const bool lpt = config.tile.order == TileOrder::kLpt;
  if ((config.tile.order != TileOrder::kRequestOrder && !lpt) || (lpt && config.tile.schedule != Schedule::kDynamic)) {
    refuse("the tile's order is ", static_cast<int32_t>(config.tile.order),
           "; kRequestOrder is offered, and kLpt with kDynamic");
  }
  if (config.tile.schedule != Schedule::kStatic && config.tile.schedule != Schedule::kDynamic) {
    refuse("the tile's schedule is ", static_cast<int32_t>(config.tile.schedule), "; kStatic and kDynamic are offered");
  }
  if (config.determinism >= Determinism::kBatchInvariant &&
      (config.fixed_split_tokens < 1 || config.fixed_split_tokens % config.tile.kv_tokens != 0)) {
    refuse("fixed_split_tokens is ", config.fixed_split_tokens, "; it must be a positive multiple of the tile's ",
           config.tile.kv_tokens, " tokens");
  }
}

int64_t segment_rows(const BatchView& batch, const KvSegment& segment) {
  return segment.group_indptr != nullptr ? segment.num_groups : batch.num_requests;
}

void check_counts(const SchedulerConfig& config, const BatchView& batch) {
  if (batch.num_requests < 0) refuse("num_requests is ", batch.num_requests, "; it is 0 or more");
  if (batch.num_tokens < 0) refuse("num_tokens is ", batch.num_tokens, "; it is 0 or more");
  if (batch.max_q_len < 0) refuse("max_q_len is ", batch.max_q_len, "; it is 0 (computed) or a bound");
  if (batch.max_kv_len < 0) refuse("max_kv_len is ", batch.max_kv_len, "; it is 0 (computed) or a bound");
  if (batch.segments.empty()) refuse("the batch has no segments; a request's keys are a list of at least one");
  if (batch.num_requests > 0 && batch.cu_q == nullptr) refuse("cu_q is null; it needs num_requests + 1 entries");
  check_bounds(config, batch);
}

void check_queries(const SchedulerConfig& config, const BatchView& batch) {
  check_counts(config, batch);
  check_query_lengths(config, batch);
}

void check_mask_fields(const SchedulerConfig& config, const BatchView& batch) {
  const CustomMask& mask = batch.custom_mask;
  const bool given = mask.tail_len != nullptr || mask.scope != CustomMaskScope::kAll;
  if (config.mask != MaskKind::kCustom) {
    if (given) refuse("a custom mask is given, but the op's mask is not kCustom");
    return;
  }
  if (mask.scope == CustomMaskScope::kAll) {
    if (mask.tail_len != nullptr) refuse("tail_len is given, but the custom mask's scope is kAll");
  } else if (mask.scope != CustomMaskScope::kTail) {
    refuse("the custom mask's scope is ", static_cast<int32_t>(mask.scope), "; kAll and kTail are offered");
  } else if (mask.tail_len == nullptr && batch.num_requests > 0) {
    refuse("the custom mask's scope is kTail, but tail_len is null");
  }
}

void check_query_masks(const SchedulerConfig& config, const BatchView& batch) {
  const auto declared = [&](const char* name, const void* array, Feature feature, const char* feature_name) {
    if (array != nullptr && !config.features.has(feature)) {
      refuse(name, " is given, but the op was prepared without Feature::", feature_name);
    }
  };
  declared("kv_start", batch.kv_start, Feature::kKvStart, "kKvStart");
  declared("causal", batch.causal, Feature::kRequestCausal, "kRequestCausal");
  declared("spans", batch.spans, Feature::kSpans, "kSpans");
}

void check_segment_fields(const SchedulerConfig& config, const BatchView& batch, int64_t s) {
  const KvSegment& segment = batch.segments[static_cast<size_t>(s)];
  if (segment.source != KvSource::kPaged && segment.source != KvSource::kRagged) {
    refuse_segment(s, "source is ", static_cast<int32_t>(segment.source), "; kPaged and kRagged are offered");
  }
  if (segment.source == KvSource::kPaged && config.page_size < 1) {
    refuse_segment(s, "it is paged, but the config's page_size is ", config.page_size);
  }
  if (segment.mask != SegmentMask::kAsConfig && segment.mask != SegmentMask::kAllVisible) {
    refuse_segment(s, "mask is ", static_cast<int32_t>(segment.mask), "; kAsConfig and kAllVisible are offered");
  }
  const KvShard& shard = segment.shard;
  if (shard.world < 1 || shard.rank < 0 || shard.rank >= shard.world || shard.interleave < 1) {
    refuse_segment(s, "shard is rank ", shard.rank, " of ", shard.world, ", interleave ", shard.interleave,
                   "; world and interleave are 1 or more, 0 <= rank < world");
  }
  if (shard.world > 1 && batch.q_first_pos == nullptr && batch.num_requests > 0) {
    refuse_segment(s, "it is sharded (world ", shard.world,
                   "), so q_first_pos must be given: the whole length is not known here");
  }
  check_follows_whole_segments(batch, s);
  if (segment.group_indptr == nullptr) {
    if (segment.num_groups != 0) {
      refuse_segment(s, "num_groups is ", segment.num_groups, " without a group_indptr");
    }
  } else {
    if (segment.num_groups < 0) refuse_segment(s, "num_groups is ", segment.num_groups);
    const int32_t* indptr = segment.group_indptr;
    for (int32_t g = 0; g <= segment.num_groups; ++g) {
      if (indptr[g] < 0 || indptr[g] > batch.num_requests || (g > 0 && indptr[g] < indptr[g - 1])) {
        refuse_segment(s, "group_indptr[", g, "] is ", indptr[g],
                       "; it must ascend within [0, num_requests = ", batch.num_requests, "]");
      }
    }
  }
  if (segment.kv_len == nullptr && segment_rows(batch, segment) > 0) refuse_segment(s, "kv_len is null");
}

void read_batch(const SchedulerConfig& config, const BatchView& batch, PlanStorage::Arrays& arrays) {
  check_queries(config, batch);
  check_mask_fields(config, batch);
  check_query_masks(config, batch);
  const int64_t num_segments = static_cast<int64_t>(batch.segments.size());
  const int64_t num_requests = batch.num_requests;
  int64_t entries = 4 * num_requests + 1 + num_segments * num_requests;  // cu_q, positions, two of a mask, key offsets
  for (int64_t s = 0; s < num_segments; ++s) {
    check_segment_fields(config, batch, s);
    entries += 2 * segment_rows(batch, batch.segments[static_cast<size_t>(s)]) + num_requests;
  }
  const MaskRules rules = mask_rules(config);
  if (rules.has_more() && num_requests > 0) entries += 2 * int64_t{batch.cu_q[num_requests]};
  Carver carver(arrays.lengths.resize(entries));
  int32_t* cu_q = carver.take(num_requests + 1);
  cu_q[0] = 0;
  for (int64_t r = 0; r < num_requests; ++r) cu_q[r + 1] = batch.cu_q[r + 1];
  SegmentLengths* segments = arrays.segments.resize(num_segments);
  MaskBounds* bounds = arrays.mask_bounds.resize(num_segments);
  int32_t* q_first_pos = carver.take(num_requests);
  for (int64_t r = 0; r < num_requests; ++r) q_first_pos[r] = 0;
  for (int64_t s = 0; s < num_segments; ++s) {
    copy_segment(batch, s, carver, q_first_pos, segments[s]);
    bounds[s] = mask_bounds(rules, segments[s].mask);
  }
  set_query_positions(batch, cu_q, q_first_pos);
  PlanView& view = arrays.view;
  view.num_requests = batch.num_requests;
  view.num_tokens = cu_q[num_requests];
  view.num_segments = static_cast<int32_t>(num_segments);
  view.num_workers = config.num_workers;
  view.cu_q = cu_q;
  view.q_first_pos = q_first_pos;
  view.segments = segments;
  view.visible_positions = find_visible_positions(rules, batch, q_first_pos, carver);
  count_keys(config, batch, segments, carver, arrays);
}

}  // namespace folio::inline v0::scheduler
