// A program of its own, because it replaces operator new: a warm step allocates nothing.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "core/aligned_buffer.hpp"
#include "distributed/dcp_case_test_util.hpp"

namespace {

std::atomic<bool> counting = false;
std::atomic<int64_t> allocations = 0;

}  // namespace

// noinline: otherwise gcc sees malloc and operator delete as a mismatched pair.
__attribute__((noinline)) void* operator new(size_t bytes) {
  if (counting) ++allocations;
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
__attribute__((noinline)) void operator delete(void* memory) noexcept {
  std::free(memory);
}
__attribute__((noinline)) void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

namespace folio::distributed::testing {
namespace {

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
      if (group.rank() == 0) counting = true;
      group.barrier();
      attention.run(attention.plan(batch), args, {workspace.data(), workspace.bytes()});
      group.barrier();
      if (group.rank() == 0) counting = false;
      group.barrier();
      EXPECT_EQ(allocations, 0);
    });
  }
}

}  // namespace
}  // namespace folio::distributed::testing
