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
#if defined(FOLIO_TEST_OVER_NCCL)
#include "folio/distributed/nccl_group.hpp"
#endif

namespace folio::distributed::testing {

/// One rank of a group whose operations are enqueued on streams.
class EnqueuedGroup : public ProcessGroup {
 public:
  const Context& context() const { return context_; }
  Device device() const noexcept override { return context_.device(); }
  bool enqueues() const noexcept override { return true; }
  std::chrono::milliseconds timeout() const noexcept override { return on_hosts_->timeout(); }

  /// Returns when every rank has called it. Nothing is enqueued.
  void meet() { on_hosts_->barrier(); }

 protected:
  EnqueuedGroup(const Context& context, std::unique_ptr<ProcessGroup> on_hosts)
      : context_(context), on_hosts_(std::move(on_hosts)) {}

  const Context context_;
  const std::unique_ptr<ProcessGroup> on_hosts_;  ///< over the host's memory
};

/// Ranks of one process over emulated GPUs: a stream's turn comes to an operation, waits there for the other ranks'
/// streams, and moves the bytes. Under capture an operation becomes a node. An emulated GPU's memory is the host's, and
/// each of its streams has a thread that may wait. On a GPU neither is true, and only the host's operations work.
class EmulatedGroup final : public EnqueuedGroup {
 public:
  EmulatedGroup(const Context& context, std::unique_ptr<ProcessGroup> on_streams,
                std::unique_ptr<ProcessGroup> on_hosts)
      : EnqueuedGroup(context, std::move(on_hosts)), on_streams_(std::move(on_streams)) {}

  int32_t rank() const noexcept override { return on_streams_->rank(); }
  int32_t size() const noexcept override { return on_streams_->size(); }

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

 private:
  struct Operation {
    EmulatedGroup* group;
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

  const std::unique_ptr<ProcessGroup> on_streams_;
  std::deque<Operation> operations_;
  std::atomic<bool> failed_{false};
};

#if defined(FOLIO_TEST_OVER_NCCL)
/// A rank with a GPU of its own, over NCCL.
class NcclRank final : public EnqueuedGroup {
 public:
  NcclRank(const Context& context, const NcclUniqueId& id, std::unique_ptr<ProcessGroup> on_hosts)
      : EnqueuedGroup(context, std::move(on_hosts)) {
    NcclGroupOptions options;
    options.id = id;
    options.rank = on_hosts_->rank();
    options.size = on_hosts_->size();
    options.control = on_hosts_.get();
    options.timeout = on_hosts_->timeout();
    nccl_ = make_nccl_group(context, options);
  }
  int32_t rank() const noexcept override { return nccl_->rank(); }
  int32_t size() const noexcept override { return nccl_->size(); }
  void all_gather(const void* send, void* recv, size_t bytes, Stream stream) override {
    nccl_->all_gather(send, recv, bytes, stream);
  }
  void all_to_all(const void* send, void* recv, size_t bytes, Stream stream) override {
    nccl_->all_to_all(send, recv, bytes, stream);
  }
  void all_reduce_sum(float* data, size_t count, Stream stream) override { nccl_->all_reduce_sum(data, count, stream); }
  void reduce_scatter_sum(const float* send, float* recv, size_t count, Stream stream) override {
    nccl_->reduce_scatter_sum(send, recv, count, stream);
  }
  void barrier(Stream stream) override { nccl_->barrier(stream); }
  void all_gather_host(const void* send, void* recv, size_t bytes) override {
    nccl_->all_gather_host(send, recv, bytes);
  }
  void check() override { nccl_->check(); }
  void fail(std::string_view reason) noexcept override {
    nccl_->fail(reason);
    on_hosts_->fail(reason);
  }

 private:
  std::unique_ptr<NcclGroup> nccl_;
};
#endif

/// Runs body(r) on a thread for each rank. The first error is thrown once all have ended.
inline void run_rank_threads(int32_t world, const std::function<void(size_t)>& body) {
  std::vector<std::exception_ptr> thrown(static_cast<size_t>(world));
  {
    std::vector<std::jthread> threads;
    for (size_t r = 0; r < thrown.size(); ++r) {
      threads.emplace_back([&, r] {
        try {
          body(r);
        } catch (...) {
          thrown[r] = std::current_exception();
        }
      });
    }
  }
  for (const std::exception_ptr& error : thrown) {
    if (error != nullptr) std::rethrow_exception(error);
  }
}

/// Calls body(group); what it throws makes the group fail.
inline void call_rank(EnqueuedGroup& group, const std::function<void(EnqueuedGroup&)>& body) {
  try {
    body(group);
  } catch (...) {
    group.fail("rank " + std::to_string(group.rank()) + " threw");
    throw;
  }
}

/// Runs body(group) on a thread for each rank of an EmulatedGroup, rank r on devices[r % their number].
inline void run_emulated_ranks(int32_t world, const std::vector<Device>& devices,
                               const std::function<void(EnqueuedGroup&)>& body,
                               std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  auto on_streams = make_thread_groups(world, {timeout});
  auto on_hosts = make_thread_groups(world, {timeout});
  std::vector<std::unique_ptr<EmulatedGroup>> groups;
  for (size_t r = 0; r < on_streams.size(); ++r) {
    const Context context = Context::cuda(devices[r % devices.size()].index);
    groups.push_back(std::make_unique<EmulatedGroup>(context, std::move(on_streams[r]), std::move(on_hosts[r])));
  }
  run_rank_threads(world, [&](size_t r) { call_rank(*groups[r], body); });
}

/// Why run_enqueued_ranks cannot run so many ranks here; empty: it can.
inline std::string why_no_enqueued_ranks(int32_t world) {
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) return "no GPU";
#if defined(FOLIO_EMULATED_CUDA)
  static_cast<void>(world);
  return {};
#elif defined(FOLIO_TEST_OVER_NCCL)
  return gpus >= world ? "" : "needs " + std::to_string(world) + " GPUs, one a rank";
#else
  static_cast<void>(world);
  return "this build has no NCCL";
#endif
}

/// Runs body(group) on a thread for each rank: over NCCL, rank r with GPU r, or on one emulated GPU. The thread's
/// current device is the rank's.
inline void run_enqueued_ranks(int32_t world, const std::function<void(EnqueuedGroup&)>& body) {
#if defined(FOLIO_TEST_OVER_NCCL)
  constexpr std::chrono::seconds kTimeout(60);
  const NcclUniqueId id = nccl_unique_id();
  auto on_hosts = make_thread_groups(world, {kTimeout});
  std::vector<std::unique_ptr<EnqueuedGroup>> groups(on_hosts.size());  // none ends before all bodies have
  run_rank_threads(world, [&](size_t r) {
    if (cudaSetDevice(static_cast<int>(r)) != cudaSuccess) throw std::runtime_error("no such GPU");
    groups[r] = std::make_unique<NcclRank>(Context::cuda(static_cast<int32_t>(r)), id, std::move(on_hosts[r]));
    call_rank(*groups[r], body);
  });
#else
  run_emulated_ranks(world, {{DeviceType::kCuda, 0}}, body);
#endif
}

}  // namespace folio::distributed::testing
