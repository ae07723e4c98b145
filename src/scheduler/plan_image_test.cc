#include "scheduler/plan_image.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "folio/types/error.hpp"
#include "scheduler/plan_digest_test_util.hpp"
#include "scheduler/plan_test_util.hpp"

/// Plans packed into images, and how large images are.
namespace folio::inline v0::scheduler {
namespace {

using testing::Case;
using testing::OwnedBatch;
using testing::OwnedSegment;

const PlanImageHeader& header_of(const std::vector<std::byte>& image) {
  return *reinterpret_cast<const PlanImageHeader*>(image.data());
}

/// Bounds that the batch just meets.
GraphBounds tight_bounds(const BatchView& batch, const PlanView& plan) {
  GraphBounds bounds;
  bounds.max_requests = batch.num_requests;
  bounds.max_tokens = batch.num_tokens;
  for (int32_t r = 0; r < batch.num_requests; ++r) {
    bounds.max_q_len = std::max(bounds.max_q_len, batch.cu_q[r + 1] - batch.cu_q[r]);
    int32_t keys = 0;
    for (int32_t s = 0; s < plan.num_segments; ++s) {
      const SegmentLengths& segment = plan.segments[s];
      const int32_t row = segment.shared ? segment.row_of_request[r] : r;
      if (row >= 0) keys += segment.kv_len[row];
    }
    bounds.max_kv_len = std::max(bounds.max_kv_len, keys);
  }
  for (const KvSegment& segment : batch.segments) bounds.max_shared_levels += segment.group_indptr != nullptr ? 1 : 0;
  return bounds;
}

/// Every other plan is a dynamic schedule.
Case random_case_of(int index, std::mt19937& random) {
  Case one = testing::random_case(random);
  if (index % 2 == 0) return one;
  one.config.tile.schedule = Schedule::kDynamic;
  one.config.min_split_tokens = 1 + static_cast<int32_t>(random() % 8);
  return one;
}

TEST(PlanImage, Pack_AnyPlan_HoldsDeviceAddresses) {
  std::mt19937 random(41);
  PlanStorage storage;
  for (int i = 0; i < 3000; ++i) {
    Case one = random_case_of(i, random);
    const PlanView plan = make_plan(one.config, one.batch.view(), storage);
    const size_t bytes = plan_image_bytes(plan);
    std::vector<std::byte> stage(bytes, std::byte{0xa5});
    std::vector<std::byte> image(bytes);
    ASSERT_EQ(pack_plan(plan, stage.data(), bytes, image.data()), bytes);
    std::memcpy(image.data(), stage.data(), bytes);
    stage.assign(bytes, std::byte{0x5a});  // nothing may still point there
    ASSERT_EQ(testing::serialise(header_of(image).view), testing::serialise(plan)) << "case " << i;
    ASSERT_EQ(header_of(image).status.problem, PlanProblem::kNone);
    const auto* work_tiles = reinterpret_cast<const std::byte*>(header_of(image).view.work_tiles);
    ASSERT_EQ(static_cast<size_t>(work_tiles - image.data()) % kPlanImageAlignment, 0u);
  }
}

TEST(PlanImage, Size_FromBounds_FitsEveryBatchWithinThem) {
  std::mt19937 random(42);
  PlanStorage storage;
  int shared = 0;
  for (int i = 0; i < 5000; ++i) {
    Case one = random_case_of(i, random);
    bool many_groups = false;
    for (const OwnedSegment& segment : one.batch.segments)
      many_groups |= segment.kv_len.size() > one.batch.q_len.size();
    if (many_groups) continue;
    const BatchView batch = one.batch.view();
    const PlanView plan = make_plan(one.config, batch, storage);
    one.config.bounds = tight_bounds(batch, plan);
    ASSERT_LE(plan_image_bytes(plan), plan_image_bytes(one.config)) << "case " << i;
    shared += one.config.bounds->max_shared_levels > 0 ? 1 : 0;
  }
  EXPECT_GT(shared, 1000);
}

TEST(PlanImage, Pack_TooLargeAPlan_IsRefused) {
  SchedulerConfig config;
  config.num_q_heads = config.num_kv_heads = 1;
  config.page_size = 16;
  config.tile = {.rows = 16, .kv_tokens = 16};
  EXPECT_THROW(plan_image_bytes(config), Error);  // no bounds
  config.bounds =
      GraphBounds{.max_requests = 1, .max_tokens = 1, .max_q_len = 1, .max_kv_len = 100, .max_shared_levels = 0};
  EXPECT_GT(plan_image_bytes(config), sizeof(PlanImageHeader));
  config.bounds->max_tokens = config.bounds->max_requests = 0x7fffffff;
  EXPECT_THROW(plan_image_bytes(config), Error);
  config.bounds.reset();
  OwnedBatch batch = testing::paged_batch({1}, {100});
  PlanStorage storage;
  const PlanView plan = make_plan(config, batch.view(), storage);
  std::vector<std::byte> stage(plan_image_bytes(plan) - 1);
  EXPECT_THROW(pack_plan(plan, stage.data(), stage.size(), nullptr), Error);
}

TEST(PlanImage, Describe_EveryStatus_IsASentence) {
  EXPECT_EQ(describe(PlanStatus{}), "");
  EXPECT_EQ(describe({PlanProblem::kQueries, 3, -1, 9}), "request 3: q_len is 9, more than the op was prepared for");
  EXPECT_EQ(describe({PlanProblem::kKeys, 3, 1, -9}), "request 3, segment 1: kv_len is -9; it is 0 or more");
  EXPECT_EQ(describe({PlanProblem::kKeys, 3, -1, 9}), "request 3: it has 9 keys, more than the op was prepared for");
  EXPECT_NE(describe({PlanProblem::kIndptr, 3, -1, 9}).find("cu_q"), std::string::npos);
  EXPECT_NE(describe({PlanProblem::kPositions, 3, -1, 9}).find("queries"), std::string::npos);
}

}  // namespace
}  // namespace folio::inline v0::scheduler
