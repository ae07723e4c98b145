#include "distributed/nccl/communicator.hpp"

#include <algorithm>
#include <thread>

#include "core/error.hpp"

namespace folio::inline v0::distributed {

std::string Communicator::text(const char* what, ncclResult_t result) const {
  const char* const detail = nccl_.get_last_error(communicator_);
  const bool has_detail = detail != nullptr && *detail != '\0';
  return core::message(what, ": ", nccl_.get_error_string(result), has_detail ? ": " : "", has_detail ? detail : "");
}

ncclResult_t Communicator::settle(ncclResult_t result, Clock::time_point deadline) {
  constexpr int kBusyPolls = 1000;  // NCCL's own thread needs some microseconds
  for (int polls = 0; result == ncclInProgress; ++polls) {
    const ncclResult_t asked = nccl_.comm_get_async_error(communicator_, &result);
    if (asked != ncclSuccess) return asked;
    if (result != ncclInProgress || polls < kBusyPolls) continue;
    if (stop_.load(std::memory_order_acquire) || Clock::now() >= deadline) return ncclInProgress;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return result;
}

void Communicator::read_shape() {
  ncclResult_t result = nccl_.comm_count(communicator_, &shape_.size);
  if (result == ncclSuccess) result = nccl_.comm_user_rank(communicator_, &shape_.rank);
  if (result == ncclSuccess) result = nccl_.comm_cu_device(communicator_, &shape_.device);
  if (result != ncclSuccess) core::fail(ErrorCode::kUnavailable, text("asking an NCCL communicator who it is", result));
}

void Communicator::borrow(ncclComm_t communicator) {
  communicator_ = communicator;
  read_shape();
}

void Communicator::create(const ncclUniqueId& id, int rank, int size) {
  owned_ = true;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  const Clock::time_point deadline = Clock::now() + timeout_;
  ncclResult_t result = nccl_.comm_init_rank_config(&communicator_, size, id, rank, &config);
  if (communicator_ != nullptr) result = settle(result, deadline);
  if (result == ncclSuccess) {
    try {
      read_shape();
      return;
    } catch (const std::exception&) {
      cancel();
      throw;
    }
  }
  const std::string problem = result == ncclInProgress
                                  ? core::message("rank ", rank, " waited ", static_cast<int64_t>(timeout_.count()),
                                                  " ms for ", size, " ranks to make an NCCL group")
                                  : text("making an NCCL communicator", result);
  cancel();
  core::fail(ErrorCode::kUnavailable, problem);
}

std::string Communicator::enqueue(const char* what, const std::function<ncclResult_t(ncclComm_t)>& call) {
  const std::lock_guard lock(mutex_);
  if (communicator_ == nullptr) return "its communicator is gone";
  const ncclResult_t result = settle(call(communicator_), Clock::now() + timeout_);
  if (result == ncclSuccess) return {};
  if (result != ncclInProgress) return text(what, result);
  return core::message("rank ", shape_.rank, " waited ", static_cast<int64_t>(timeout_.count()),
                       " ms for NCCL to begin ", what);
}

std::string Communicator::asynchronous_error() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || communicator_ == nullptr) return {};
  ncclResult_t result = ncclSuccess;
  const ncclResult_t asked = nccl_.comm_get_async_error(communicator_, &result);
  if (asked != ncclSuccess) result = asked;
  return result == ncclSuccess || result == ncclInProgress ? std::string() : text("NCCL", result);
}

void Communicator::cancel() noexcept {
  const std::lock_guard lock(mutex_);
  if (owned_ && communicator_ != nullptr) static_cast<void>(nccl_.comm_abort(communicator_));
  communicator_ = nullptr;
}

void Communicator::close() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (owned_ && communicator_ != nullptr) {
      const Clock::time_point deadline = Clock::now() + std::min<std::chrono::milliseconds>(timeout_, kFlush);
      const ncclResult_t flushed = settle(nccl_.comm_finalize(communicator_), deadline);
      if (flushed == ncclSuccess) {
        static_cast<void>(nccl_.comm_destroy(communicator_));
        communicator_ = nullptr;
      }
    }
  }
  cancel();
}

}  // namespace folio::inline v0::distributed
