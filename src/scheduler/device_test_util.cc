#include "scheduler/device_test_util.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "scheduler/plan_image.hpp"

namespace folio::inline v0::scheduler::testing {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

int32_t pick(std::mt19937& random, int32_t low, int32_t high) {
  return std::uniform_int_distribution<int32_t>(low, high)(random);
}
bool chance(std::mt19937& random, int32_t percent) {
  return pick(random, 1, 100) <= percent;
}

/// As an engine would have it: up to 300 requests of very different lengths, decoding or with some prefill.
Case serving_case(std::mt19937& random) {
  Case one;
  SchedulerConfig& config = one.config;
  config.num_kv_heads = pick(random, 1, 8);
  config.num_q_heads = config.num_kv_heads * pick(random, 1, 8);
  config.page_size = 16;
  config.mask = chance(random, 80) ? MaskKind::kCausal : MaskKind::kNone;
  if (chance(random, 20)) config.window_left = pick(random, 0, 5000);
  config.determinism = static_cast<Determinism>(pick(random, 0, 3));
  config.tile = {.rows = 16 << pick(random, 0, 2), .kv_tokens = 16 << pick(random, 0, 3)};
  config.fixed_split_tokens = config.tile.kv_tokens * pick(random, 1, 32);
  config.num_workers = pick(random, 1, 150);
  const int32_t requests = pick(random, 1, chance(random, 30) ? 300 : 40);
  const int32_t prefilling = chance(random, 50) ? 0 : pick(random, 1, 60);
  const int32_t longest = chance(random, 30) ? 100000 : 3000;
  one.batch.segments.resize(chance(random, 30) ? 2 : 1);
  for (int32_t r = 0; r < requests; ++r) {
    const bool prefill = chance(random, prefilling);
    one.batch.q_len.push_back(chance(random, 3) ? 0 : prefill ? pick(random, 2, 200) : 1);
    const int32_t keys = chance(random, 5) ? longest : pick(random, 0, longest / (chance(random, 80) ? 20 : 1));
    one.batch.segments[0].kv_len.push_back(std::max(keys, one.batch.q_len.back()));
    for (size_t s = 1; s < one.batch.segments.size(); ++s) {
      one.batch.segments[s].kv_len.push_back(one.batch.q_len.back());
      one.batch.segments[s].first_pos.push_back(one.batch.segments[0].kv_len.back());
      one.batch.segments[s].source = KvSource::kRagged;
    }
  }
  return one;
}

GraphBounds bounds_of(const OwnedBatch& batch, int32_t slack) {
  GraphBounds bounds;
  bounds.max_requests = static_cast<int32_t>(batch.q_len.size()) + slack;
  int32_t tokens = batch.padding_tokens;
  for (size_t r = 0; r < batch.q_len.size(); ++r) {
    int32_t keys = 0;
    for (const OwnedSegment& segment : batch.segments) keys += segment.kv_len[r];
    tokens += batch.q_len[r];
    bounds.max_q_len = std::max(bounds.max_q_len, batch.q_len[r]);
    bounds.max_kv_len = std::max(bounds.max_kv_len, keys);
  }
  bounds.max_tokens = tokens + slack;
  bounds.max_q_len += slack;
  bounds.max_kv_len += slack;
  return bounds;
}

int32_t wrong_value(std::mt19937& random, int32_t right) {
  switch (pick(random, 0, 5)) {
    case 0: return std::numeric_limits<int32_t>::max();
    case 1: return std::numeric_limits<int32_t>::min();
    case 2: return -pick(random, 1, 5);
    case 3: return static_cast<int32_t>(random());
    case 4: return pick(random, 0, 1000);
    default: return right > 1000000 ? right - 1 : right + pick(random, -3, 3);
  }
}

/// Whether the host scheduler would take request r alone, whose queries are [begin, end).
bool is_sound(const RawBatch& batch, const SchedulerConfig& config, size_t r, int64_t q_len) {
  if (q_len > config.bounds->max_q_len) return false;
  int64_t keys = 0;
  int64_t end = 0;
  for (const OwnedSegment& segment : batch.segments) {
    const int64_t kv_len = segment.kv_len[r];
    const int64_t first_pos = segment.first_pos.empty() ? end : segment.first_pos[r];
    if (kv_len < 0) return false;
    int64_t last = kv_len > 0 ? kv_len - 1 : 0;
    const KvShard& shard = segment.shard;
    if (kv_len > 0) {
      last = last / shard.interleave * shard.world * shard.interleave + int64_t{shard.rank} * shard.interleave +
             last % shard.interleave;
    }
    if (first_pos + last >= kMaxInt32) return false;
    keys += kv_len;
    end = first_pos + kv_len;
  }
  const int64_t first_query = batch.q_first_pos.empty() ? end - q_len : batch.q_first_pos[r];
  return keys <= config.bounds->max_kv_len && first_query + q_len <= kMaxInt32 &&
         first_query >= std::numeric_limits<int32_t>::min();
}

}  // namespace

Case random_device_case(std::mt19937& random) {
  Case one;
  if (chance(random, 15)) {
    one = serving_case(random);
  } else {
    do {
      one = random_case(random);
    } while (one.config.mask == MaskKind::kCustom ||
             std::any_of(one.batch.segments.begin(), one.batch.segments.end(),
                         [](const OwnedSegment& segment) { return !segment.group_indptr.empty(); }));
    if (chance(random, 20)) one.config.num_workers = pick(random, 8, 150);
  }
  if (chance(random, 50)) {
    one.config.tile.schedule = Schedule::kDynamic;
    one.config.start_cost = pick(random, 0, 100);
    one.config.min_split_tokens = pick(random, 1, chance(random, 20) ? 256 : 4 * one.config.tile.kv_tokens);
    if (chance(random, 50)) {
      one.config.tile.order = TileOrder::kLpt;
      one.config.l2_swizzle_tokens = chance(random, 50) ? 0 : pick(random, 1, 3000);
    }
  }
  const int32_t group_size = one.config.num_q_heads / one.config.num_kv_heads;
  if (chance(random, 20)) one.config.max_rows = pick(random, 0, 3) * group_size;
  if (chance(random, 20)) one.config.min_rows = std::min(one.config.max_rows, pick(random, 0, 3) * group_size);
  one.config.bounds = bounds_of(one.batch, chance(random, 50) ? 0 : pick(random, 1, 50));
  return one;
}

BatchView RawBatch::view() {
  views_.clear();
  for (const OwnedSegment& segment : segments) {
    KvSegment one;
    one.source = segment.source;
    one.kv_len = segment.kv_len.data();
    one.first_pos = segment.first_pos.empty() ? nullptr : segment.first_pos.data();
    one.mask = segment.mask;
    one.shard = segment.shard;
    views_.push_back(one);
  }
  BatchView batch;
  batch.where = Where::kDevice;
  batch.num_requests = num_requests;
  batch.num_tokens = num_tokens;
  batch.cu_q = cu_q.data();
  batch.q_first_pos = q_first_pos.empty() ? nullptr : q_first_pos.data();
  batch.segments = views_;
  batch.kv_start = kv_start.empty() ? nullptr : kv_start.data();
  batch.causal = causal.empty() ? nullptr : causal.data();
  batch.spans = spans.empty() ? nullptr : spans.data();
  return batch;
}

RawBatch raw(OwnedBatch batch) {
  const BatchView view = batch.view();
  RawBatch made;
  made.cu_q.assign(view.cu_q, view.cu_q + view.num_requests + 1);
  made.q_first_pos = batch.q_first_pos;
  made.segments = batch.segments;
  made.kv_start = batch.kv_start;
  made.causal = batch.causal;
  made.spans = batch.spans;
  if (!made.spans.empty()) made.spans.resize(2 * static_cast<size_t>(view.num_tokens), 7);
  made.num_requests = view.num_requests;
  made.num_tokens = view.num_tokens;
  return made;
}

void spoil(RawBatch& batch, const SchedulerConfig& config, std::mt19937& random) {
  const int32_t percent = chance(random, 30) ? 100 : pick(random, 1, 30);
  const bool indptr_too = chance(random, 60);
  const auto spoil_some = [&](std::vector<int32_t>& lengths) {
    for (int32_t& length : lengths) {
      if (chance(random, percent))
        length = wrong_value(random, chance(random, 20) ? config.bounds->max_kv_len : length);
    }
  };
  if (indptr_too) spoil_some(batch.cu_q);
  spoil_some(batch.q_first_pos);
  for (OwnedSegment& segment : batch.segments) {
    spoil_some(segment.kv_len);
    spoil_some(segment.first_pos);
  }
  // Any values are taken of these; they never make a request wrong.
  spoil_some(batch.kv_start);
  spoil_some(batch.spans);
}

OwnedBatch repaired(const RawBatch& batch, const SchedulerConfig& config, int32_t& at_fault) {
  OwnedBatch sound;
  sound.segments = batch.segments;
  sound.kv_start = batch.kv_start;
  sound.causal = batch.causal;
  sound.spans = batch.spans;
  at_fault = -1;
  int32_t begin = 0;
  for (int32_t r = 0; r < batch.num_requests; ++r) {
    const auto i = static_cast<size_t>(r);
    const int32_t given = batch.cu_q[i + 1];
    const bool last = r + 1 == batch.num_requests;
    int32_t end = begin;
    if (given >= begin && given <= batch.num_tokens) end = given;
    if (last && given > batch.num_tokens) end = batch.num_tokens;
    const bool planned =
        batch.cu_q[i] == begin && batch.cu_q[i + 1] == end && is_sound(batch, config, i, int64_t{end} - begin);
    if (!planned && at_fault < 0) at_fault = r;
    sound.q_len.push_back(end - begin);
    int32_t keys_end = 0;
    for (OwnedSegment& segment : sound.segments) {
      if (!planned) {
        segment.kv_len[i] = 0;
        if (!segment.first_pos.empty()) segment.first_pos[i] = 0;
      }
      keys_end = (segment.first_pos.empty() ? keys_end : segment.first_pos[i]) + segment.kv_len[i];
    }
    const int32_t first_query = batch.q_first_pos.empty() ? keys_end - (end - begin) : batch.q_first_pos[i];
    sound.q_first_pos.push_back(planned ? first_query : 0);
    begin = end;
  }
  sound.padding_tokens = batch.num_tokens - begin;
  return sound;
}

const PlanView& view_of_image(const SchedulerConfig& config, const std::byte* image) {
  const auto& header = *reinterpret_cast<const PlanImageHeader*>(image);
  const PlanImageCounts counts = counts_within_bounds(config);
  if (header.view.num_work_tiles > counts.work_tiles || header.view.num_combine_tiles > counts.combine_tiles ||
      header.num_combine_sources > counts.combine_sources || header.view.num_partial_rows > max_partial_rows(config)) {
    throw std::logic_error("the plan has more of something than its image has room for");
  }
  return header.view;
}

}  // namespace folio::inline v0::scheduler::testing
