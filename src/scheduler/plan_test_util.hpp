#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "scheduler/scheduler.hpp"

/// Batches for the scheduler's tests: they own their arrays, and some are random.
namespace folio::inline v0::scheduler::testing {

/// A segment with its arrays.
struct OwnedSegment {
  KvSource source = KvSource::kPaged;
  std::vector<int32_t> kv_len;
  std::vector<int32_t> first_pos;     ///< empty = null (without rows, too)
  std::vector<int32_t> group_indptr;  ///< empty = one row a request
  SegmentMask mask = SegmentMask::kAsConfig;
  KvShard shard;
};

/// A batch with its arrays.
struct OwnedBatch {
  std::vector<int32_t> q_len;
  std::vector<int32_t> q_first_pos;  ///< empty = null
  std::vector<OwnedSegment> segments;
  CustomMaskScope scope = CustomMaskScope::kAll;
  std::vector<int32_t> tail_len;  ///< empty = null
  std::vector<int32_t> kv_start;  ///< empty = null, as the next two
  std::vector<uint8_t> causal;
  std::vector<int32_t> spans;  ///< [tokens, 2]
  int32_t padding_tokens = 0;

  /// A view, valid while this object stands unchanged.
  BatchView view();

 private:
  std::vector<int32_t> cu_q_;
  std::vector<KvSegment> views_;
};

/// One decode or prefill batch: a paged segment, one row a request.
OwnedBatch paged_batch(std::vector<int32_t> q_len, std::vector<int32_t> kv_len);

struct Case {
  SchedulerConfig config;
  OwnedBatch batch;
};

/// A small random case: every kind of segment, shard, group, mask, rule, window, level and number of workers comes up.
Case random_case(std::mt19937& random);

/// A plan as text, one line per work tile and combine tile, for tests and debugging:
///   worker 0
///     request 0 head 0 rows 0-4 segment 0 row 0 keys 0-64 start finish -> out
///   combine request 1 head 0 rows 4-8 <- 0 4
std::string describe(const PlanView& plan);

}  // namespace folio::inline v0::scheduler::testing
