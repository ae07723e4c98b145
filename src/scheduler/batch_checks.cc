#include "scheduler/batch_checks.hpp"

#include <limits>

#include "scheduler/refusal.hpp"

namespace folio::inline v0::scheduler {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

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
    refuse_request(longest_request, "q_len is ", longest, ", but max_q_len says at max ", batch.max_q_len);
  }
  if (config.bounds && longest > config.bounds->max_q_len) {
    refuse_request(longest_request, "q_len is ", longest, "; the op was prepared for at max ",
                   config.bounds->max_q_len);
  }
  const int64_t group_size = config.num_q_heads / config.num_kv_heads;
  if (cu_q[num_requests] * group_size > kMaxInt32) {
    refuse("the batch has ", cu_q[num_requests], " query tokens in groups of ", group_size,
           " heads; at max 2^31 - 1 packed rows are offered");
  }
}

void check_bounds(const SchedulerConfig& config, const BatchView& batch) {
  if (!config.bounds) return;
  const GraphBounds& bounds = *config.bounds;
  int32_t shared_levels = 0;
  for (const KvSegment& segment : batch.segments) shared_levels += segment.group_indptr != nullptr ? 1 : 0;
  const auto within = [](const char* what, int32_t given, int32_t max) {
    if (given > max) {
      refuse(what, " is ", given, "; the op was prepared for at max ", max);
    }
  };
  within("num_requests", batch.num_requests, bounds.max_requests);
  within("num_tokens", batch.num_tokens, bounds.max_tokens);
  within("the number of shared segments", shared_levels, bounds.max_shared_levels);
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
  if (config.tile.rows < 1 || config.tile.kv_tokens < 1) {
    refuse("the tile is ", config.tile.rows, " rows by ", config.tile.kv_tokens, " tokens; both are 1 or more");
  }
  if (config.num_workers < 1) refuse("num_workers is ", config.num_workers, "; it is 1 or more");
  const int64_t longest = int64_t{config.tile_cost} + int64_t{config.tile.rows} * config.row_cost;
  if (config.tile_cost < 0 || config.row_cost < 0 || int64_t{config.tile_cost} + config.row_cost < 1 ||
      longest > kMaxInt32) {
    refuse("tile_cost is ", config.tile_cost, " and row_cost ", config.row_cost,
           "; they are 0 or more, not both 0, and a whole tile costs at max 2^31 - 1");
  }
  if (config.start_cost < 0 || config.start_row_cost < 0 || config.start_free_rows < 0 ||
      config.start_cost + int64_t{config.tile.rows} * config.start_row_cost > kMaxInt32) {
    refuse("start_cost is ", config.start_cost, ", start_row_cost ", config.start_row_cost, " and start_free_rows ",
           config.start_free_rows, "; they are 0 or more, and a whole tile's start costs at max 2^31 - 1");
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

}  // namespace folio::inline v0::scheduler
