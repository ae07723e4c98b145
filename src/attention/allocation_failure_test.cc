// Every allocation fails once, and from there on: an error, no leak, and what was there before can be used again.
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <vector>

#include "attention/attention_test_util.hpp"
#include "core/allocation_failure_test_util.hpp"

namespace folio::inline v0::attention {
namespace {

using folio::testing::sweep_failing_allocations;

/// Two segments, the first shared, and enough workers for splits: every array of a plan is used.
struct SharingBatch : SmallDecode {
  std::vector<int32_t> group_len{8}, groups{0, 2}, own_len{5, 12}, group_indptr{0, 1}, own_indptr{1, 2, 4};
  std::array<KvSegment, 2> both;
  std::array<SegmentArgs, 2> both_args;

  SharingBatch() {
    both[0].kv_len = group_len.data();
    both[0].group_indptr = groups.data();
    both[0].num_groups = 1;
    both[1].kv_len = own_len.data();
    both_args = {segment_args[0], segment_args[0]};
    both_args[0].table = csr_table(indices, group_indptr);
    both_args[1].table = csr_table(indices, own_indptr);
    batch.segments = both;
    args.segments = both_args;
  }
};

TEST(AllocationFailure, PrepareToRun_FailsCleanlyAtEveryAllocation) {
  SharingBatch small;
  const Workspace workspace = small.workspace(size_t{1} << 20);
  sweep_failing_allocations(
      [&] {
        const Context context = Context::cpu({.executor = {}, .num_threads = 3, .force_kernel = {}});
        const AttentionOp op = prepare(context, small.config);
        PlanBuffer buffer = make_plan_buffer(op);
        run(plan(op, small.batch, buffer), small.args, workspace);
        run(plan(op, small.batch, buffer), small.args, workspace);
      },
      [] {});
}

TEST(AllocationFailure, Plan_ItsBufferIsUsableAfterwards) {
  SharingBatch small;
  const Workspace workspace = small.workspace(size_t{1} << 20);
  const AttentionOp op = prepare(small.context, small.config);
  PlanBuffer first = make_plan_buffer(op);
  run(plan(op, small.batch, first), small.args, workspace);
  const std::vector<float> expected = small.out;
  std::unique_ptr<PlanBuffer> buffer;
  BatchView one = small.batch;  // then a larger one: arrays grow
  one.num_requests = one.num_tokens = 1;
  const std::array<int32_t, 2> one_group{0, 1};
  std::array<KvSegment, 2> one_segments = small.both;
  one_segments[0].group_indptr = one_group.data();
  one.segments = one_segments;
  bool same = true;
  sweep_failing_allocations(
      [&] {
        buffer = std::make_unique<PlanBuffer>(make_plan_buffer(op));
        plan(op, one, *buffer);
        plan(op, small.batch, *buffer);
      },
      [&] {
        if (buffer == nullptr) return;
        small.out.assign(small.out.size(), -1.0f);
        run(plan(op, small.batch, *buffer), small.args, workspace);
        same = same && small.out == expected;
        buffer.reset();
      });
  EXPECT_TRUE(same) << "a buffer whose planning failed gives other results";
}

}  // namespace
}  // namespace folio::inline v0::attention
