#include "platform/thread_pool.hpp"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <ctime>
#include <memory>
#include <thread>
#include <vector>

#include "folio/types/error.hpp"
#include "platform/cpu_count.hpp"

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

/// More than the caller wakes itself.
TEST(ThreadPool, WakesAllItsThreads) {
  constexpr int32_t kThreads = 9;
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

TEST(ThreadPool, RefusesNoThreadsAndTooMany) {
  EXPECT_THROW(ThreadPool(0), Error);
  EXPECT_THROW(ThreadPool(-3), Error);
  EXPECT_THROW(ThreadPool(ThreadPool::kMaxThreads + 1), Error);
}

/// Calls body(i) on all of a pool's threads at once: each call waits for all others, so no thread makes two.
template <typename Body>
void on_each_thread(ThreadPool& pool, const Body& body) {
  struct Meeting {
    const Body* body;
    std::atomic<int32_t> missing;
  } meeting{&body, pool.concurrency()};
  pool.parallel_for(
      pool.concurrency(),
      [](void* self, int64_t i) noexcept {
        auto& all = *static_cast<Meeting*>(self);
        --all.missing;
        while (all.missing.load() != 0) std::this_thread::yield();
        (*all.body)(static_cast<size_t>(i));
      },
      &meeting);
}

TEST(ThreadPool, AnIndexIsItsThreads) {
  ThreadPool pool(5);
  std::vector<std::thread::id> threads(5);
  on_each_thread(pool, [&](size_t i) { threads[i] = std::this_thread::get_id(); });
  EXPECT_EQ(threads[0], std::this_thread::get_id());
  for (int round = 0; round < 50; ++round) {
    if (round % 10 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::vector<std::thread::id> now(5);
    on_each_thread(pool, [&](size_t i) { now[i] = std::this_thread::get_id(); });
    ASSERT_EQ(now, threads);
  }
}

TEST(ThreadPool, MoreThreadsThanBitsOfAWord_CallEveryIndexOnce) {
  ThreadPool pool(130);
  for (const int64_t n : {2, 63, 64, 65, 127, 128, 129, 130, 131, 1000}) {
    for (int round = 0; round < 3; ++round) {
      Calls calls(n);
      pool.parallel_for(n, Calls::body, &calls);
      ASSERT_TRUE(calls.each_is(1)) << n;
    }
  }
}

TEST(ThreadPool, PinsItsThreadsAndNotTheCaller) {
  const std::vector<int32_t> mask = affinity_mask();
  ASSERT_FALSE(mask.empty());
  // Two threads on each CPU, so that this says something on a machine of two.
  std::vector<int32_t> cpus = mask;
  cpus.resize(std::min<size_t>(cpus.size(), 8));
  cpus.insert(cpus.end(), cpus.rbegin(), cpus.rend());
  const auto num_threads = static_cast<int32_t>(cpus.size());
  std::vector<std::vector<int32_t>> masks(cpus.size());
  const auto see_masks = [&](size_t i) { masks[i] = affinity_mask(); };
  ThreadPool pinned(num_threads, cpus);
  EXPECT_TRUE(pinned.pinned());
  on_each_thread(pinned, see_masks);
  EXPECT_EQ(masks[0], mask);
  for (size_t i = 1; i < cpus.size(); ++i) EXPECT_EQ(masks[i], std::vector<int32_t>{cpus[i]}) << "thread " << i;
  ThreadPool unpinned(num_threads);
  EXPECT_FALSE(unpinned.pinned());
  on_each_thread(unpinned, see_masks);
  for (const std::vector<int32_t>& of_thread : masks) EXPECT_EQ(of_thread, mask);
}

TEST(ThreadPool, SaysThatTheOsDoesNotPin) {
  ThreadPool pool(2, std::vector<int32_t>{0, 65535});  // no such CPU
  EXPECT_FALSE(pool.pinned());
  Calls calls(8);
  pool.parallel_for(8, Calls::body, &calls);
  EXPECT_TRUE(calls.each_is(1));
}

/// The CPU time that a pool's threads have used so far, in nanoseconds.
std::vector<int64_t> cpu_times(const std::vector<clockid_t>& clocks) {
  std::vector<int64_t> times;
  for (const clockid_t clock : clocks) {
    timespec time{};
    EXPECT_EQ(clock_gettime(clock, &time), 0);
    times.push_back(int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec);
  }
  return times;
}

TEST_P(ThreadPoolOf, IdleThreadsUseNoCpu) {
  ThreadPool pool(GetParam());
  std::vector<clockid_t> clocks(static_cast<size_t>(GetParam()));
  on_each_thread(pool, [&](size_t i) { pthread_getcpuclockid(pthread_self(), &clocks[i]); });
  clocks.erase(clocks.begin());  // the caller's
  // They fall asleep after their spin time, whenever the machine lets them run it.
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  bool idle = false;
  while (!idle && std::chrono::steady_clock::now() < give_up) {
    const std::vector<int64_t> before = cpu_times(clocks);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    idle = cpu_times(clocks) == before;
  }
  EXPECT_TRUE(idle);
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

/// Threads that a child makes itself are its own: its child has none of them either.
TEST(ThreadPool, PoolMadeInAForkedChild_HasThreads) {
  const auto pool = std::make_unique<ThreadPool>(4);
  // A thread that starts holds a lock of AddressSanitizer. A child forked meanwhile could make no thread.
  on_each_thread(*pool, [](size_t) {});
#if !defined(__SANITIZE_THREAD__)  // ThreadSanitizer refuses new threads in the child of a process with several
  EXPECT_TRUE(holds_in_forked_child([] {
    auto own = std::make_unique<ThreadPool>(4);
    on_each_thread(*own, [](size_t) {});
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
