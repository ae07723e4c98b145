#include "distributed/nccl/host_exchange.hpp"

#include <algorithm>
#include <cstring>
#include <thread>

#include "core/error.hpp"
#include "distributed/nccl/grouped.hpp"
#include "platform/cuda/device.hpp"

namespace folio::inline v0::distributed {

using platform::cuda::native;

HostExchange::HostExchange(GroupState& state, ProcessGroup* control) : state_(state), control_(control) {
  auto& pinned = state.host_memory.emplace_back((size() + 1) * kMessage);
  sent_ = static_cast<std::byte*>(pinned.data());
  received_ = sent_ + kMessage;
  std::memset(sent_, 0, kMessage);
  device_ = static_cast<std::byte*>(state.device_memory.emplace_back(2 * size() * kMessage).data());
}

void HostExchange::wait(const char* what) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point deadline = Clock::now() + state_.timeout();
  done_.record(stream_.get());
  constexpr int kBusyPolls = 1000;
  for (int polls = 0; !done_.passed(); ++polls) {
    if (polls < kBusyPolls) continue;
    state_.throw_if_failed();
    if (Clock::now() >= deadline) {
      state_.fail(core::message("rank ", state_.communicator.shape().rank, " waited ",
                                static_cast<int64_t>(state_.timeout().count()), " ms for the other ranks in ", what));
      state_.throw_if_failed();
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

void HostExchange::connect() {
  const NcclLibrary& nccl = state_.communicator.nccl();
  state_.enqueue("the first all_gather", [&](ncclComm_t communicator) {
    const auto rank = static_cast<size_t>(state_.communicator.shape().rank);
    return nccl.all_gather(device_ + rank * kMessage, device_, kMessage, ncclUint8, communicator,
                           native(stream_.get()));
  });
  state_.enqueue("the first all_to_all", [&](ncclComm_t communicator) {
    Grouped group(nccl);
    for (size_t r = 0; r < size(); ++r) {
      group.send(device_ + r * kMessage, kMessage, r, communicator, stream_.get());
      group.recv(device_ + (size() + r) * kMessage, kMessage, r, communicator, stream_.get());
    }
    return group.end();
  });
  wait("the first operations");
}

void HostExchange::exchange_messages() {
  if (control_ != nullptr) {
    try {
      control_->all_gather_host(sent_, received_, kMessage);
    } catch (const Error& error) {
      state_.fail(error.what());
      state_.throw_if_failed();
    }
    return;
  }
  const platform::cuda::RelaxedCapture relaxed;
  const NcclLibrary& nccl = state_.communicator.nccl();
  cudaStream_t stream = native(stream_.get());
  platform::cuda::check(cudaMemcpyAsync(device_, sent_, kMessage, cudaMemcpyHostToDevice, stream),
                        "copying a message of all_gather_host");
  std::byte* const all = device_ + size() * kMessage;
  state_.enqueue("all_gather_host", [&](ncclComm_t communicator) {
    return nccl.all_gather(device_, all, kMessage, ncclUint8, communicator, stream);
  });
  platform::cuda::check(cudaMemcpyAsync(received_, all, size() * kMessage, cudaMemcpyDeviceToHost, stream),
                        "copying the messages of all_gather_host");
  wait("all_gather_host");
}

void HostExchange::compare_headers() const {
  Header mine;
  std::memcpy(&mine, sent_, sizeof(mine));
  for (size_t r = 0; r < size(); ++r) {
    Header theirs;
    std::memcpy(&theirs, received_ + r * kMessage, sizeof(theirs));
    if (theirs.operations == mine.operations && theirs.bytes == mine.bytes) continue;
    state_.fail(core::message("in all_gather_host rank ", state_.communicator.shape().rank, " sends ", mine.bytes,
                              " bytes after ", mine.operations, " operations, rank ", r, " ", theirs.bytes,
                              " bytes after ", theirs.operations));
    state_.throw_if_failed();
  }
}

void HostExchange::all_gather(const void* send, void* recv, size_t bytes) {
  for (size_t done = 0; done < bytes; done += kPayload) {
    const size_t length = std::min(kPayload, bytes - done);
    const Header header{state_.operations, bytes};
    std::memcpy(sent_, &header, sizeof(header));
    std::memcpy(sent_ + sizeof(header), static_cast<const std::byte*>(send) + done, length);
    exchange_messages();
    compare_headers();
    for (size_t r = 0; r < size(); ++r) {
      std::memcpy(static_cast<std::byte*>(recv) + r * bytes + done, received_ + r * kMessage + sizeof(header), length);
    }
  }
}

}  // namespace folio::inline v0::distributed
