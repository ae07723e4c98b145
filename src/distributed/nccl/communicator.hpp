#pragma once

#include <nccl.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

#include "distributed/nccl/nccl_library.hpp"

namespace folio::inline v0::distributed {

/// An ncclComm_t and the rules of using it: one call at a time, the next one only when NCCL has taken up the last, and
/// none once it is gone. Its own communicators do not block, so that no call waits longer than the timeout.
class Communicator {
 public:
  struct Shape {
    int rank = 0;
    int size = 1;
    int device = 0;
  };

  /// `stop`: set when waiting for NCCL has become pointless.
  Communicator(const NcclLibrary& nccl, std::chrono::milliseconds timeout, const std::atomic<bool>& stop)
      : nccl_(nccl), timeout_(timeout), stop_(stop) {}
  ~Communicator() { cancel(); }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  /// Uses an engine's. Throws kUnavailable where NCCL does not know it.
  void borrow(ncclComm_t communicator);
  /// Makes one on the current device, with the other ranks. Throws kUnavailable, leaving nothing.
  void create(const ncclUniqueId& id, int rank, int size);
  const Shape& shape() const noexcept { return shape_; }
  const NcclLibrary& nccl() const noexcept { return nccl_; }

  /// Runs `call`, which enqueues an operation, and returns when the stream has it. Not empty: what went wrong.
  std::string enqueue(const char* what, const std::function<ncclResult_t(ncclComm_t)>& call);
  /// An error that NCCL has met since. Empty: none, or another thread is enqueueing.
  std::string asynchronous_error();
  /// Ends the operations of an own communicator on the device, and the communicator. Nothing for an engine's.
  void cancel() noexcept;
  /// Ends an own communicator when its operations have ended; for want of that in kFlush it is aborted.
  void close() noexcept;
  static constexpr std::chrono::seconds kFlush{10};

 private:
  using Clock = std::chrono::steady_clock;

  /// Follows a result of ncclInProgress up; ncclInProgress: the time is up.
  ncclResult_t settle(ncclResult_t result, Clock::time_point deadline);
  std::string text(const char* what, ncclResult_t result) const;
  void read_shape();

  const NcclLibrary& nccl_;
  const std::chrono::milliseconds timeout_;
  const std::atomic<bool>& stop_;
  std::mutex mutex_;
  ncclComm_t communicator_ = nullptr;  ///< null: gone
  bool owned_ = false;
  Shape shape_;
};

}  // namespace folio::inline v0::distributed
