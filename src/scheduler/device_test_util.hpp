#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "scheduler/plan_image.hpp"
#include "scheduler/plan_test_util.hpp"

/// Batches that the device scheduler takes, and what it is to make of them.
namespace folio::inline v0::scheduler::testing {

/// A random case without shared segments and custom masks, with bounds, some of them tight: small ones of every kind,
/// and some of hundreds of requests over up to 150 workers.
Case random_device_case(std::mt19937& random);

/// Lengths as a device may find them, within the counts that the host knows.
struct RawBatch {
  std::vector<int32_t> cu_q;
  std::vector<int32_t> q_first_pos;  ///< empty = null
  std::vector<OwnedSegment> segments;
  std::vector<int32_t> kv_start;  ///< empty = null, as the next two
  std::vector<uint8_t> causal;
  std::vector<int32_t> spans;  ///< [num_tokens, 2]
  int32_t num_requests = 0;
  int32_t num_tokens = 0;

  /// A view with device lengths, valid while this object stands unchanged.
  BatchView view();

 private:
  std::vector<KvSegment> views_;
};

/// The same batch, as lengths on a device.
RawBatch raw(OwnedBatch batch);

/// Overwrites a few lengths, or many, with others: large, negative, slightly wrong.
void spoil(RawBatch& batch, const SchedulerConfig& config, std::mt19937& random);

/// The batch that device_scheduler.hpp promises to plan: requests at fault without keys. `at_fault` gets the lowest of
/// them, or -1.
OwnedBatch repaired(const RawBatch& batch, const SchedulerConfig& config, int32_t& at_fault);

/// A host plan's counterpart of device image in host memory: the view of the header, checked for its counts to be
/// within what the image has room for.
const PlanView& view_of_image(const SchedulerConfig& config, const std::byte* image);

}  // namespace folio::inline v0::scheduler::testing
