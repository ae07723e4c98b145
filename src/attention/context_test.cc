#include "attention/op_state.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "core/expect_refused_test_util.hpp"
#include "platform/cpu_count.hpp"

namespace folio {
namespace {

using ::testing::HasSubstr;

/// An engine's executor: calls in reverse order on the calling thread and counts its regions.
struct ReverseExecutor {
  int regions = 0;
  Executor executor(int32_t concurrency) {
    Executor e;
    e.self = this;
    e.concurrency = concurrency;
    e.parallel_for = [](void* self, int64_t n, ParallelBody body, void* context) {
      ++static_cast<ReverseExecutor*>(self)->regions;
      for (int64_t i = n - 1; i >= 0; --i) body(context, i);
    };
    return e;
  }
};

std::vector<int64_t> visited(const Context& context, int64_t n) {
  struct Order {
    std::vector<int64_t> order;
  } order;
  context.parallel_for(
      n, [](void* self, int64_t i) noexcept { static_cast<Order*>(self)->order.push_back(i); }, &order);
  return order.order;
}

TEST(Context, CpuHasItsOwnPool) {
  ContextOptions options;
  options.num_threads = 3;
  options.force_kernel = "reference";
  const Context context = Context::cpu(options);
  EXPECT_EQ(context.device(), (Device{DeviceType::kCpu, 0}));
  EXPECT_EQ(context.concurrency(), 3);
  EXPECT_EQ(context.state().force_kernel, "reference");
  std::vector<int32_t> calls(1000);
  context.parallel_for(
      1000, [](void* self, int64_t i) noexcept { ++static_cast<int32_t*>(self)[i]; }, calls.data());
  EXPECT_EQ(std::count(calls.begin(), calls.end(), 1), 1000);
}

TEST(Context, DefaultsToTheAffinityMask) {
  EXPECT_EQ(Context::cpu().concurrency(), std::min(platform::available_cpus(), 1024));
}

TEST(Context, PinsItsThreadsWhereToldTo) {
  const std::vector<int32_t> mask = platform::affinity_mask();
  ContextOptions options;
  options.num_threads = static_cast<int32_t>(mask.size());
  options.pinning = ThreadPinning::kPinned;
  const Context pinned = Context::cpu(options);
  EXPECT_TRUE(pinned.state().pool->pinned());
  EXPECT_EQ(platform::affinity_mask(), mask) << "the caller's own";
  options.pinning = ThreadPinning::kUnpinned;
  EXPECT_FALSE(Context::cpu(options).state().pool->pinned());
  options.pinning = ThreadPinning::kPinned;
  options.num_threads = static_cast<int32_t>(mask.size()) + 1;
  folio::testing::expect_refused("threads, where the process may run on " + std::to_string(mask.size()) + " CPUs",
                                 [&] { Context::cpu(options); });
}

TEST(Context, PinnedThreadsKeepToANarrowMask) {
  // On a thread of its own: the mask ends with it.
  std::thread([] {
    const int32_t cpu = platform::affinity_mask().back();
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    ContextOptions options;
    options.pinning = ThreadPinning::kPinned;
    EXPECT_EQ(Context::cpu(options).concurrency(), 1);
    options.num_threads = 2;
    folio::testing::expect_refused("pinning of 2 threads, where the process may run on 1 CPUs",
                                   [&] { Context::cpu(options); });
  }).join();
}

/// Where a machine has CPUs to spare, a mask of two of them is the process's own.
TEST(Context, PinsByItselfInANarrowMask) {
  const std::vector<int32_t> mask = platform::affinity_mask();
  if (mask.size() < 3) GTEST_SKIP() << "needs three CPUs";
  std::thread([&mask] {
    cpu_set_t two;
    CPU_ZERO(&two);
    CPU_SET(mask[0], &two);
    CPU_SET(mask[1], &two);
    ASSERT_EQ(sched_setaffinity(0, sizeof(two), &two), 0);
    const Context context = Context::cpu();
    EXPECT_EQ(context.concurrency(), 2);
    EXPECT_TRUE(context.state().pool->pinned());
  }).join();
}

TEST(Context, CopiesShareTheState) {
  const Context a = Context::cpu();
  const Context b = a;
  EXPECT_EQ(&a.state(), &b.state());
}

TEST(Context, RunsOnTheEnginesExecutor) {
  ReverseExecutor engine;
  ContextOptions options;
  options.executor = engine.executor(7);
  const Context context = Context::cpu(options);
  EXPECT_EQ(context.concurrency(), 7);
  EXPECT_EQ(context.state().pool, nullptr);
  EXPECT_EQ(visited(context, 3), (std::vector<int64_t>{2, 1, 0}));
  EXPECT_EQ(engine.regions, 1);
  EXPECT_TRUE(visited(context, 0).empty());
  EXPECT_EQ(engine.regions, 1) << "nothing to do is not worth a region";
}

TEST(Context, RefusesAbsurdOptions) {
  for (const int32_t threads : {-1, 1025, INT32_MAX}) {
    ContextOptions options;
    options.num_threads = threads;
    folio::testing::expect_refused("num_threads is " + std::to_string(threads), [&] { Context::cpu(options); });
  }
  ReverseExecutor engine;
  for (const int32_t concurrency : {-5, 0, 65537}) {
    ContextOptions options;
    options.executor = engine.executor(concurrency);
    folio::testing::expect_refused("executor.concurrency is " + std::to_string(concurrency),
                                   [&] { Context::cpu(options); });
  }
}

TEST(Context, IgnoredOptions_AreRefused) {
  ReverseExecutor engine;
  ContextOptions both;
  both.executor = engine.executor(2);
  both.num_threads = 2;
  ContextOptions pinned;
  pinned.executor = engine.executor(2);
  pinned.pinning = ThreadPinning::kUnpinned;
  folio::testing::expect_refused("pinning is given beside an executor", [&] { Context::cpu(pinned); });
  folio::testing::expect_refused("beside an executor", [&] { Context::cpu(both); });
  ContextOptions no_function;
  no_function.executor.concurrency = 4;
  folio::testing::expect_refused("parallel_for is null", [&] { Context::cpu(no_function); });
  ContextOptions only_self;
  only_self.executor.self = &engine;
  folio::testing::expect_refused("parallel_for is null", [&] { Context::cpu(only_self); });
}

TEST(Context, CudaDevicesThatAreNotThereAreUnavailable) {
  folio::testing::expect_refused(
      "Context::cpu is offered", [] { Context::cuda(1000); }, ErrorCode::kUnavailable);
  folio::testing::expect_refused("CUDA device -1", [] { Context::cuda(-1); });
  ContextOptions options;
  options.num_threads = -1;
  folio::testing::expect_refused("num_threads is -1", [&] { Context::cuda(0, options); });
  options = {};
  options.pinning = ThreadPinning::kPinned;
  folio::testing::expect_refused("which takes none of them", [&] { Context::cuda(0, options); });
}

TEST(Context, ParallelForChecksItsArguments) {
  const Context context = Context::cpu();
  folio::testing::expect_refused("null body", [&] { context.parallel_for(1, nullptr, nullptr); });
  folio::testing::expect_refused("over -1 items", [&] {
    context.parallel_for(
        -1, [](void*, int64_t) noexcept {}, nullptr);
  });
}

TEST(CpuFeatureNames, AreSorted) {
  const std::vector<std::string> names = cpu_features();
  EXPECT_TRUE(std::is_sorted(names.begin(), names.end()));
}

}  // namespace
}  // namespace folio
