#include "scheduler/device_scheduler.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "core/instrumented_test_util.hpp"
#include "folio/types/error.hpp"
#include "scheduler/batch.hpp"
#include "scheduler/device/scheduler.hpp"
#include "scheduler/device/single_tiles.hpp"
#include "scheduler/device_test_util.hpp"
#include "scheduler/host_groups_test_util.hpp"
#include "scheduler/plan_digest_test_util.hpp"

/// The device scheduler's body on the host: equal to make_plan, and safe whatever the lengths are.
namespace folio::inline v0::scheduler {
namespace {

using testing::Alone;
using testing::Case;
using testing::OwnedBatch;
using testing::RawBatch;
using testing::Team;

constexpr int kBatches = folio::testing::random_cases(10000);

/// Memory for images, with what earlier plans left in it, and a guard behind the size that is promised to suffice.
class DeviceMemory {
 public:
  std::byte* prepare(const SchedulerConfig& config) {
    size_ = plan_image_bytes(config);
    if (memory_.size() < size_ + kGuard) memory_.resize(size_ + kGuard);
    std::fill_n(memory_.begin() + static_cast<std::ptrdiff_t>(size_), kGuard, std::byte{0xa5});
    sticky = PlanStatus{};
    return memory_.data();
  }
  bool overrun() const {
    const auto guard = memory_.begin() + static_cast<std::ptrdiff_t>(size_);
    return std::count(guard, guard + kGuard, std::byte{0xa5}) != kGuard;
  }
  const PlanImageHeader& header() const { return *reinterpret_cast<const PlanImageHeader*>(memory_.data()); }
  PlanStatus sticky;

 private:
  static constexpr std::ptrdiff_t kGuard = 512;
  std::vector<std::byte> memory_;
  size_t size_ = 0;
};

/// The body of one of several groups, which share the work tiles.
template <typename Group>
void make_device_plan(const device::Job& job, std::byte* tiles, PlanStatus* sticky, int32_t index, int32_t count,
                      Group& group) {
  if (const auto single = single_tiles_input(job.in, reinterpret_cast<std::byte*>(job.header))) {
    auto& memory = *reinterpret_cast<device::SingleTiles*>(tiles);
    if (index == 0 && group.rank() == 0) {
      job.header->view = device::outline(job);
      job.segments[0] = device::segment_lengths(job, 0);
    }
    group.sync();
    const int32_t num_work_tiles = device::schedule_single_tiles(*single, memory, index == 0, group);
    for (int32_t i = index * group.size() + group.rank(); i < num_work_tiles; i += count * group.size()) {
      job.work_tiles[i] = device::make_single_work_tile(*single, memory, i);
    }
    if (num_work_tiles >= 0) return;
  }
  if (index > 0) return;
  device::schedule_batch(job, sticky, group);
  device::emit_work_tiles(job, group.rank(), group.size());
}

std::vector<std::byte> memory_of_tiles(const device::PlanInput& input) {
  return std::vector<std::byte>(static_cast<size_t>(device::SingleTiles::bytes(input.num_requests)), std::byte{0x5a});
}

std::vector<int64_t> device_plan(DeviceMemory& memory, const SchedulerConfig& config, const BatchView& batch) {
  const device::PlanInput input = device_plan_input(config, batch);
  std::vector<std::byte> scratch(static_cast<size_t>(input.scratch.bytes()), std::byte{0x5a});
  Alone alone;
  std::byte* const image = memory.prepare(config);
  const device::Job job(input, image, scratch.data());
  std::vector<std::byte> tiles = memory_of_tiles(input);
  for (int32_t index = 0; index < 3; ++index) make_device_plan(job, tiles.data(), &memory.sticky, index, 3, alone);
  EXPECT_FALSE(memory.overrun());
  return testing::serialise(testing::view_of_image(config, image));
}

/// Without the bounds: a request at fault keeps its rows, however many it has.
std::vector<int64_t> host_plan(SchedulerConfig config, OwnedBatch& batch, PlanStorage& storage) {
  config.bounds.reset();
  return testing::serialise(make_plan(config, batch.view(), storage));
}

TEST(DeviceScheduler, Plan_RandomBatches_EqualsTheHostPlan) {
  std::mt19937 random(51);
  PlanStorage storage;
  DeviceMemory memory;
  int combined = 0;
  int split_plans = 0;
  int followed = 0;
  int many_workers = 0;
  int single = 0;
  int single_merged = 0;
  int plain = 0;  // without masks as rules, which hide keys: less to split
  for (int i = 0; i < kBatches; ++i) {
    Case one = testing::random_device_case(random);
    RawBatch batch = testing::raw(one.batch);
    ASSERT_EQ(device_plan_refusal(one.config, batch.view()), "") << "case " << i;
    ASSERT_EQ(device_plan(memory, one.config, batch.view()), host_plan(one.config, one.batch, storage)) << "case " << i;
    ASSERT_EQ(memory.header().status.problem, PlanProblem::kNone) << "case " << i;
    combined += memory.header().view.num_combine_tiles > 0 ? 1 : 0;
    const PlanView& plan = memory.header().view;
    split_plans += plan.num_dynamic_tiles > 0 && plan.num_combine_tiles > 0 ? 1 : 0;
    followed += plan.num_dynamic_tiles > 0 && plan.num_work_tiles > plan.num_dynamic_tiles ? 1 : 0;
    many_workers += one.config.num_workers >= 132 ? 1 : 0;
    const bool is_single = single_tiles_input(device_plan_input(one.config, batch.view()), nullptr).has_value();
    single += is_single ? 1 : 0;
    single_merged += is_single && plan.num_combine_tiles > 0 ? 1 : 0;
    plain += plan.visible_positions == nullptr ? 1 : 0;
  }
  EXPECT_GT(plain, kBatches / 2);
  EXPECT_LT(plain, kBatches * 4 / 5);
  EXPECT_GT(split_plans, plain / 10);
  EXPECT_GT(followed, plain / 20);
  EXPECT_GT(combined, plain / 5);
  EXPECT_GT(single, plain / 100);
  EXPECT_GT(single_merged, plain / 200);
  EXPECT_GT(many_workers, plain / 100);
}

TEST(DeviceScheduler, Plan_WithAMostOfSplits_EqualsTheHostPlan) {
  std::mt19937 random(54);
  PlanStorage storage;
  DeviceMemory memory;
  int bounded = 0;
  for (int i = 0; i < kBatches / 4; ++i) {
    Case one = testing::random_device_case(random);
    if (one.config.determinism >= Determinism::kBatchInvariant) continue;
    RawBatch batch = testing::raw(one.batch);
    const std::vector<int64_t> as_needed = device_plan(memory, one.config, batch.view());
    one.config.max_splits = 1 + static_cast<int32_t>(random() % 5);
    const std::vector<int64_t> planned = device_plan(memory, one.config, batch.view());
    ASSERT_EQ(planned, host_plan(one.config, one.batch, storage)) << "case " << i;
    bounded += planned != as_needed ? 1 : 0;
  }
  EXPECT_GT(bounded, kBatches / 40);
}

TEST(DeviceScheduler, Plan_AnyNumberOfThreads_EqualsTheHostPlan) {
  std::mt19937 random(52);
  PlanStorage storage;
  DeviceMemory memory;
  for (int i = 0; i < folio::testing::random_cases(300); ++i) {
    Case one = testing::random_device_case(random);
    RawBatch batch = testing::raw(one.batch);
    if (i % 3 == 0) testing::spoil(batch, one.config, random);
    int32_t at_fault = -1;
    OwnedBatch sound = testing::repaired(batch, one.config, at_fault);
    const device::PlanInput input = device_plan_input(one.config, batch.view());
    std::byte* const image = memory.prepare(one.config);
    std::vector<std::byte> tiles = memory_of_tiles(input);
    Team::run(2 + i % 4, [&](Team& team) {
      const device::Job job(input, image, image + input.layout.scratch);
      make_device_plan(job, tiles.data(), &memory.sticky, 0, 1, team);
    });
    ASSERT_EQ(testing::serialise(testing::view_of_image(one.config, image)), host_plan(one.config, sound, storage))
        << "case " << i;
  }
}

TEST(DeviceScheduler, Plan_WrongLengths_CoversTheOtherRequests) {
  std::mt19937 random(53);
  PlanStorage storage;
  DeviceMemory memory;
  int at_faults = 0;
  for (int i = 0; i < kBatches; ++i) {
    Case one = testing::random_device_case(random);
    RawBatch batch = testing::raw(one.batch);
    testing::spoil(batch, one.config, random);
    int32_t at_fault = -1;
    OwnedBatch sound = testing::repaired(batch, one.config, at_fault);
    ASSERT_EQ(device_plan(memory, one.config, batch.view()), host_plan(one.config, sound, storage)) << "case " << i;
    const PlanStatus& status = memory.header().status;
    ASSERT_EQ(status.problem != PlanProblem::kNone, at_fault >= 0) << "case " << i;
    ASSERT_EQ(memory.sticky.problem, status.problem) << "case " << i;
    ASSERT_EQ(describe(status).empty(), at_fault < 0);
    if (at_fault < 0) continue;
    ASSERT_EQ(status.request, at_fault) << "case " << i;
    ++at_faults;
  }
  EXPECT_GT(at_faults, kBatches / 2);
}

/// One thread, which finds the caller's arrays changed behind the first barrier.
class AloneWhileTheyChange : public Alone {
 public:
  explicit AloneWhileTheyChange(RawBatch& batch) : batch_(batch) {}
  template <typename T, typename Combine>
  T exclusive_scan(const T& value, const T& identity, const Combine& combine, T& total) {
    std::fill(batch_.cu_q.begin(), batch_.cu_q.end(), -7);
    return Alone::exclusive_scan(value, identity, combine, total);
  }

 private:
  RawBatch& batch_;
};

TEST(DeviceScheduler, Plan_CuQThatChangesMeanwhile_IsReadOnce) {
  std::mt19937 random(54);
  PlanStorage storage;
  DeviceMemory memory;
  for (int i = 0; i < 200; ++i) {
    Case one = testing::random_device_case(random);
    RawBatch batch = testing::raw(one.batch);
    const device::PlanInput input = device_plan_input(one.config, batch.view());
    std::byte* const image = memory.prepare(one.config);
    const device::Job job(input, image, image + input.layout.scratch);
    AloneWhileTheyChange group(batch);
    device::schedule_batch(job, &memory.sticky, group);
    device::emit_work_tiles(job, 0, 1);
    ASSERT_EQ(memory.sticky.problem, PlanProblem::kNone) << "case " << i;
    ASSERT_EQ(testing::serialise(testing::view_of_image(one.config, image)), host_plan(one.config, one.batch, storage))
        << "case " << i;
  }
}

TEST(DeviceScheduler, Status_NotReadYet_Stays) {
  PlanStatus sticky{PlanProblem::kKeys, 3, 1, -5};
  device::publish({PlanProblem::kQueries, 8, -1, 900}, &sticky);
  EXPECT_EQ(describe(sticky), "request 3, segment 1: kv_len is -5; it is 0 or more");
  sticky.problem = PlanProblem::kNone;
  device::publish({PlanProblem::kQueries, 8, -1, 900}, &sticky);
  EXPECT_EQ(describe(sticky), "request 8: q_len is 900, more than the op was prepared for");
}

/// Kernels step past the last key of a row, so no bounds allow rows up to the last integer.
TEST(DeviceScheduler, Plan_RowsUpToTheLastInteger_AreReported) {
  PlanStorage storage;
  DeviceMemory memory;
  for (const Schedule schedule : {Schedule::kStatic, Schedule::kDynamic}) {
    SchedulerConfig config;
    config.num_q_heads = config.num_kv_heads = 1;
    config.page_size = 16;
    config.tile = {.rows = 16, .kv_tokens = 64, .schedule = schedule};
    config.num_workers = 4;
    config.bounds = GraphBounds{
        .max_requests = 2, .max_tokens = 2, .max_q_len = 1, .max_kv_len = INT32_MAX, .max_shared_levels = 0};
    OwnedBatch longest = testing::paged_batch({1, 1}, {kMaxKvLen, 5});
    RawBatch batch = testing::raw(longest);
    EXPECT_EQ(device_plan(memory, config, batch.view()), host_plan(config, longest, storage));
    EXPECT_EQ(memory.sticky.problem, PlanProblem::kNone);
    OwnedBatch longer = testing::paged_batch({1, 1}, {kMaxKvLen + 1, 5});
    batch = testing::raw(longer);
    OwnedBatch served = testing::paged_batch({1, 1}, {0, 5});
    served.q_first_pos = {0, 4};
    EXPECT_EQ(device_plan(memory, config, batch.view()), host_plan(config, served, storage));
    EXPECT_EQ(memory.sticky.request, 0);
    EXPECT_EQ(memory.sticky.value, kMaxKvLen + 1);
  }
}

/// Two decodes as long as 32 bits take, and a KV tile longer.
TEST(DeviceScheduler, SingleTiles_Beyond32Bits_FallBackToTheGeneralScheduler) {
  PlanStorage storage;
  DeviceMemory memory;
  for (const int32_t heads : {1, 3, 8}) {
    SchedulerConfig config;
    config.num_q_heads = config.num_kv_heads = heads;
    config.page_size = 16;
    config.tile = {.rows = 16, .kv_tokens = 16, .schedule = Schedule::kDynamic};
    config.num_workers = 132;
    config.start_cost = 48;
    config.bounds =
        GraphBounds{.max_requests = 2, .max_tokens = 2, .max_q_len = 1, .max_kv_len = 1 << 30, .max_shared_levels = 0};
    OwnedBatch any = testing::paged_batch({1, 1}, {1, 1});
    const auto input = single_tiles_input(device_plan_input(config, any.view()), nullptr);
    ASSERT_TRUE(input.has_value());
    const auto max = static_cast<int32_t>(input->max_kv_tiles * input->kv_tokens);
    for (const int32_t longer : {0, 1}) {
      OwnedBatch batch = testing::paged_batch({1, 1}, {max, max + longer});
      RawBatch given = testing::raw(batch);
      const device::PlanInput plan_input = device_plan_input(config, given.view());
      std::byte* const image = memory.prepare(config);
      const auto single = single_tiles_input(plan_input, image);
      std::vector<std::byte> tiles = memory_of_tiles(plan_input);
      Alone alone;
      const int32_t num_work_tiles =
          device::schedule_single_tiles(*single, *reinterpret_cast<device::SingleTiles*>(tiles.data()), false, alone);
      EXPECT_EQ(num_work_tiles<0, longer> 0) << heads << " heads";
      EXPECT_EQ(device_plan(memory, config, given.view()), host_plan(config, batch, storage)) << heads << " heads";
    }
  }
}

TEST(DeviceScheduler, Refusal_UnsupportedBatches_NamesTheReason) {
  OwnedBatch owned = testing::paged_batch({1, 1}, {10, 20});
  SchedulerConfig config;
  config.num_q_heads = config.num_kv_heads = 1;
  config.page_size = 16;
  config.tile = {.rows = 16, .kv_tokens = 16};
  RawBatch batch = testing::raw(owned);
  const auto refusal = [&](const BatchView& view) { return device_plan_refusal(config, view); };
  EXPECT_NE(refusal(batch.view()).find("GraphBounds"), std::string::npos);
  config.bounds =
      GraphBounds{.max_requests = 2, .max_tokens = 2, .max_q_len = 1, .max_kv_len = 100, .max_shared_levels = 1};
  EXPECT_EQ(refusal(batch.view()), "");
  config.mask = MaskKind::kCustom;
  EXPECT_NE(refusal(batch.view()).find("custom masks"), std::string::npos);
  config.mask = MaskKind::kCausal;
  batch.segments.resize(kMaxImageSegments, batch.segments[0]);
  EXPECT_EQ(refusal(batch.view()), "");
  batch.segments.push_back(batch.segments[0]);
  EXPECT_NE(refusal(batch.view()).find("5 segments"), std::string::npos);
  batch.segments.resize(1);
  std::vector<KvSegment> shared{batch.view().segments[0]};
  shared[0].group_indptr = batch.cu_q.data();  // not to be read
  BatchView with_groups = batch.view();
  with_groups.segments = shared;
  EXPECT_NE(refusal(with_groups).find("shared"), std::string::npos);
  config.bounds->max_kv_len = 0x7fffffff;
  config.tile = {.rows = 1 << 20, .kv_tokens = 1};
  config.row_cost = 2000;
  config.num_workers = 1 << 16;
  EXPECT_NE(refusal(batch.view()).find("64-bit"), std::string::npos);
  batch.num_tokens = 3;
  EXPECT_THROW(refusal(batch.view()), Error);
}

}  // namespace
}  // namespace folio::inline v0::scheduler
