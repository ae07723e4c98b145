#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/aligned_buffer.hpp"
#include "core/allocation_test_util.hpp"
#include "folio/distributed.hpp"

/// What tests of attention over ranks expect of calls, whatever is divided.
namespace folio::inline v0::distributed::testing {

template <typename Call>
void expect_error(ErrorCode code, const char* text, Call call) {
  try {
    call();
    ADD_FAILURE() << "did not throw: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_THAT(error.what(), ::testing::HasSubstr(text));
  }
}

/// Plans and runs on two ranks, twice, the second time without allocating. Counted between barriers, when no rank does
/// anything else. For programs that count (core/allocation_test_util.hpp).
template <typename Attention, typename Case>
void expect_no_allocations_once_warm(Case& divided) {
  run_ranks(2, [&](ProcessGroup& group) {
    const Context context = Context::cpu({.executor = {}, .num_threads = 2, .force_kernel = {}});
    Attention attention(context, group, divided.config());
    const auto batch = divided.batch();
    core::AlignedBuffer workspace(attention.workspace_size(attention.plan(batch)),
                                  core::AlignedBuffer::kWorkspaceAlignment);
    const auto args = divided.args(group.rank());
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

}  // namespace folio::inline v0::distributed::testing
