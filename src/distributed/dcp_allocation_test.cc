#include <gtest/gtest.h>

#include "core/aligned_buffer.hpp"
#include "core/allocation_test_util.hpp"
#include "distributed/dcp_case_test_util.hpp"

namespace folio::distributed::testing {
namespace {

/// Counted between barriers, when no rank does anything else.
TEST(DcpAttention, AllocatesNothingOnceWarm) {
  for (const DcpCombine combine : {DcpCombine::kAllGatherReduceScatter, DcpCombine::kAllToAll}) {
    DcpSetup setup;
    setup.combine = combine;
    setup.alibi = setup.sinks = true;
    setup.num_cached = 1;
    setup.requests = {{5, 1}, {70, 4}, {64, 17}};
    DcpCase whole(setup);
    run_ranks(2, [&](ProcessGroup& group) {
      const Context context = Context::cpu({.executor = {}, .num_threads = 2, .force_kernel = {}});
      DcpAttention attention(context, group, whole.config());
      const DcpBatch batch = whole.batch();
      core::AlignedBuffer workspace(attention.workspace_size(attention.plan(batch)),
                                    core::AlignedBuffer::kWorkspaceAlignment);
      const DcpArgs args = whole.args(group.rank());
      attention.run(attention.plan(batch), args, {workspace.data(), workspace.bytes()});
      group.barrier();
      const int64_t before = folio::testing::num_allocations();
      group.barrier();
      attention.run(attention.plan(batch), args, {workspace.data(), workspace.bytes()});
      group.barrier();
      const int64_t after = folio::testing::num_allocations();
      group.barrier();
      EXPECT_EQ(after, before);
    });
  }
}

}  // namespace
}  // namespace folio::distributed::testing
