#include "folio/distributed/nccl_group.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
#include <thread>
#include <vector>

#include "core/error.hpp"
#include "distributed/nccl/group_state.hpp"
#include "distributed/nccl/grouped.hpp"
#include "distributed/nccl/host_exchange.hpp"
#include "distributed/operation_checks.hpp"
#include "platform/cuda/device.hpp"

namespace folio::inline v0::distributed {

NcclGroup::~NcclGroup() = default;

namespace {

using platform::cuda::DeviceScope;
using platform::cuda::native;

static_assert(sizeof(NcclUniqueId) == sizeof(ncclUniqueId));

/// A vector of `count` floats divided over ranks: all have sections of one length, the last ones what is left.
struct Sections {
  size_t count;
  size_t length;
  Sections(size_t elements, size_t ranks) : count(elements), length((elements + ranks - 1) / ranks) {}
  size_t begin(size_t rank) const { return std::min(count, rank * length); }
  size_t bytes(size_t rank) const { return (begin(rank + 1) - begin(rank)) * sizeof(float); }
};

class Group final : public NcclGroup {
 public:
  Group(const Context& context, std::shared_ptr<GroupState> state, const NcclGroupOptions& options)
      : context_(context),
        state_(std::move(state)),
        nccl_(state_->communicator.nccl()),
        rank_(state_->communicator.shape().rank),
        size_(state_->communicator.shape().size),
        sums_(options.sums),
        exchange_(*state_, options.control),
        parts_(static_cast<size_t>(size_)),
        watcher_([shared = state_] { shared->watch(); }) {
    try {
      barrier_ = static_cast<std::byte*>(
          state_->device_memory.emplace_back(static_cast<size_t>(size_) * kBarrierBytes).data());
      if (options.scratch_bytes > 0) grow_scratch(options.scratch_bytes);
      exchange_.connect();
    } catch (...) {
      end();
      throw;
    }
  }
  ~Group() override { end(); }

  int32_t rank() const noexcept override { return rank_; }
  int32_t size() const noexcept override { return size_; }
  Device device() const noexcept override { return context_.device(); }
  std::chrono::milliseconds timeout() const noexcept override { return state_->timeout(); }

  void all_gather(const void* send, void* recv, size_t bytes, Stream stream) override {
    check_all_gather(send, recv, bytes, rank_, size_);
    if (bytes == 0) return state_->throw_if_failed();
    const Call call(*this, "all_gather", stream);
    call.enqueue([&](ncclComm_t communicator) {
      return nccl_.all_gather(send, recv, bytes, ncclUint8, communicator, native(stream));
    });
  }

  void all_to_all(const void* send, void* recv, size_t bytes, Stream stream) override {
    const size_t all = bytes_of_all(size_, bytes);
    check_exchange(send, all, recv, all);
    if (bytes == 0) return state_->throw_if_failed();
    const Call call(*this, "all_to_all", stream);
    call.enqueue([&](ncclComm_t communicator) {
      Grouped group(nccl_);
      for (size_t r = 0; r < ranks(); ++r) {
        group.send(static_cast<const std::byte*>(send) + r * bytes, bytes, r, communicator, stream);
        group.recv(static_cast<std::byte*>(recv) + r * bytes, bytes, r, communicator, stream);
      }
      return group.end();
    });
  }

  void all_reduce_sum(float* data, size_t count, Stream stream) override {
    check_buffer("data", data, bytes_of_floats(count));
    if (count == 0) return state_->throw_if_failed();
    const Call call(*this, "all_reduce_sum", stream);
    if (sums_ == NcclSums::kNccl) {
      call.enqueue([&](ncclComm_t communicator) {
        return nccl_.all_reduce(data, data, count, ncclFloat32, ncclSum, communicator, native(stream));
      });
      return;
    }
    const Sections sections(count, ranks());
    float* const mine = data + sections.begin(own());
    add_up(call, data, sections, mine);
    call.enqueue([&](ncclComm_t communicator) {
      Grouped group(nccl_);
      for (size_t r = 0; r < ranks(); ++r) {
        if (r == own()) continue;
        group.send(mine, sections.bytes(own()), r, communicator, stream);
        group.recv(data + sections.begin(r), sections.bytes(r), r, communicator, stream);
      }
      return group.end();
    });
  }

  void reduce_scatter_sum(const float* send, float* recv, size_t count, Stream stream) override {
    const size_t bytes = bytes_of_floats(count);
    check_exchange(send, bytes_of_all(size_, bytes), recv, bytes);
    if (count == 0) return state_->throw_if_failed();
    const Call call(*this, "reduce_scatter_sum", stream);
    if (sums_ == NcclSums::kNccl) {
      call.enqueue([&](ncclComm_t communicator) {
        return nccl_.reduce_scatter(send, recv, count, ncclFloat32, ncclSum, communicator, native(stream));
      });
      return;
    }
    add_up(call, send, Sections(count * ranks(), ranks()), recv);
  }

  void all_gather_host(const void* send, void* recv, size_t bytes) override {
    check_all_gather(send, recv, bytes, rank_, size_);
    state_->throw_if_failed();
    const DeviceScope scope(context_.device().index);
    exchange_.all_gather(send, recv, bytes);
  }

  void barrier(Stream stream) override {
    const Call call(*this, "barrier", stream);
    call.enqueue([&](ncclComm_t communicator) {
      return nccl_.all_gather(barrier_ + own() * kBarrierBytes, barrier_, kBarrierBytes, ncclUint8, communicator,
                              native(stream));
    });
  }

  void watch(Stream stream) override {
    state_->throw_if_failed();
    const DeviceScope scope(context_.device().index);
    state_->mark("a stream under watch", stream);
  }

  void check() override {
    state_->throw_if_failed();
    const std::string problem = state_->communicator.asynchronous_error();
    if (problem.empty()) return;
    state_->fail(problem);
    state_->throw_if_failed();
  }

  void fail(std::string_view reason) noexcept override { state_->fail(reason); }

 private:
  static constexpr size_t kBarrierBytes = 16;
  static constexpr size_t kAlignment = 256;  // what kernels of sums like best

  /// One operation of the caller's, of as many of NCCL's as it takes.
  class Call {
   public:
    Call(Group& group, const char* name, Stream stream)
        : state_(*group.state_), name_(name), stream_(stream), scope_(group.device().index) {
      state_.throw_if_failed();
      captured_ = platform::cuda::is_capturing(stream);
      ++state_.operations;
    }
    Stream stream() const { return stream_; }
    const char* name() const { return name_; }
    bool captured() const { return captured_; }
    void enqueue(const std::function<ncclResult_t(ncclComm_t)>& call) const {
      state_.enqueue(name_, call);
      if (!captured_) state_.mark(name_, stream_);
    }

   private:
    GroupState& state_;
    const char* const name_;
    const Stream stream_;
    const DeviceScope scope_;
    bool captured_ = false;
  };

  size_t ranks() const { return static_cast<size_t>(size_); }
  size_t own() const { return static_cast<size_t>(rank_); }

  /// out: the sum of all ranks' section of `send` that is this rank's. `out` may be that section.
  void add_up(const Call& call, const float* send, const Sections& sections, float* out) {
    const size_t bytes = sections.bytes(own());
    const size_t stride = (sections.length * sizeof(float) + kAlignment - 1) / kAlignment * kAlignment;
    std::byte* const scratch = scratch_for(call, stride * ranks());
    call.enqueue([&](ncclComm_t communicator) {
      Grouped group(nccl_);
      for (size_t r = 0; r < ranks(); ++r) {
        group.send(send + sections.begin(r), sections.bytes(r), r, communicator, call.stream());
        group.recv(scratch + r * stride, bytes, r, communicator, call.stream());
      }
      return group.end();
    });
    if (bytes == 0) return;
    for (size_t r = 0; r < ranks(); ++r) parts_[r] = reinterpret_cast<const float*>(scratch + r * stride);
    sum_over_ranks(context_, parts_, bytes / sizeof(float), out, call.stream());
  }

  /// Throws kInvalidArgument where a capture would need more than there is, kOutOfMemory.
  std::byte* scratch_for(const Call& call, size_t bytes) {
    if (bytes <= scratch_bytes_) return scratch_;
    core::require(!call.captured(), call.name(), " needs ", bytes, " bytes of scratch, the group has ", scratch_bytes_,
                  ", and a capture allocates nothing: set NcclGroupOptions::scratch_bytes, or run it once before");
    grow_scratch(std::max(bytes, 2 * scratch_bytes_));
    return scratch_;
  }

  /// What there was stays: work that is enqueued and graphs use it.
  void grow_scratch(size_t bytes) {
    scratch_ = static_cast<std::byte*>(state_->device_memory.emplace_back(bytes).data());
    scratch_bytes_ = bytes;
  }

  /// Ends the group's thread, and with it all else. Where NCCL or the device holds that up, the thread is left with it.
  void end() noexcept {
    if (state_->close()) {
      watcher_.join();
    } else {
      watcher_.detach();
    }
  }

  const Context context_;
  const std::shared_ptr<GroupState> state_;
  const NcclLibrary& nccl_;
  const int32_t rank_;
  const int32_t size_;
  const NcclSums sums_;
  HostExchange exchange_;
  std::vector<const float*> parts_;  ///< of a sum
  std::byte* barrier_ = nullptr;
  std::byte* scratch_ = nullptr;
  size_t scratch_bytes_ = 0;
  std::thread watcher_;
};

/// Who the ranks are, and their id.
struct Members {
  int32_t rank = 0;
  int32_t size = 1;
  ncclUniqueId id{};
};

ncclUniqueId new_id(const NcclLibrary& nccl) {
  ncclUniqueId id;
  const ncclResult_t result = nccl.get_unique_id(&id);
  if (result != ncclSuccess) {
    core::fail(ErrorCode::kUnavailable, "making an NCCL id: ", nccl.get_error_string(result), ": ",
               nccl.get_last_error(nullptr));
  }
  return id;
}

/// Rank 0's id, over a group on the host. If rank 0 gets none, all ranks throw.
Members members_of(ProcessGroup& control, const NcclLibrary& nccl) {
  struct Message {
    ncclUniqueId id{};
    bool there = false;
  };
  Message mine;
  std::string problem = "rank 0 gets no NCCL id";
  if (control.rank() == 0) {
    try {
      mine = {new_id(nccl), true};
    } catch (const Error& error) {
      problem = error.what();
    }
  }
  std::vector<Message> all(static_cast<size_t>(control.size()));
  control.all_gather_host(&mine, all.data(), sizeof(Message));
  if (!all[0].there) core::fail(ErrorCode::kUnavailable, problem);
  return {control.rank(), control.size(), all[0].id};
}

Members members_of(const NcclGroupOptions& options, const NcclLibrary& nccl) {
  if (!options.id) return members_of(*options.control, nccl);
  Members members{options.rank, options.size, {}};
  std::memcpy(&members.id, options.id->data(), sizeof(members.id));
  return members;
}

void check_options(const Context& context, const NcclGroupOptions& options) {
  using core::require;
  require(context.device().type == DeviceType::kCuda, "the context is a CPU's; an NCCL group is over a GPU's memory");
  require(options.timeout.count() > 0, "the timeout is ", static_cast<int64_t>(options.timeout.count()),
          " ms; it must be above 0");
  require(options.communicator == nullptr || !options.id,
          "communicator and id are both given; the one is there already, "
          "the other makes a new one");
  require(options.communicator != nullptr || options.id || options.control != nullptr,
          "none of communicator, id and control is given; one of them brings the ranks together");
  require(!options.id || (options.rank >= 0 && options.rank < options.size), "rank ", options.rank, " of ",
          options.size, ": ranks are in [0, size)");
}

}  // namespace

NcclUniqueId nccl_unique_id(const std::string& library) {
  const ncclUniqueId made = new_id(nccl_library(library));
  NcclUniqueId id;
  std::memcpy(id.data(), &made, sizeof(made));
  return id;
}

std::unique_ptr<NcclGroup> make_nccl_group(const Context& context, const NcclGroupOptions& options) {
  check_options(context, options);
  const NcclLibrary& nccl = nccl_library(options.library);
  const DeviceScope scope(context.device().index);
  auto state = std::make_shared<GroupState>(nccl, context.device().index, options.timeout);
  if (options.communicator != nullptr) {
    state->communicator.borrow(static_cast<ncclComm_t>(options.communicator));
  } else {
    const Members members = members_of(options, nccl);
    state->communicator.create(members.id, members.rank, members.size);
  }
  const Communicator::Shape& shape = state->communicator.shape();
  core::require(shape.device == context.device().index, "the communicator is CUDA device ", shape.device,
                "'s, the context device ", context.device().index, "'s");
  core::require(
      options.control == nullptr || (options.control->rank() == shape.rank && options.control->size() == shape.size),
      "the communicator's rank is ", shape.rank, " of ", shape.size, "; the control group says otherwise");
  return std::make_unique<Group>(context, std::move(state), options);
}

}  // namespace folio::inline v0::distributed
