#include "folio/distributed/thread_group.hpp"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include "attention/op_state.hpp"
#include "core/error.hpp"
#include "distributed/operation_checks.hpp"
#include "distributed/rank_sum.hpp"

namespace folio::inline v0::distributed {
namespace {

/// What a rank asks of the others. All must ask the same.
struct Call {
  const char* name = "";
  size_t bytes = 0;
  const void* send = nullptr;
  bool same(const Call& other) const { return std::strcmp(name, other.name) == 0 && bytes == other.bytes; }
};

/// What the ranks share: a barrier that can fail, and what each of them has brought to it.
class Meeting {
 public:
  Meeting(int32_t world, std::chrono::milliseconds timeout) : timeout_(timeout), calls_(static_cast<size_t>(world)) {}

  int32_t world() const { return static_cast<int32_t>(calls_.size()); }
  std::chrono::milliseconds timeout() const noexcept { return timeout_; }

  /// What rank `rank` sends, between the two meetings of an operation.
  const void* sent_by(int32_t rank) const { return calls_[static_cast<size_t>(rank)].send; }

  /// Returns when all ranks have come with the same call; their calls may be read until they meet again.
  void meet(int32_t rank, const Call& call) {
    std::unique_lock lock(mutex_);
    throw_if_failed();
    calls_[static_cast<size_t>(rank)] = call;
    if (++arrived_ == world()) {
      check_same_calls();
      arrived_ = 0;
      ++round_;
      lock.unlock();
      changed_.notify_all();
      return;
    }
    const uint64_t mine = round_;
    if (!changed_.wait_for(lock, timeout_, [&] { return round_ != mine || failed_; })) {
      set_failure("rank ", rank, " waited ", static_cast<int64_t>(timeout_.count()), " ms in ", call.name, " for ",
                  world() - arrived_, " of ", world(), " ranks");
    }
    if (round_ == mine) throw_if_failed();
  }

  /// Likewise, inside an operation: all ranks have begun it and nothing keeps them from coming, so nobody leaves
  /// before, failure or not, and takes away a buffer that another rank still reads.
  void meet_inside() {
    std::unique_lock lock(mutex_);
    if (++arrived_ == world()) {
      arrived_ = 0;
      ++round_;
      lock.unlock();
      changed_.notify_all();
      return;
    }
    const uint64_t mine = round_;
    changed_.wait(lock, [&] { return round_ != mine; });
  }

  /// Ends the group; for want of memory without `reason`.
  template <typename... Parts>
  void fail(const Parts&... reason) noexcept {
    const std::lock_guard lock(mutex_);
    set_failure(reason...);
  }

 private:
  template <typename... Parts>
  void set_failure(const Parts&... reason) noexcept {
    if (!failed_) {
      failed_ = true;
      try {
        failure_ = core::message(reason...);
      } catch (const std::bad_alloc&) {  // the text stays empty
      }
    }
    changed_.notify_all();
  }

  void throw_if_failed() const {
    if (!failed_) return;
    core::fail(ErrorCode::kUnavailable,
               "the group of threads has failed: ", failure_.empty() ? "a rank gave up" : failure_.c_str());
  }

  void check_same_calls() {
    for (size_t r = 1; r < calls_.size(); ++r) {
      if (calls_[r].same(calls_[0])) continue;
      set_failure("rank 0 calls ", calls_[0].name, " of ", static_cast<uint64_t>(calls_[0].bytes), " bytes, rank ",
                  static_cast<uint64_t>(r), " ", calls_[r].name, " of ", static_cast<uint64_t>(calls_[r].bytes),
                  " bytes");
      throw_if_failed();
    }
  }

  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Call> calls_;  ///< [world]
  int32_t arrived_ = 0;
  uint64_t round_ = 0;
  bool failed_ = false;
  std::string failure_;  ///< why; empty where there was no memory for it
};

class ThreadGroup final : public ProcessGroup {
 public:
  ThreadGroup(std::shared_ptr<Meeting> meeting, int32_t rank, const std::optional<Context>& context)
      : meeting_(std::move(meeting)), rank_(rank), parts_(static_cast<size_t>(meeting_->world())) {
    if (!context) return;
    device_ = context->device();
    gpu_ = context->state().gpu;
  }
  ~ThreadGroup() override { meeting_->fail("rank ", rank_, " has left it"); }

  int32_t rank() const noexcept override { return rank_; }
  int32_t size() const noexcept override { return meeting_->world(); }
  Device device() const noexcept override { return device_; }
  std::chrono::milliseconds timeout() const noexcept override { return meeting_->timeout(); }

  void all_gather(const void* send, void* recv, size_t bytes, Stream stream) override {
    check_usable(stream);
    check_all_gather(send, recv, bytes, rank_, size());
    arrive(stream, {"all_gather", bytes, send});
    auto* to = static_cast<std::byte*>(recv);
    for (int32_t r = 0; r < size(); ++r, to += bytes) {
      const void* from = meeting_->sent_by(r);
      if (from != to) move(to, from, bytes, stream);
    }
    part(stream);
  }

  void all_gather_host(const void* send, void* recv, size_t bytes) override {
    check_all_gather(send, recv, bytes, rank_, size());
    meeting_->meet(rank_, {"all_gather_host", bytes, send});
    auto* to = static_cast<std::byte*>(recv);
    for (int32_t r = 0; r < size() && bytes > 0; ++r, to += bytes) {
      if (meeting_->sent_by(r) != to) std::memcpy(to, meeting_->sent_by(r), bytes);
    }
    meeting_->meet_inside();
  }

  void all_to_all(const void* send, void* recv, size_t bytes, Stream stream) override {
    check_usable(stream);
    const size_t all = bytes_of_all(size(), bytes);
    check_exchange(send, all, recv, all);
    arrive(stream, {"all_to_all", bytes, send});
    auto* to = static_cast<std::byte*>(recv);
    for (int32_t r = 0; r < size() && bytes > 0; ++r, to += bytes) {
      move(to, static_cast<const std::byte*>(meeting_->sent_by(r)) + static_cast<size_t>(rank_) * bytes, bytes, stream);
    }
    part(stream);
  }

  void reduce_scatter_sum(const float* send, float* recv, size_t count, Stream stream) override {
    check_usable(stream);
    const size_t bytes = bytes_of_floats(count);
    check_exchange(send, bytes_of_all(size(), bytes), recv, bytes);
    arrive(stream, {"reduce_scatter_sum", bytes, send});
    sum(static_cast<size_t>(rank_) * count, count, recv, stream);
    part(stream);
  }

  /// Rank r sums the r-th section where it lies, of which nobody else reads or writes anything; then all copy it.
  void all_reduce_sum(float* data, size_t count, Stream stream) override {
    check_usable(stream);
    const size_t bytes = bytes_of_floats(count);
    check_buffer("data", data, bytes);
    arrive(stream, {"all_reduce_sum", bytes, data});
    const size_t section = (count + static_cast<size_t>(size()) - 1) / static_cast<size_t>(size());
    const auto begin_of = [&](int32_t r) { return std::min(count, static_cast<size_t>(r) * section); };
    sum(begin_of(rank_), begin_of(rank_ + 1) - begin_of(rank_), data + begin_of(rank_), stream);
    part(stream);
    for (int32_t r = 0; r < size(); ++r) {
      const size_t begin = begin_of(r), length = begin_of(r + 1) - begin;
      if (r == rank_ || length == 0) continue;
      move(data + begin, static_cast<const float*>(meeting_->sent_by(r)) + begin, length * sizeof(float), stream);
    }
    part(stream);
  }

  void barrier(Stream stream) override {
    check_usable(stream);
    arrive(stream, {"barrier", 0, nullptr});
  }

  void fail(std::string_view reason) noexcept override { meeting_->fail(reason); }  // empty: as without memory

 private:
  void check_usable(Stream stream) const {
    if (gpu_ == nullptr) check_stream(stream);
  }

  /// The beginning: what this rank sends is there.
  void arrive(Stream stream, const Call& call) {
    if (gpu_ != nullptr) gpu_->synchronize(stream);
    meeting_->meet(rank_, call);
  }

  /// What this rank reads has been read once all have come here.
  void part(Stream stream) {
    if (gpu_ != nullptr) on_gpu([&] { gpu_->synchronize(stream); });
    meeting_->meet_inside();
    if (gpu_failure_ != nullptr) std::rethrow_exception(std::exchange(gpu_failure_, nullptr));
  }

  /// A GPU's failure must not keep the others waiting, so it is thrown when they have been met.
  template <typename Call>
  void on_gpu(const Call& call) {
    try {
      call();
    } catch (...) {
      gpu_failure_ = std::current_exception();
    }
  }

  void move(void* to, const void* from, size_t bytes, Stream stream) {
    if (bytes == 0) return;
    if (gpu_ != nullptr) {
      on_gpu([&] { gpu_->copy(to, from, bytes, stream); });
    } else {
      std::memcpy(to, from, bytes);
    }
  }

  /// out[i] = the sum of all ranks' send[begin + i]; `out` may be this rank's send + begin.
  void sum(size_t begin, size_t count, float* out, Stream stream) {
    for (int32_t r = 0; r < size(); ++r) {
      parts_[static_cast<size_t>(r)] = static_cast<const float*>(meeting_->sent_by(r)) + begin;
    }
    on_gpu([&] { sum_in_order(gpu_.get(), parts_, count, out, stream); });
  }

  std::shared_ptr<Meeting> meeting_;
  int32_t rank_;
  std::vector<const float*> parts_;  ///< of a sum; of each rank
  Device device_;
  std::shared_ptr<const attention::GpuBackend> gpu_;  ///< null: host memory
  std::exception_ptr gpu_failure_;
};

}  // namespace

std::vector<std::unique_ptr<ProcessGroup>> make_thread_groups(int32_t world, const ThreadGroupOptions& options) {
  core::require(world >= 1, "the world is ", world, "; a group has 1 rank or more");
  core::require(options.timeout.count() > 0, "the timeout is ", static_cast<int64_t>(options.timeout.count()),
                " ms; it must be above 0");
  const bool on_gpu = options.context.has_value() && options.context->device().type != DeviceType::kCpu;
  core::require(!on_gpu || world <= kernels::cuda::SumParams::kMostRanks, "the world is ", world,
                "; a group over a GPU's memory has at most ", kernels::cuda::SumParams::kMostRanks, " ranks");
  auto meeting = std::make_shared<Meeting>(world, options.timeout);
  std::vector<std::unique_ptr<ProcessGroup>> groups;
  groups.reserve(static_cast<size_t>(world));
  for (int32_t rank = 0; rank < world; ++rank)
    groups.push_back(std::make_unique<ThreadGroup>(meeting, rank, options.context));
  return groups;
}

namespace {

/// How a rank's body ended, for the others. Throws std::bad_alloc.
std::string end_of(int32_t rank, const std::exception_ptr& thrown) {
  if (thrown == nullptr) return core::message("rank ", rank, " has left it");
  try {
    std::rethrow_exception(thrown);
  } catch (const std::exception& error) {
    return core::message("rank ", rank, " threw: ", error.what());
  } catch (...) {
    return core::message("rank ", rank, " threw");
  }
}

}  // namespace

void run_ranks(int32_t world, const std::function<void(ProcessGroup&)>& body, const ThreadGroupOptions& options) {
  std::vector<std::unique_ptr<ProcessGroup>> groups = make_thread_groups(world, options);
  std::mutex mutex;
  std::exception_ptr first;
  const auto guarded = [&](ProcessGroup& group) noexcept {
    std::exception_ptr thrown;
    try {
      body(group);
    } catch (...) {
      thrown = std::current_exception();
    }
    {
      const std::lock_guard lock(mutex);
      if (first == nullptr) first = thrown;
    }
    try {
      group.fail(end_of(group.rank(), thrown));
    } catch (const std::bad_alloc&) {
      group.fail({});
    }
  };
  {
    std::vector<std::jthread> threads;
    try {
      for (size_t r = 1; r < groups.size(); ++r) {
        threads.emplace_back([&guarded, group = groups[r].get()] { guarded(*group); });
      }
    } catch (const std::exception&) {                  // std::system_error from the OS, std::bad_alloc
      groups[0]->fail("not every rank has a thread");  // the ranks that run wait for those that never will
      core::fail(ErrorCode::kOutOfMemory, "the OS gave ", static_cast<int64_t>(threads.size()) + 1, " of ", world,
                 " threads");
    }
    guarded(*groups[0]);
  }
  if (first != nullptr) std::rethrow_exception(first);
}

}  // namespace folio::inline v0::distributed
