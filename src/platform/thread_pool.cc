#include "platform/thread_pool.hpp"

#include <pthread.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <limits>
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
/// Sleepers that the caller wakes itself, before its own work: a system call each. With two, one that the OS is slow to
/// run does not keep the others asleep.
constexpr int32_t kWokenByCaller = 2;

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

ThreadPool::ThreadPool(int32_t num_threads, std::span<const int32_t> cpus) : concurrency_(num_threads) {
  core::require(num_threads >= 1 && num_threads <= kMaxThreads, "a thread pool of ", num_threads, " threads; 1 to ",
                kMaxThreads, " are taken");
  // With more threads than CPUs, a spinning thread keeps from running the very thread that it waits for.
  may_spin_ = num_threads <= available_cpus();
  if (!count_forks()) core::fail(ErrorCode::kOutOfMemory, "no memory to notice forks of a process with a thread pool");
  fork_depth_ = forks.load(std::memory_order_relaxed);
  pinned_ = !cpus.empty();
  try {
    asleep_ = std::vector<Asleep>(static_cast<size_t>(num_threads));
    threads_.reserve(static_cast<size_t>(num_threads) - 1);
    for (int32_t i = 1; i < num_threads; ++i) {
      threads_.emplace_back([this, i] { worker(i); });
      if (!cpus.empty() && !pin(threads_.back(), cpus[static_cast<size_t>(i)])) pinned_ = false;
    }
  } catch (const std::exception&) {  // std::system_error from the OS, std::bad_alloc from the vectors
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
  for (Asleep& asleep : asleep_) {
    asleep.value.exchange(0);
    asleep.value.notify_one();
  }
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
  work(0);
  close_region();
  busy_.store(false, std::memory_order_release);
}

void ThreadPool::open_region(int64_t n, ParallelBody body, void* context) noexcept {
  n_ = n;
  body_ = body;
  context_ = context;
  owned_ = static_cast<int32_t>(std::min(n, int64_t{concurrency_}));
  next_.store(owned_, std::memory_order_relaxed);
  for (int32_t first = 0; first < owned_; first += kWordBits) {
    const int32_t bits = std::min(kWordBits, owned_ - first);
    const uint64_t nobodys = bits == kWordBits ? 0 : ~uint64_t{0} << bits;
    taken_[static_cast<size_t>(first / kWordBits)].bits.store(nobodys, std::memory_order_relaxed);
  }
  next_to_wake_.store(1, std::memory_order_relaxed);
  // Sequentially consistent, as are a sleeper's count and its last look at the state: of the two, either the sleeper
  // sees the open region or this thread, and those that join, see the sleeper. An exchange wherever a load must not
  // pass the store before it: the same instruction on x86, and QEMU 7 lets `ldar` pass `stlr`, which hangs the tests
  // for Arm.
  state_.exchange(kOpen, std::memory_order_seq_cst);
  wake(kWokenByCaller);
}

void ThreadPool::wake(int32_t most) noexcept {
  if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
  while (most > 0 && next_to_wake_.load(std::memory_order_relaxed) < owned_) {
    const int32_t thread = next_to_wake_.fetch_add(1, std::memory_order_relaxed);
    if (thread >= owned_) return;
    std::atomic<uint32_t>& asleep = asleep_[static_cast<size_t>(thread)].value;
    if (asleep.load(std::memory_order_seq_cst) == 0 || asleep.exchange(0, std::memory_order_seq_cst) == 0) continue;
    asleep.notify_one();
    --most;
  }
}

bool ThreadPool::take(int32_t thread) noexcept {
  const uint64_t bit = uint64_t{1} << thread % kWordBits;
  std::atomic<uint64_t>& word = taken_[static_cast<size_t>(thread / kWordBits)].bits;
  return (word.fetch_or(bit, std::memory_order_relaxed) & bit) == 0;
}

void ThreadPool::work(int32_t thread) noexcept {
  if (n_ > owned_) {
    for (int64_t i = next_.fetch_add(1, std::memory_order_relaxed); i < n_;
         i = next_.fetch_add(1, std::memory_order_relaxed)) {
      body_(context_, i);
    }
  }
  // The thread's own index, and from there on those of threads that have not come: threads that end together try
  // different ones, and neighbours share a memory node.
  const auto words = static_cast<size_t>((owned_ - 1) / kWordBits) + 1;
  const int32_t own_bit = thread % kWordBits;
  const size_t own_word = static_cast<size_t>(thread / kWordBits) % words;
  for (size_t w = 0; w < words; ++w) {
    const size_t word = (own_word + w) % words;
    while (const uint64_t left = ~taken_[word].bits.load(std::memory_order_relaxed)) {
      const int32_t bit = (std::countr_zero(std::rotr(left, own_bit)) + own_bit) % kWordBits;
      if (take(static_cast<int32_t>(word) * kWordBits + bit)) {
        body_(context_, static_cast<int64_t>(word) * kWordBits + bit);
      }
    }
  }
}

void ThreadPool::close_region() noexcept {
  state_.fetch_and(~kOpen, std::memory_order_acq_rel);
  const auto all_left = [this] { return state_.load(std::memory_order_acquire) == 0; };
  if (all_left()) return;
  if (may_spin_ && spin_until(all_left)) return;
  while (true) {
    caller_sleeps_.exchange(1, std::memory_order_seq_cst);
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
    caller_sleeps_.exchange(0, std::memory_order_seq_cst);
    caller_sleeps_.notify_one();
  }
}

bool ThreadPool::wait_for_region(int32_t thread) noexcept {
  const auto wake_up = [this](std::memory_order order) {
    return stopping_.load(order) || (state_.load(order) & kOpen) != 0;
  };
  if (!may_spin_ || !spin_until([&] { return wake_up(std::memory_order_relaxed); })) {
    std::atomic<uint32_t>& asleep = asleep_[static_cast<size_t>(thread)].value;
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (true) {
      asleep.exchange(1, std::memory_order_seq_cst);
      if (wake_up(std::memory_order_seq_cst)) break;
      asleep.wait(1, std::memory_order_seq_cst);
    }
    asleep.store(0, std::memory_order_relaxed);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }
  return !stopping_.load(std::memory_order_seq_cst);
}

void ThreadPool::worker(int32_t thread) noexcept {
  while (wait_for_region(thread)) {
    if (!try_join()) continue;
    wake(std::numeric_limits<int32_t>::max());
    work(thread);
    leave();
  }
}

}  // namespace folio::inline v0::platform
