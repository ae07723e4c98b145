#include "platform/thread_pool.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "folio/types/error.hpp"

namespace folio::platform {
namespace {

/// How often each index was called.
struct Calls {
  explicit Calls(int64_t n) : counts(static_cast<size_t>(n)) {}
  std::vector<std::atomic<int32_t>> counts;
  static void body(void* self, int64_t i) noexcept { ++static_cast<Calls*>(self)->counts[static_cast<size_t>(i)]; }
  bool each_is(int32_t expected) const {
    for (const auto& count : counts) {
      if (count.load() != expected) return false;
    }
    return true;
  }
};

class ThreadPoolOf : public ::testing::TestWithParam<int32_t> {};

TEST_P(ThreadPoolOf, CallsEveryIndexOnce) {
  ThreadPool pool(GetParam());
  EXPECT_EQ(pool.concurrency(), GetParam());
  for (const int64_t n : {0, 1, 2, 3, 7, 64, 1000}) {
    Calls calls(n);
    pool.parallel_for(n, Calls::body, &calls);
    EXPECT_TRUE(calls.each_is(1)) << n;
  }
}

TEST_P(ThreadPoolOf, RunsManyRegionsBackToBack) {
  ThreadPool pool(GetParam());
  constexpr int kRegions = 20'000;
  Calls calls(5);
  for (int i = 0; i < kRegions; ++i) {
    pool.parallel_for(5, Calls::body, &calls);
    // What the bodies wrote is visible to the caller without any atomics of its own.
    ASSERT_TRUE(calls.each_is(i + 1)) << "region " << i;
  }
}

TEST_P(ThreadPoolOf, PassesPlainMemoryBothWays) {
  ThreadPool pool(GetParam());
  struct Sum {
    std::vector<int64_t> in = std::vector<int64_t>(64);
    std::vector<int64_t> out = std::vector<int64_t>(64);
  } data;
  for (int64_t round = 0; round < 2000; ++round) {
    for (int64_t& value : data.in) value += round;
    pool.parallel_for(
        64,
        [](void* self, int64_t i) noexcept {
          auto& d = *static_cast<Sum*>(self);
          d.out[static_cast<size_t>(i)] += d.in[static_cast<size_t>(i)];
        },
        &data);
  }
  int64_t in = 0;
  int64_t expected = 0;
  for (int64_t round = 0; round < 2000; ++round) expected += (in += round);
  for (const int64_t value : data.out) EXPECT_EQ(value, expected);
}

TEST_P(ThreadPoolOf, WakesAfterSleeping) {
  ThreadPool pool(GetParam());
  for (int i = 0; i < 5; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // far beyond the spin time
    Calls calls(100);
    pool.parallel_for(100, Calls::body, &calls);
    EXPECT_TRUE(calls.each_is(1));
  }
}

TEST_P(ThreadPoolOf, IsCorrectFromSeveralThreadsAtOnce) {
  ThreadPool pool(GetParam());
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&pool, &wrong] {
      for (int i = 0; i < 500; ++i) {
        Calls calls(16);
        pool.parallel_for(16, Calls::body, &calls);
        if (!calls.each_is(1)) ++wrong;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong.load(), 0);
}

TEST_P(ThreadPoolOf, RunsNestedRegions) {
  ThreadPool pool(GetParam());
  struct Nest {
    ThreadPool* pool;
    Calls calls{8};
  } nest{&pool};
  pool.parallel_for(
      6,
      [](void* self, int64_t) noexcept {
        auto& n = *static_cast<Nest*>(self);
        n.pool->parallel_for(8, Calls::body, &n.calls);
      },
      &nest);
  EXPECT_TRUE(nest.calls.each_is(6));
}

TEST_P(ThreadPoolOf, WaitsForALongLastBody) {
  ThreadPool pool(GetParam());
  std::atomic<int> finished{0};
  pool.parallel_for(
      GetParam(),
      [](void* self, int64_t i) noexcept {
        // Longer than the caller spins, so that it sleeps too where a worker got index 0.
        if (i == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
        ++*static_cast<std::atomic<int>*>(self);
      },
      &finished);
  EXPECT_EQ(finished.load(), GetParam());
}

TEST_P(ThreadPoolOf, OffersAnExecutor) {
  ThreadPool pool(GetParam());
  const Executor executor = pool.executor();
  EXPECT_EQ(executor.concurrency, GetParam());
  Calls calls(33);
  executor.parallel_for(executor.self, 33, Calls::body, &calls);
  EXPECT_TRUE(calls.each_is(1));
}

INSTANTIATE_TEST_SUITE_P(Threads, ThreadPoolOf, ::testing::Values(1, 2, 3, 8));

TEST(ThreadPool, WakesAllItsThreads) {
  constexpr int32_t kThreads = 3;
  ThreadPool pool(kThreads);
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the workers fall asleep
    std::atomic<int> present{0};
    // Each body waits for all the others, as long as it takes an idle machine many times over.
    pool.parallel_for(
        kThreads,
        [](void* self, int64_t) noexcept {
          auto& here = *static_cast<std::atomic<int>*>(self);
          ++here;
          const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(20);
          while (here.load() < kThreads && std::chrono::steady_clock::now() < give_up) std::this_thread::yield();
          if (here.load() < kThreads) here.store(-kThreads);
        },
        &present);
    ASSERT_EQ(present.load(), kThreads);
  }
}

TEST(ThreadPool, DoesNothingForNegativeCounts) {
  ThreadPool pool(2);
  bool called = false;
  pool.parallel_for(
      -1, [](void* self, int64_t) noexcept { *static_cast<bool*>(self) = true; }, &called);
  EXPECT_FALSE(called);
}

TEST(ThreadPool, RefusesNoThreads) {
  EXPECT_THROW(ThreadPool(0), Error);
  EXPECT_THROW(ThreadPool(-3), Error);
}

TEST(ThreadPool, StartsAndStopsQuickly) {
  for (int i = 0; i < 100; ++i) {
    ThreadPool pool(4);
    if (i % 2 == 0) {
      Calls calls(4);
      pool.parallel_for(4, Calls::body, &calls);
      EXPECT_TRUE(calls.each_is(1));
    }
  }
}

/// Forks, and returns whether the child got through `body` in time and found it true. A child that hangs is ended.
template <typename Body>
bool holds_in_forked_child(const Body& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // ends a child whose parent has been ended
    _exit(body() ? 0 : 1);
  }
  if (child < 0) return false;
  int status = -1;
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  pid_t ended = waitpid(child, &status, WNOHANG);
  while (ended == 0 && std::chrono::steady_clock::now() < give_up) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ended = waitpid(child, &status, WNOHANG);
  }
  if (ended == 0) {
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
  }
  return ended == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST_P(ThreadPoolOf, ForkedChild_RunsRegionsAndDestroysThePool) {
  auto pool = std::make_unique<ThreadPool>(GetParam());
  Calls calls(64);
  pool->parallel_for(64, Calls::body, &calls);
  EXPECT_TRUE(holds_in_forked_child([&] {
    pool->parallel_for(64, Calls::body, &calls);
    const bool each_twice = calls.each_is(2);
    const auto grandchild = [&] {
      pool.reset();
      return true;
    };
    const bool grandchild_ends = holds_in_forked_child(grandchild);
    pool.reset();
    return each_twice && grandchild_ends;
  }));
  pool->parallel_for(64, Calls::body, &calls);
  EXPECT_TRUE(calls.each_is(2)) << "the parent's pool has its threads";
}

/// The child inherits a pool whose owner, a thread that does not exist there, never comes back.
TEST(ThreadPool, ForkedChildOfABusyPool_RunsRegions) {
  auto pool = std::make_unique<ThreadPool>(4);
  struct Gate {
    std::atomic<int32_t> inside{0};
    std::atomic<bool> open{false};
  } gate;
  std::thread owner([&] {
    pool->parallel_for(
        2,
        [](void* self, int64_t) noexcept {
          auto& at = *static_cast<Gate*>(self);
          ++at.inside;
          while (!at.open.load()) std::this_thread::yield();
        },
        &gate);
  });
  while (gate.inside.load() == 0) std::this_thread::yield();
  EXPECT_TRUE(holds_in_forked_child([&] {
    Calls calls(16);
    pool->parallel_for(16, Calls::body, &calls);
    pool.reset();
    return calls.each_is(1);
  }));
  gate.open.store(true);
  owner.join();
}

/// Returns when all of a pool's threads have met in a region, so that each of them has started.
void start_all_threads(ThreadPool& pool) {
  struct Meeting {
    std::atomic<int32_t> missing;
  } meeting{pool.concurrency()};
  pool.parallel_for(
      pool.concurrency(),
      [](void* self, int64_t) noexcept {
        auto& missing = static_cast<Meeting*>(self)->missing;
        --missing;
        while (missing.load() != 0) std::this_thread::yield();
      },
      &meeting);
}

/// Threads that a child makes itself are its own: its child has none of them either.
TEST(ThreadPool, PoolMadeInAForkedChild_HasThreads) {
  const auto pool = std::make_unique<ThreadPool>(4);
  // A thread that starts holds a lock of AddressSanitizer. A child forked meanwhile could make no thread.
  start_all_threads(*pool);
#if !defined(__SANITIZE_THREAD__)  // ThreadSanitizer refuses new threads in the child of a process with several
  EXPECT_TRUE(holds_in_forked_child([] {
    auto own = std::make_unique<ThreadPool>(4);
    start_all_threads(*own);
    Calls calls(16);
    own->parallel_for(16, Calls::body, &calls);
    const auto grandchild = [&] {
      own->parallel_for(16, Calls::body, &calls);
      own.reset();
      return calls.each_is(2);
    };
    return calls.each_is(1) && holds_in_forked_child(grandchild);
  }));
#endif
}

}  // namespace
}  // namespace folio::platform
