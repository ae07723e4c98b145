#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "folio/types/device.hpp"

namespace folio::inline v0::platform {

/// A small fork-join pool: Folio's own executor. The calling thread takes part; the others spin for a while after a
/// region (attention runs once per layer, so the next region is near) and then sleep. Indices are claimed one at a
/// time, in order. A region never waits for a thread that has not joined it: on a busy machine the caller does the work
/// itself. One region runs at a time. A second caller, and a body that calls back, run their region alone on their own
/// thread: both are correct under the executor's contract and neither can deadlock. A region allocates nothing.
///
/// A forked child has none of the pool's threads: there every region runs on the calling thread alone. The fork must
/// not be made from inside a body.
class ThreadPool {
 public:
  /// `num_threads` >= 1, the caller included. Throws Error(kOutOfMemory) if the OS gives fewer threads.
  explicit ThreadPool(int32_t num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int32_t concurrency() const noexcept { return static_cast<int32_t>(threads_.size()) + 1; }

  /// Calls body(context, i) once for every i in [0, n); returns when all calls have. Nothing for n <= 0.
  void parallel_for(int64_t n, ParallelBody body, void* context) noexcept;

  /// This pool as an executor; valid as long as the pool.
  Executor executor() noexcept;

 private:
  // Different lines: the claimed index is written by everyone, the state is what sleepers-to-be poll.
  static constexpr size_t kLine = 64;
  // state_: whether a region may be joined, and how many workers have joined it.
  static constexpr uint32_t kOpen = 1u << 31;

  bool in_forked_child() const noexcept;
  void worker() noexcept;
  void stop() noexcept;
  bool wait_for_region() noexcept;
  bool try_join() noexcept;
  void leave() noexcept;
  void work() noexcept;
  void open_region(int64_t n, ParallelBody body, void* context) noexcept;
  void close_region() noexcept;

  // The region. Written only while no region is open and no worker is inside.
  int64_t n_ = 0;
  ParallelBody body_ = nullptr;
  void* context_ = nullptr;

  alignas(kLine) std::atomic<int64_t> next_{0};
  alignas(kLine) std::atomic<uint32_t> state_{0};
  alignas(kLine) std::atomic<bool> busy_{false};     ///< a caller owns the pool
  std::atomic<uint32_t> caller_sleeps_{0};           ///< the owner waits for the last worker to leave
  alignas(kLine) std::atomic<int32_t> sleepers_{0};  ///< workers that sleep or are about to
  std::atomic<uint32_t> alarm_{0};                   ///< changes when sleepers must look again
  std::atomic<bool> stopping_{false};

  bool may_spin_ = true;
  uint32_t fork_depth_ = 0;  ///< of the process that has the threads
  std::vector<std::thread> threads_;
};

}  // namespace folio::inline v0::platform
