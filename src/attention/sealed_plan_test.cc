#include "folio/sealed_plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "attention/attention_test_util.hpp"
#include "attention/gpu_backend.hpp"
#include "attention/op_state.hpp"
#include "folio/types/error.hpp"
#include "scheduler/plan_image.hpp"

namespace folio::inline v0::attention {
namespace {

/// A planned and sealed batch.
struct Sealed : SmallDecode {
  AttentionOp op = prepare(context, config);
  PlanBuffer buffer = make_plan_buffer(op);
  AttentionPlan planned = folio::plan(op, batch, buffer);
  core::AlignedBuffer sealed_memory{static_cast<size_t>(SealedPlan::size(planned)) * sizeof(int32_t),
                                    SealedPlan::kSealAlignment};
  std::span<int32_t> ints{sealed_memory.as<int32_t>(), sealed_memory.bytes() / sizeof(int32_t)};
  SealedPlan seal{op};
  std::span<const int32_t> schedule = seal.seal(planned, ints);

  std::vector<float> outputs(const AttentionPlan& plan) {
    std::fill(out.begin(), out.end(), -1.0f);
    run(plan, args, workspace(workspace_size(plan)));
    return out;
  }
};

TEST(SealedPlan, BufferReplanned_RunsFromSealedMemory) {
  Sealed sealed;
  const std::vector<float> expected = sealed.outputs(sealed.planned);
  const std::vector<int32_t> other{1, 1};
  sealed.segments[0].kv_len = other.data();
  folio::plan(sealed.op, sealed.batch, sealed.buffer);
  EXPECT_NO_THROW(check_sealed(sealed.seal.plan(), sealed.schedule, {}));
  EXPECT_EQ(sealed.outputs(sealed.seal.plan()), expected);
}

TEST(SealedPlan, IsWhatTheKernelExecutes) {
  Sealed sealed;
  const std::vector<float> expected = sealed.outputs(sealed.seal.plan());
  auto* header =
      reinterpret_cast<scheduler::PlanImageHeader*>(sealed.sealed_memory.data() + SealedPlan::kSealAlignment);
  auto* items = const_cast<scheduler::WorkTile*>(header->view.work_tiles);
  for (int32_t i = 0; i < header->view.num_work_tiles; ++i) items[i].kv_end = items[i].kv_begin + 1;
  EXPECT_NE(sealed.outputs(sealed.seal.plan()), expected);
  EXPECT_THROW(check_sealed(sealed.seal.plan(), sealed.schedule, {}), Error);
}

TEST(SealedPlan, RefusesAChangeOfAnyInteger) {
  Sealed sealed;
  for (size_t i = 0; i < sealed.ints.size(); ++i) {
    // Between the fields of the header and the image nothing is read.
    if (i >= 8 && i < SealedPlan::kSealAlignment / sizeof(int32_t)) continue;
    sealed.ints[i] ^= 1 << (i % 32);
    EXPECT_THROW(check_sealed(sealed.seal.plan(), sealed.schedule, {}), Error) << i;
    sealed.ints[i] ^= 1 << (i % 32);
  }
  EXPECT_NO_THROW(check_sealed(sealed.seal.plan(), sealed.schedule, {}));
}

TEST(SealedPlan, RefusesATruncatedOneAndACopy) {
  Sealed sealed;
  const AttentionPlan plan = sealed.seal.plan();
  EXPECT_THROW(check_sealed(plan, {}, {}), Error);
  EXPECT_THROW(check_sealed(plan, sealed.schedule.first(sealed.schedule.size() - 1), {}), Error);
  core::AlignedBuffer copy(sealed.sealed_memory.bytes(), SealedPlan::kSealAlignment);
  std::copy_n(sealed.sealed_memory.data(), copy.bytes(), copy.data());
  EXPECT_THROW(check_sealed(plan, {copy.as<int32_t>(), sealed.schedule.size()}, {}), Error);
}

TEST(SealedPlan, GoesStaleWithTheNextSeal) {
  Sealed sealed;
  const AttentionPlan first = sealed.seal.plan();
  sealed.seal.seal(sealed.planned, sealed.ints);
  EXPECT_THROW(check_sealed(first, sealed.schedule, {}), Error);
  EXPECT_THROW(sealed.outputs(first), Error);
  EXPECT_NO_THROW(check_sealed(sealed.seal.plan(), sealed.schedule, {}));
}

TEST(SealedPlan, RefusesMemoryThatIsTooShortOrMisaligned) {
  Sealed sealed;
  EXPECT_THROW(sealed.seal.seal(sealed.planned, sealed.ints.first(sealed.ints.size() - 1)), Error);
  EXPECT_THROW(sealed.seal.seal(sealed.planned, sealed.ints.subspan(1)), Error);
}

TEST(SealedPlan, FitsItsBoundWhereTheOpHasOne) {
  SmallDecode small;
  PrepareOptions options;
  options.bounds = GraphBounds{4, 8, 4, 64, 0};
  const AttentionOp op = prepare(small.context, small.config, options);
  PlanBuffer buffer = make_plan_buffer(op);
  EXPECT_LE(SealedPlan::size(folio::plan(op, small.batch, buffer)), SealedPlan::max_size(op));
  EXPECT_THROW(SealedPlan::max_size(prepare(small.context, small.config)), Error);
}

/// Graphs know where the headers of a GPU's schedule lie, and where they lead to is in the headers.
TEST(GpuSchedule, Layout_HeaderPlacesDoNotDependOnSizes) {
  const std::array<size_t, 2> large{70000, 300}, small{512, 90000};
  const ScheduleLayout layout = lay_out_schedule(large);
  EXPECT_EQ(layout.images, lay_out_schedule(small).images);
  EXPECT_EQ(layout.bytes % sizeof(uint64_t), 0u);
  EXPECT_GE(layout.bytes, 70300u);

  Sealed sealed;
  const scheduler::PlanView& view = sealed.planned.buffer().view();
  const std::array<const scheduler::PlanView*, 2> plans{&view, &view};
  const std::array<size_t, 2> bytes{scheduler::plan_image_bytes(view), scheduler::plan_image_bytes(view)};
  const ScheduleLayout both = lay_out_schedule(bytes);
  core::AlignedBuffer memory(both.bytes, SealedPlan::kSealAlignment);
  fill_schedule(plans, both, memory.data(), memory.data());
  const scheduler::ChecksumRecord record = make_record(2, both, memory.data(), memory.data(), nullptr);
  EXPECT_EQ(record.num_words * sizeof(uint64_t), both.bytes);
  const scheduler::WorkTile* items[2];
  for (size_t i = 0; i < 2; ++i) {
    const auto* head = reinterpret_cast<const scheduler::PlanImageHeader*>(memory.data() + both.images[i]);
    EXPECT_EQ(record.images[i], head);
    EXPECT_EQ(record.emptied[i].view.num_work_tiles, 0);
    items[i] = head->view.work_tiles;
    ASSERT_EQ(head->view.num_work_tiles, view.num_work_tiles);
    EXPECT_EQ(
        std::memcmp(items[i], view.work_tiles, sizeof(scheduler::WorkTile) * static_cast<size_t>(view.num_work_tiles)),
        0);
    EXPECT_GE(reinterpret_cast<const std::byte*>(items[i]), memory.data());
    EXPECT_LT(reinterpret_cast<const std::byte*>(items[i]), memory.data() + both.bytes);
  }
  EXPECT_NE(items[0], items[1]);
}

}  // namespace
}  // namespace folio::inline v0::attention
