#pragma once

#include <cstddef>
#include <cstdint>

#include "distributed/nccl/group_state.hpp"
#include "folio/distributed/process_group.hpp"

namespace folio::inline v0::distributed {

/// What ranks tell each other on the host, once a step. Each says with it how many operations it has called, so that
/// ranks which have parted find it out here, by name, and not by hanging.
class HostExchange {
 public:
  /// Over `control`; over the group's own communicator where it is null.
  HostExchange(GroupState& state, ProcessGroup* control);

  /// Lets NCCL connect every rank with every other, which the first operation of a kind would do. Throws kUnavailable.
  void connect();
  /// As ProcessGroup::all_gather_host. Throws kUnavailable.
  void all_gather(const void* send, void* recv, size_t bytes);

 private:
  /// What stands before every message.
  struct Header {
    uint64_t operations = 0;
    uint64_t bytes = 0;  ///< of all_gather's `send`
  };
  /// A message is as long whatever it carries: ranks that disagree about sizes meet all the same.
  static constexpr size_t kMessage = 1024;
  static constexpr size_t kPayload = kMessage - sizeof(Header);

  size_t size() const { return static_cast<size_t>(state_.communicator.shape().size); }
  void exchange_messages();
  void compare_headers() const;
  void wait(const char* what);

  GroupState& state_;
  ProcessGroup* const control_;
  std::byte* sent_ = nullptr;      ///< this rank's message, page-locked, in `state`
  std::byte* received_ = nullptr;  ///< all ranks'
  std::byte* device_ = nullptr;    ///< room for two messages of every rank
  platform::cuda::OwnedStream stream_;
  platform::cuda::Event done_;
};

}  // namespace folio::inline v0::distributed
