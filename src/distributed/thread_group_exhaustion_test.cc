// Ranks that are threads, where there is no memory: the others must hear of it, and the process must live.
#include <gtest/gtest.h>

#include <atomic>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>

#include "core/allocation_test_util.hpp"
#include "folio/distributed/thread_group.hpp"
#include "folio/types/error.hpp"

namespace folio::distributed {
namespace {

constexpr int64_t kUnlimited = -1;

/// Allocations that this thread has left.
thread_local int64_t allocations_left = kUnlimited;

void* allocate_within_limit(size_t, size_t) {
  if (allocations_left == 0) throw std::bad_alloc();
  if (allocations_left > 0) --allocations_left;
  return nullptr;  // the heap's
}

class ThreadGroupWithoutMemory : public ::testing::Test {
 protected:
  void SetUp() override { folio::testing::memory_hook.allocate = allocate_within_limit; }
  void TearDown() override {
    allocations_left = kUnlimited;
    folio::testing::memory_hook.allocate = nullptr;
  }
};

/// Longer than any of these tests takes.
const ThreadGroupOptions kPatient{.timeout = std::chrono::seconds(60), .context = std::nullopt};

TEST_F(ThreadGroupWithoutMemory, AThreadThatCannotBeMade_EndsTheRanksThatRun) {
  std::atomic<int32_t> timed_out{0};
  const auto body = [&](ProcessGroup& group) {
    try {
      group.barrier();
    } catch (const Error& error) {
      if (std::string(error.what()).find("waited") != std::string::npos) ++timed_out;
    }
  };
  int64_t refused = 0;
  for (bool done = false; !done; ++refused) {
    ASSERT_LT(refused, 200);
    allocations_left = refused;
    try {
      run_ranks(4, body, kPatient);
      done = true;
    } catch (const std::bad_alloc&) {
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
    }
    allocations_left = kUnlimited;
  }
  EXPECT_GT(refused, 8) << "of the groups, and of three threads";
  EXPECT_EQ(timed_out.load(), 0);
}

TEST_F(ThreadGroupWithoutMemory, ARankThatThrows_EndsTheOthers) {
  std::atomic<int32_t> ended{0};
  const auto body = [&](ProcessGroup& group) {
    if (group.rank() == 1) {
      const std::runtime_error error("rank 1 is out of memory");
      allocations_left = 0;
      throw error;
    }
    try {
      group.barrier();
    } catch (const Error& error) {
      if (std::string(error.what()).find("a rank gave up") != std::string::npos) ++ended;
    }
  };
  EXPECT_THROW(run_ranks(3, body, kPatient), std::runtime_error);
  EXPECT_EQ(ended.load(), 2);
}

TEST_F(ThreadGroupWithoutMemory, AHandleThatIsDestroyed_EndsTheOthers) {
  auto groups = make_thread_groups(2, kPatient);
  allocations_left = 0;
  groups[1].reset();
  allocations_left = kUnlimited;
  try {
    groups[0]->barrier();
    ADD_FAILURE() << "rank 1 has left";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
    EXPECT_STREQ(error.what(), "the group of threads has failed: a rank gave up");
  }
}

}  // namespace
}  // namespace folio::distributed
