#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <thread>
#include <vector>

#include "folio/types/device.hpp"

namespace folio::inline v0::platform {

/// A small fork-join pool: Folio's own executor. The calling thread takes part, as thread 0. The others spin for a
/// while after a region (attention runs once per layer, so the next region is near) and then sleep.
///
/// Index i is thread i's where it comes in time: what belongs to an index (a worker's scratch memory) is first touched
/// by its thread, so it lies on that thread's memory node, and stays in its core's caches. Indices beyond the threads
/// are claimed one at a time before, those of threads that have not come afterwards.
///
/// The caller wakes few sleepers, because a wake-up takes longer than many a body; who wakes up wakes the rest. A
/// region never waits for a thread that has not joined it: on a busy machine the caller does the work itself. One
/// region runs at a time. A second caller, and a body that calls back, run their region alone on their own thread: both
/// are correct under the executor's contract and neither can deadlock. A region allocates nothing.
///
/// A forked child has none of the pool's threads: there every region runs on the calling thread alone. The fork must
/// not be made from inside a body.
class ThreadPool {
 public:
  static constexpr int32_t kMaxThreads = 1024;
  /// `num_threads`: 1 to kMaxThreads, the caller included. `cpus`: as place_threads says; the caller is not pinned.
  /// Throws Error(kOutOfMemory) if the OS gives fewer threads.
  explicit ThreadPool(int32_t num_threads, std::span<const int32_t> cpus = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int32_t concurrency() const noexcept { return concurrency_; }
  /// Whether each thread was given a CPU and the OS keeps it there.
  bool pinned() const noexcept { return pinned_; }

  /// Calls body(context, i) once for every i in [0, n); returns when all calls have. Nothing for n <= 0.
  void parallel_for(int64_t n, ParallelBody body, void* context) noexcept;

  /// This pool as an executor; valid as long as the pool.
  Executor executor() noexcept;

 private:
  // Different lines: the claimed index is written by everyone, the state is what sleepers-to-be poll.
  static constexpr size_t kLine = 64;
  static constexpr int32_t kWordBits = 64;
  // state_: whether a region may be joined, and how many workers have joined it.
  static constexpr uint32_t kOpen = 1u << 31;

  /// Which of kWordBits threads' indices are taken.
  struct alignas(kLine) TakenIndices {
    std::atomic<uint64_t> bits{0};
  };
  /// 1 while a worker sleeps or is about to; whoever makes it 0 must notify.
  struct alignas(kLine) Asleep {
    std::atomic<uint32_t> value{0};
  };

  bool in_forked_child() const noexcept;
  void worker(int32_t thread) noexcept;
  void stop() noexcept;
  bool wait_for_region(int32_t thread) noexcept;
  bool try_join() noexcept;
  void leave() noexcept;
  void wake(int32_t most) noexcept;
  bool take(int32_t thread) noexcept;
  void work(int32_t thread) noexcept;
  void open_region(int64_t n, ParallelBody body, void* context) noexcept;
  void close_region() noexcept;

  // The region. Written only while no region is open and no worker is inside.
  int64_t n_ = 0;
  ParallelBody body_ = nullptr;
  void* context_ = nullptr;
  int32_t owned_ = 0;  ///< indices below it are their threads'

  std::array<TakenIndices, kMaxThreads / kWordBits> taken_;
  alignas(kLine) std::atomic<int64_t> next_{0};  ///< of the indices from owned_ on
  alignas(kLine) std::atomic<uint32_t> state_{0};
  alignas(kLine) std::atomic<bool> busy_{false};     ///< a caller owns the pool
  std::atomic<uint32_t> caller_sleeps_{0};           ///< the owner waits for the last worker to leave
  alignas(kLine) std::atomic<int32_t> sleepers_{0};  ///< workers that sleep or are about to
  std::atomic<bool> stopping_{false};
  alignas(kLine) std::atomic<int32_t> next_to_wake_{0};  ///< of the region's threads

  // Written by the constructor alone.

  alignas(kLine) const int32_t concurrency_;
  bool pinned_ = false;
  bool may_spin_ = true;
  uint32_t fork_depth_ = 0;  ///< of the process that has the threads
  std::vector<Asleep> asleep_;
  std::vector<std::thread> threads_;  ///< without the caller: thread i is threads_[i - 1]
};

}  // namespace folio::inline v0::platform
