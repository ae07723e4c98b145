#include "distributed/nccl/group_state.hpp"

#include <algorithm>
#include <exception>
#include <new>
#include <utility>

#include "core/error.hpp"
#include "platform/cuda/device.hpp"

namespace folio::inline v0::distributed {

using std::chrono::milliseconds;

void GroupState::fail(std::string_view reason) noexcept {
  const std::lock_guard lock(mutex_);
  if (failed()) return;
  try {
    failure_ = reason;
  } catch (const std::bad_alloc&) {  // the text stays empty
  }
  failed_.store(true, std::memory_order_release);
  changed_.notify_all();
}

void GroupState::throw_if_failed() const {
  if (!failed()) return;
  const std::lock_guard lock(mutex_);
  core::fail(ErrorCode::kUnavailable,
             "the NCCL group has failed: ", failure_.empty() ? "a rank gave up" : failure_.c_str());
}

void GroupState::enqueue(const char* what, const std::function<ncclResult_t(ncclComm_t)>& call) {
  throw_if_failed();
  const std::string problem = communicator.enqueue(what, call);
  if (problem.empty()) return;
  fail(problem);
  throw_if_failed();
}

void GroupState::mark(const char* what, Stream stream) {
  const std::lock_guard lock(mutex_);
  auto found = std::find_if(marks_.begin(), marks_.end(),
                            [&](const StreamMarks& marks) { return marks.stream.handle == stream.handle; });
  if (found == marks_.end()) {
    marks_.emplace_back().stream = stream;
    found = marks_.end() - 1;
  }
  Mark& mark = found->watched.open ? found->latest : found->watched;
  mark.event.record(stream);
  mark.what = what;
  mark.number = operations;
  mark.since = Clock::now();
  mark.open = true;
  changed_.notify_all();
}

bool GroupState::any_mark() const {
  return std::any_of(marks_.begin(), marks_.end(), [](const StreamMarks& marks) { return marks.watched.open; });
}

/// With the lock. Throws what the device reports.
void GroupState::look_at_marks() {
  for (StreamMarks& marks : marks_) {
    while (marks.watched.open && marks.watched.event.passed()) {
      marks.watched.open = false;
      std::swap(marks.watched, marks.latest);
    }
    if (!marks.watched.open || Clock::now() - marks.watched.since < timeout_) continue;
    core::fail(ErrorCode::kUnavailable, "rank ", communicator.shape().rank, " waited ",
               static_cast<int64_t>(timeout_.count()), " ms for the device to finish ", marks.watched.what,
               " (operation ", marks.watched.number, "): another rank has not come to it");
  }
}

void GroupState::watch() noexcept {
  static_cast<void>(cudaSetDevice(device_));
  const platform::cuda::RelaxedCapture relaxed;
  // Often enough to be in time, seldom enough to cost nothing.
  const milliseconds period = std::clamp(timeout_ / 20, milliseconds(1), milliseconds(100));
  std::unique_lock lock(mutex_);
  while (!closing_ && !failed()) {
    if (!any_mark()) {
      changed_.wait(lock);
      continue;
    }
    changed_.wait_for(lock, period, [&] { return closing_ || failed(); });
    std::string problem;
    try {
      look_at_marks();
      problem = communicator.asynchronous_error();
    } catch (const std::exception& error) {
      problem = error.what();
    }
    if (problem.empty()) continue;
    lock.unlock();
    fail(problem);
    lock.lock();
  }
  const bool broken = failed();
  lock.unlock();
  if (broken) communicator.cancel();
  lock.lock();
  changed_.wait(lock, [&] { return closing_; });
  lock.unlock();
  communicator.close();
  // Freed here: an engine's communicator that hangs would hold whoever frees memory until the engine aborts it.
  device_memory.clear();
  host_memory.clear();
  lock.lock();
  marks_.clear();
  closed_ = true;
  changed_.notify_all();
}

bool GroupState::close() noexcept {
  std::unique_lock lock(mutex_);
  closing_ = true;
  changed_.notify_all();
  // NCCL holds a communicator until the graphs that captured it are gone, and a device that hangs holds its memory.
  return changed_.wait_for(lock, 2 * Communicator::kFlush, [&] { return closed_; });
}

}  // namespace folio::inline v0::distributed
