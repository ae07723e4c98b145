#include "scheduler/batch_lengths.hpp"

#include <limits>

#include "scheduler/batch_checks.hpp"
#include "scheduler/refusal.hpp"

namespace folio::inline v0::scheduler {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

/// Gives out splits of one array whose size is known beforehand.
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

void copy_segment(const BatchView& batch, int64_t s, Carver& carver, SegmentLengths& out) {
  const KvSegment& segment = batch.segments[static_cast<size_t>(s)];
  const int64_t rows = segment_rows(batch, segment);
  int32_t* kv_len = carver.take(rows);
  int32_t* first_pos = carver.take(rows);
  for (int64_t row = 0; row < rows; ++row) {
    kv_len[row] = segment.kv_len[row];
    first_pos[row] = segment.first_pos != nullptr ? segment.first_pos[row] : 0;
    if (kv_len[row] < 0) {
      refuse_row(s, row, "kv_len is ", kv_len[row], "; it is 0 or more");
    }
    // Cannot overflow 64 bits: both of a shard offset's terms are products of two 31-bit numbers.
    const int64_t last = kv_len[row] == 0 ? 0 : shard_offset(segment.shard, kv_len[row] - 1);
    if (first_pos[row] + last >= kMaxInt32) {
      refuse_row(s, row, "first_pos ", first_pos[row], " with ", kv_len[row], " tokens goes beyond position 2^31 - 2");
    }
  }
  int32_t* row_of_request = nullptr;
  if (segment.group_indptr != nullptr) {
    row_of_request = carver.take(batch.num_requests);
    for (int32_t r = 0; r < batch.num_requests; ++r) row_of_request[r] = -1;
    for (int32_t g = 0; g < segment.num_groups; ++g) {
      for (int32_t r = segment.group_indptr[g]; r < segment.group_indptr[g + 1]; ++r) row_of_request[r] = g;
    }
  }
  out = SegmentLengths{.source = segment.source,
                       .mask = segment.mask,
                       .shard = segment.shard,
                       .shared = segment.group_indptr != nullptr,
                       .num_rows = static_cast<int32_t>(rows),
                       .kv_len = kv_len,
                       .first_pos = first_pos,
                       .row_of_request = row_of_request,
                       .key_offset = nullptr};
}

int32_t row_of(const SegmentLengths& segment, int32_t request) {
  return segment.shared ? segment.row_of_request[request] : request;
}

/// Positions of the first queries: given, or such that the last query stands at the end of the request's last segment.
void set_query_positions(const BatchView& batch, const SegmentLengths* segments, const int32_t* cu_q,
                         int32_t* q_first_pos) {
  for (int32_t r = 0; r < batch.num_requests; ++r) {
    const int64_t q_len = cu_q[r + 1] - cu_q[r];
    int64_t first = 0;
    if (batch.q_first_pos != nullptr) {
      first = batch.q_first_pos[r];
    } else {
      int64_t end = 0;
      for (int64_t s = static_cast<int64_t>(batch.segments.size()) - 1; s >= 0; --s) {
        const int32_t row = row_of(segments[s], r);
        if (row < 0) continue;
        end = int64_t{segments[s].first_pos[row]} + segments[s].kv_len[row];
        break;
      }
      first = end - q_len;
    }
    if (first + q_len > kMaxInt32 || first < std::numeric_limits<int32_t>::min()) {
      refuse_request(r, "its ", q_len, " queries from position ", first, " do not fit in 32-bit positions");
    }
    q_first_pos[r] = static_cast<int32_t>(first);
  }
}

/// Checks every request's number of keys and, for custom masks, notes where each segment's keys begin among them.
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
      refuse_request(r, "it has ", keys, " keys, but max_kv_len says at max ", batch.max_kv_len);
    }
    if (config.bounds && keys > config.bounds->max_kv_len) {
      refuse_request(r, "it has ", keys, " keys; the op was prepared for at max ", config.bounds->max_kv_len);
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

}  // namespace

void read_batch(const SchedulerConfig& config, const BatchView& batch, PlanStorage::Arrays& arrays) {
  check_queries(config, batch);
  check_mask_fields(config, batch);
  const int64_t num_segments = static_cast<int64_t>(batch.segments.size());
  const int64_t num_requests = batch.num_requests;
  int64_t entries = 4 * num_requests + 1 + num_segments * num_requests;  // cu_q, positions, two of a mask, key offsets
  for (int64_t s = 0; s < num_segments; ++s) {
    check_segment_fields(config, batch, s);
    entries += 2 * segment_rows(batch, batch.segments[static_cast<size_t>(s)]) + num_requests;
  }
  Carver carver(arrays.lengths.resize(entries));
  int32_t* cu_q = carver.take(num_requests + 1);
  cu_q[0] = 0;
  for (int64_t r = 0; r < num_requests; ++r) cu_q[r + 1] = batch.cu_q[r + 1];
  SegmentLengths* segments = arrays.segments.resize(num_segments);
  MaskBounds* bounds = arrays.mask_bounds.resize(num_segments);
  for (int64_t s = 0; s < num_segments; ++s) {
    copy_segment(batch, s, carver, segments[s]);
    bounds[s] = mask_bounds(config.mask, segments[s].mask, config.window_left, config.window_right);
  }
  int32_t* q_first_pos = carver.take(num_requests);
  set_query_positions(batch, segments, cu_q, q_first_pos);
  PlanView& view = arrays.view;
  view.num_requests = batch.num_requests;
  view.num_tokens = cu_q[num_requests];
  view.num_segments = static_cast<int32_t>(num_segments);
  view.num_workers = config.num_workers;
  view.cu_q = cu_q;
  view.q_first_pos = q_first_pos;
  view.segments = segments;
  count_keys(config, batch, segments, carver, arrays);
}

}  // namespace folio::inline v0::scheduler
