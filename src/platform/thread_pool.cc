#include "platform/thread_pool.hpp"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <new>
#include <system_error>

#include "core/error.hpp"
#include "platform/cpu_count.hpp"

namespace folio::inline v0::platform {

namespace {

/// Longer than the pause between two layers' regions of a busy engine, shorter than anyone would notice in an idle one.
constexpr std::chrono::microseconds kSpinTime{50};
/// The clock is read once per this many looks: reading it costs as much as a pause.
constexpr int kLooksPerClock = 32;

/// Forks between this process and the first one that made a pool. Written in a new child only, by its only thread.
std::atomic<uint32_t> forks{0};

/// Counts forks from the first call on. False where the system has no memory for the handler.
bool count_forks() noexcept {
  static const bool counted =
      pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); }) == 0;
  return counted;
}

void pause_cpu() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/// Looks until `done()` or until the spin time is over; returns whether done.
template <typename Done>
bool spin_until(const Done& done) noexcept {
  const auto start = std::chrono::steady_clock::now();
  do {
    for (int look = 0; look < kLooksPerClock; ++look) {
      if (done()) return true;
      pause_cpu();
    }
  } while (std::chrono::steady_clock::now() - start < kSpinTime);
  return false;
}

}  // namespace

ThreadPool::ThreadPool(int32_t num_threads) {
  core::require(num_threads >= 1, "a thread pool of ", num_threads, " threads; at least 1 is needed");
  // With more threads than CPUs, a spinning thread keeps from running the very thread that it waits for.
  may_spin_ = num_threads <= available_cpus();
  if (!count_forks()) core::fail(ErrorCode::kOutOfMemory, "no memory to notice forks of a process with a thread pool");
  fork_depth_ = forks.load(std::memory_order_relaxed);
  try {
    threads_.reserve(static_cast<size_t>(num_threads) - 1);
    for (int32_t i = 1; i < num_threads; ++i) threads_.emplace_back([this] { worker(); });
  } catch (const std::exception&) {  // std::system_error from the OS, std::bad_alloc from the vector
    const size_t started = threads_.size() + 1;
    stop();
    core::fail(ErrorCode::kOutOfMemory, "the OS gave ", started, " of ", num_threads, " threads");
  }
}

ThreadPool::~ThreadPool() {
  stop();
}

bool ThreadPool::in_forked_child() const noexcept {
  return forks.load(std::memory_order_relaxed) != fork_depth_;
}

void ThreadPool::stop() noexcept {
  if (in_forked_child()) {
    // The objects name threads that do not exist here: there is nothing to join, and they may not be asked.
    for (std::thread& thread : threads_) std::construct_at(&thread);
    return;
  }
  stopping_.store(true);
  alarm_.fetch_add(1);
  alarm_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

Executor ThreadPool::executor() noexcept {
  Executor executor;
  executor.self = this;
  executor.concurrency = concurrency();
  executor.parallel_for = [](void* self, int64_t n, ParallelBody body, void* context) {
    static_cast<ThreadPool*>(self)->parallel_for(n, body, context);
  };
  return executor;
}

void ThreadPool::parallel_for(int64_t n, ParallelBody body, void* context) noexcept {
  if (n <= 1 || threads_.empty() || in_forked_child() || busy_.exchange(true, std::memory_order_acquire)) {
    for (int64_t i = 0; i < n; ++i) body(context, i);
    return;
  }
  open_region(n, body, context);
  work();
  close_region();
  busy_.store(false, std::memory_order_release);
}

void ThreadPool::open_region(int64_t n, ParallelBody body, void* context) noexcept {
  n_ = n;
  body_ = body;
  context_ = context;
  next_.store(0, std::memory_order_relaxed);
  // Sequentially consistent, as are a sleeper's count and its last look at the state: of the two, either the sleeper
  // sees the open region or this thread sees the sleeper.
  state_.store(kOpen, std::memory_order_seq_cst);
  const int32_t sleepers = sleepers_.load(std::memory_order_seq_cst);
  if (sleepers == 0) return;
  alarm_.fetch_add(1, std::memory_order_seq_cst);
  const int64_t wanted = n - 1;
  if (wanted >= sleepers) {
    alarm_.notify_all();
  } else {
    for (int64_t i = 0; i < wanted; ++i) alarm_.notify_one();
  }
}

void ThreadPool::work() noexcept {
  const int64_t n = n_;
  const ParallelBody body = body_;
  void* const context = context_;
  for (int64_t i = next_.fetch_add(1, std::memory_order_relaxed); i < n;
       i = next_.fetch_add(1, std::memory_order_relaxed)) {
    body(context, i);
  }
}

void ThreadPool::close_region() noexcept {
  state_.fetch_and(~kOpen, std::memory_order_acq_rel);
  const auto all_left = [this] { return state_.load(std::memory_order_acquire) == 0; };
  if (all_left()) return;
  if (may_spin_ && spin_until(all_left)) return;
  while (true) {
    caller_sleeps_.store(1, std::memory_order_seq_cst);
    if (state_.load(std::memory_order_seq_cst) == 0) break;
    caller_sleeps_.wait(1, std::memory_order_seq_cst);
  }
  caller_sleeps_.store(0, std::memory_order_relaxed);
}

bool ThreadPool::try_join() noexcept {
  uint32_t state = state_.load(std::memory_order_seq_cst);
  while ((state & kOpen) != 0) {
    if (state_.compare_exchange_weak(state, state + 1, std::memory_order_seq_cst)) return true;
  }
  return false;
}

void ThreadPool::leave() noexcept {
  // Nothing is left to claim, so the region is closed on the way out: otherwise this worker would join it again and
  // again while others finish their last bodies.
  uint32_t state = state_.load(std::memory_order_relaxed);
  while (!state_.compare_exchange_weak(state, (state & ~kOpen) - 1, std::memory_order_seq_cst)) {
  }
  const bool last = (state & ~kOpen) == 1;
  if (last && caller_sleeps_.load(std::memory_order_seq_cst) != 0) {
    caller_sleeps_.store(0, std::memory_order_seq_cst);
    caller_sleeps_.notify_one();
  }
}

bool ThreadPool::wait_for_region() noexcept {
  const auto wake = [this] {
    return stopping_.load(std::memory_order_relaxed) || (state_.load(std::memory_order_relaxed) & kOpen) != 0;
  };
  if (!may_spin_ || !spin_until(wake)) {
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (true) {
      const uint32_t alarm = alarm_.load(std::memory_order_seq_cst);
      if (stopping_.load(std::memory_order_seq_cst) || (state_.load(std::memory_order_seq_cst) & kOpen) != 0) break;
      alarm_.wait(alarm, std::memory_order_seq_cst);
    }
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }
  return !stopping_.load(std::memory_order_seq_cst);
}

void ThreadPool::worker() noexcept {
  while (wait_for_region()) {
    if (!try_join()) continue;
    work();
    leave();
  }
}

}  // namespace folio::inline v0::platform
