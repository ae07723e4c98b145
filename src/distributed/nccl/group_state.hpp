#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "distributed/nccl/communicator.hpp"
#include "folio/types/device.hpp"
#include "platform/cuda/memory.hpp"
#include "platform/cuda/stream.hpp"

namespace folio::inline v0::distributed {

/// What a group and the thread that watches it share: the failure, the communicator, what the device has not finished,
/// and the memory that it may still use.
class GroupState {
 public:
  GroupState(const NcclLibrary& nccl, int32_t device, std::chrono::milliseconds timeout)
      : communicator(nccl, timeout, failed_), device_(device), timeout_(timeout) {}

  /// The body of the group's thread. Ends when `close` was called, with nothing of the group left on the device.
  void watch() noexcept;
  /// Asks the thread to end, and returns whether it did in time.
  bool close() noexcept;

  /// The first reason stays. The thread then aborts the communicator.
  void fail(std::string_view reason) noexcept;
  std::chrono::milliseconds timeout() const noexcept { return timeout_; }
  bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  /// Throws kUnavailable with the reason.
  void throw_if_failed() const;

  /// Communicator::enqueue, after which the group has failed or the stream has the operation. Throws kUnavailable.
  void enqueue(const char* what, const std::function<ncclResult_t(ncclComm_t)>& call);

  /// Watches what `stream` has so far. `what` lives for ever.
  void mark(const char* what, Stream stream);

  Communicator communicator;
  std::vector<platform::cuda::DeviceMemory> device_memory;
  std::vector<platform::cuda::PinnedMemory> host_memory;
  uint64_t operations = 0;  ///< that this rank has called; of its calling thread

 private:
  using Clock = std::chrono::steady_clock;

  /// A point in a stream that the device has not passed.
  struct Mark {
    platform::cuda::Event event;
    const char* what = "";
    uint64_t number = 0;  ///< of the operation
    Clock::time_point since;
    bool open = false;
  };
  /// Two marks a stream, however much it has: one is watched, the other moves on with every operation and takes over
  /// when the first has been passed.
  struct StreamMarks {
    Stream stream;
    Mark watched;
    Mark latest;
  };

  void look_at_marks();
  bool any_mark() const;

  std::atomic<bool> failed_{false};
  const int32_t device_;
  const std::chrono::milliseconds timeout_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<StreamMarks> marks_;
  std::string failure_;  ///< empty where there was no memory for it
  bool closing_ = false;
  bool closed_ = false;
};

}  // namespace folio::inline v0::distributed
