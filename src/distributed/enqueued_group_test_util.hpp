#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/error.hpp"
#include "folio/distributed.hpp"

namespace folio::distributed::testing {

/// Ranks of one process over an emulated GPU whose operations are enqueued, as NCCL's are: a stream's turn comes to an
/// operation, waits there for the other ranks' streams, and moves the bytes. Under capture an operation becomes a node.
/// An emulated GPU's memory is the host's, and each of its streams has a thread that may wait; of a GPU neither is
/// true.
class EnqueuedGroup final : public ProcessGroup {
 public:
  /// `on_streams`, `on_hosts`: this rank's handles of two groups over host memory.
  EnqueuedGroup(Device device, std::unique_ptr<ProcessGroup> on_streams, std::unique_ptr<ProcessGroup> on_hosts)
      : device_(device), on_streams_(std::move(on_streams)), on_hosts_(std::move(on_hosts)) {}

  int32_t rank() const noexcept override { return on_streams_->rank(); }
  int32_t size() const noexcept override { return on_streams_->size(); }
  Device device() const noexcept override { return device_; }
  bool enqueues() const noexcept override { return true; }
  std::chrono::milliseconds timeout() const noexcept override { return on_hosts_->timeout(); }

  void all_gather(const void* send, void* recv, size_t bytes, Stream stream) override {
    enqueue(stream, [=](ProcessGroup& group) { group.all_gather(send, recv, bytes, {}); });
  }
  void all_to_all(const void* send, void* recv, size_t bytes, Stream stream) override {
    enqueue(stream, [=](ProcessGroup& group) { group.all_to_all(send, recv, bytes, {}); });
  }
  void all_reduce_sum(float* data, size_t count, Stream stream) override {
    enqueue(stream, [=](ProcessGroup& group) { group.all_reduce_sum(data, count, {}); });
  }
  void reduce_scatter_sum(const float* send, float* recv, size_t count, Stream stream) override {
    enqueue(stream, [=](ProcessGroup& group) { group.reduce_scatter_sum(send, recv, count, {}); });
  }
  void barrier(Stream stream) override {
    enqueue(stream, [](ProcessGroup& group) { group.barrier({}); });
  }
  void all_gather_host(const void* send, void* recv, size_t bytes) override {
    on_hosts_->all_gather_host(send, recv, bytes);
  }
  void check() override {
    if (failed_) core::fail(ErrorCode::kUnavailable, "an operation has failed");
  }
  void fail(std::string_view reason) noexcept override {
    on_streams_->fail(reason);
    on_hosts_->fail(reason);
  }

  /// Returns when every rank has called it. Nothing is enqueued.
  void meet() { on_hosts_->barrier(); }

 private:
  struct Operation {
    EnqueuedGroup* group;
    std::function<void(ProcessGroup&)> call;
  };

  void enqueue(Stream stream, std::function<void(ProcessGroup&)> call) {
    operations_.push_back({this, std::move(call)});  // graphs keep its address
    const auto run = [](void* data) {
      const Operation& operation = *static_cast<Operation*>(data);
      try {
        operation.call(*operation.group->on_streams_);
      } catch (const std::exception&) {
        operation.group->failed_ = true;
      }
    };
    const cudaError_t status = cudaLaunchHostFunc(static_cast<cudaStream_t>(stream.handle), run, &operations_.back());
    if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
  }

  Device device_;
  std::unique_ptr<ProcessGroup> on_streams_, on_hosts_;
  std::deque<Operation> operations_;
  std::atomic<bool> failed_{false};
};

/// Runs body(group) on a thread for each rank, rank r on devices[r % their number]. The first error is thrown once all
/// have ended.
inline void run_enqueued_ranks(int32_t world, const std::vector<Device>& devices,
                               const std::function<void(EnqueuedGroup&)>& body,
                               std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  auto on_streams = make_thread_groups(world, {timeout});
  auto on_hosts = make_thread_groups(world, {timeout});
  std::vector<std::unique_ptr<EnqueuedGroup>> groups;
  for (size_t r = 0; r < on_streams.size(); ++r) {
    groups.push_back(
        std::make_unique<EnqueuedGroup>(devices[r % devices.size()], std::move(on_streams[r]), std::move(on_hosts[r])));
  }
  std::vector<std::exception_ptr> thrown(groups.size());
  {
    std::vector<std::jthread> threads;
    for (size_t r = 0; r < groups.size(); ++r) {
      threads.emplace_back([&, r] {
        try {
          body(*groups[r]);
        } catch (...) {
          thrown[r] = std::current_exception();
          groups[r]->fail("rank " + std::to_string(r) + " threw");
        }
      });
    }
  }
  for (const std::exception_ptr& error : thrown) {
    if (error != nullptr) std::rethrow_exception(error);
  }
}
inline void run_enqueued_ranks(int32_t world, Device device, const std::function<void(EnqueuedGroup&)>& body) {
  run_enqueued_ranks(world, std::vector<Device>{device}, body);
}

}  // namespace folio::distributed::testing
