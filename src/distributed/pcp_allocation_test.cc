#include <gtest/gtest.h>

#include "core/aligned_buffer.hpp"
#include "core/allocation_test_util.hpp"
#include "distributed/pcp_case_test_util.hpp"

namespace folio::distributed::testing {
namespace {

/// Counted between barriers, when no rank does anything else.
TEST(PcpAttention, AllocatesNothingOnceWarm) {
  for (const PcpExchange exchange : {PcpExchange::kPassQ, PcpExchange::kPassKv}) {
    PcpSetup setup;
    setup.exchange = exchange;
    setup.whole.alibi = setup.whole.sinks = true;
    setup.whole.requests = {{5, 1}, {170, 40}, {64, 17}};
    PcpCase divided(setup);
    run_ranks(2, [&](ProcessGroup& group) {
      const Context context = Context::cpu({.executor = {}, .num_threads = 2, .force_kernel = {}});
      PcpAttention attention(context, group, divided.config());
      const PcpBatch batch = divided.batch();
      core::AlignedBuffer workspace(attention.workspace_size(attention.plan(batch)),
                                    core::AlignedBuffer::kWorkspaceAlignment);
      const PcpArgs args = divided.args(group.rank());
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
