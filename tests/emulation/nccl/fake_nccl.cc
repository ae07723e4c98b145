// NCCL in software, for ranks that are threads with an emulated GPU each: the functions that folio_nccl loads, with the
// rules that a wrong caller would break. Operations are work of streams, which graphs capture. What ranks do not agree
// about, or what a rank never joins, holds the stream until its communicator is aborted. A communicator that does not
// block takes an operation up later, and refuses another before.
#include <nccl.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>

#include "runtime.hpp"

namespace folio::emulation {
namespace {

enum class Kind { kSend, kAllGather, kAllReduce, kReduceScatter };

/// Bytes that one rank has for another.
struct Post {
  const void* data;
  size_t bytes;
  Kind kind;
  bool taken = false;
};

/// The ranks of one id.
struct Clique {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<int> devices;  ///< of those that have come, by rank; -1
  int joined = 0;
  bool refused = false;                                  ///< two ranks on one device
  std::vector<std::deque<std::shared_ptr<Post>>> boxes;  ///< [from * size + to]
  std::deque<std::shared_ptr<Post>>& box(int from, int to) { return boxes[from * devices.size() + to]; }
};

struct Rank {
  std::shared_ptr<Clique> clique;
  int rank = 0;
  int size = 1;
  int device = 0;
  bool blocking = true;
  bool joining = true;
  std::atomic<bool> aborted{false};
  std::atomic<ncclResult_t> state{ncclSuccess};
  std::atomic<int> pending{0};  ///< operations on streams, not yet done
};

struct Transfer {
  int peer;
  void* data;
  size_t bytes;
};

struct Operation {
  Kind kind = Kind::kSend;
  std::vector<Transfer> sends;
  std::vector<Transfer> recvs;
  std::function<void()> finish;
};

std::mutex registry_mutex;
std::map<std::string, std::weak_ptr<Clique>> registry;
std::atomic<int> communicators{0};
std::atomic<int> operations{0};

void execute(Rank& self, const Operation& operation) {
  Clique& clique = *self.clique;
  std::unique_lock lock(clique.mutex);
  std::vector<std::shared_ptr<Post>> posts;
  for (const Transfer& send : operation.sends) {
    posts.push_back(std::make_shared<Post>(Post{send.data, send.bytes, operation.kind}));
    clique.box(self.rank, send.peer).push_back(posts.back());
  }
  clique.changed.notify_all();
  for (const Transfer& recv : operation.recvs) {
    auto& box = clique.box(recv.peer, self.rank);
    clique.changed.wait(lock, [&] {
      return self.aborted || (!box.empty() && box.front()->kind == operation.kind && box.front()->bytes == recv.bytes);
    });
    if (self.aborted) break;
    std::memmove(recv.data, box.front()->data, recv.bytes);
    box.front()->taken = true;
    box.pop_front();
    clique.changed.notify_all();
  }
  clique.changed.wait(lock, [&] {
    return self.aborted || std::all_of(posts.begin(), posts.end(), [](const auto& post) { return post->taken; });
  });
  if (self.aborted) {
    for (int to = 0; to < self.size; ++to) {
      auto& box = clique.box(self.rank, to);
      std::erase_if(box, [&](const auto& post) { return std::find(posts.begin(), posts.end(), post) != posts.end(); });
    }
  } else if (operation.finish) {
    operation.finish();
  }
  ++operations;
}

ncclResult_t put_on_stream(const std::shared_ptr<Rank>& rank, cudaStream_t handle, Operation operation) {
  Stream* const stream = stream_of(handle);
  if (stream->device() != rank->device) return ncclUnhandledCudaError;
  const bool captured = stream->capture != nullptr;
  if (!captured) ++rank->pending;
  const cudaError_t status = enqueue(stream, [rank, captured, operation = std::move(operation)] {
    execute(*rank, operation);
    if (!captured) --rank->pending;
  });
  return status == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t launch(const std::shared_ptr<Rank>& rank, cudaStream_t stream, Operation operation) {
  if (rank->joining || rank->state == ncclInProgress) return ncclInvalidUsage;
  if (rank->blocking) return put_on_stream(rank, stream, std::move(operation));
  rank->state = ncclInProgress;
  std::thread([rank, stream, device = current_device, operation = std::move(operation)] {
    current_device = device;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    rank->state = put_on_stream(rank, stream, operation);
  }).detach();
  return ncclInProgress;
}

/// What a thread has asked for since ncclGroupStart: of one communicator and stream.
struct Group {
  int depth = 0;
  std::shared_ptr<Rank> rank;
  cudaStream_t stream = nullptr;
  Operation operation;
};
thread_local Group group;

ncclResult_t add_to_group(const std::shared_ptr<Rank>& rank, cudaStream_t stream,
                          std::vector<Transfer> Operation::*list, Transfer transfer) {
  if (group.depth == 0 || transfer.peer < 0 || transfer.peer >= rank->size) return ncclInvalidUsage;
  group.rank = rank;
  group.stream = stream;
  (group.operation.*list).push_back(transfer);
  return ncclSuccess;
}

size_t size_of(ncclDataType_t type) {
  return type == ncclFloat32 ? sizeof(float) : 1;
}

/// With the clique's lock.
void settle_joining(Rank& rank) {
  if (rank.clique->refused) rank.state = ncclInvalidUsage;
  rank.joining = !rank.clique->refused && rank.clique->joined < rank.size;
}

/// A sum that begins with the next rank's part: not in the order of the ranks.
void add_round(const std::vector<std::vector<float>>& parts, int first, float* out) {
  for (size_t i = 0; i < parts[0].size(); ++i) {
    float sum = 0;
    for (size_t r = 0; r < parts.size(); ++r) sum += parts[(static_cast<size_t>(first) + r) % parts.size()][i];
    out[i] = sum;
  }
}

/// Every rank's `send` + r * stride for rank r, added up.
ncclResult_t reduce(const std::shared_ptr<Rank>& rank, Kind kind, const void* send, void* recv, size_t count,
                    size_t stride, cudaStream_t stream) {
  const auto parts = std::make_shared<std::vector<std::vector<float>>>(rank->size, std::vector<float>(count));
  Operation operation;
  operation.kind = kind;
  for (int r = 0; r < rank->size; ++r) {
    auto* const part = const_cast<float*>(static_cast<const float*>(send)) + static_cast<size_t>(r) * stride;
    operation.sends.push_back({r, part, count * sizeof(float)});
    operation.recvs.push_back({r, (*parts)[static_cast<size_t>(r)].data(), count * sizeof(float)});
  }
  operation.finish = [parts, first = rank->rank + 1, recv] { add_round(*parts, first, static_cast<float*>(recv)); };
  return launch(rank, stream, std::move(operation));
}

}  // namespace
}  // namespace folio::emulation

struct ncclComm {
  std::shared_ptr<folio::emulation::Rank> rank;
};

using namespace folio::emulation;  // NOLINT: NCCL's functions are C functions

extern "C" {

/// For tests: how many communicators there are.
int fake_nccl_communicators() {
  return communicators;
}
/// For tests: how many operations have ended, of all communicators.
int fake_nccl_operations() {
  return operations;
}
/// For tests: NCCL has met an error in the background.
void fake_nccl_break(ncclComm_t communicator) {
  communicator->rank->state = ncclRemoteError;
}

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "remote process exited or there was a network error";
    default: return "an error of the fake NCCL";
  }
}
const char* ncclGetLastError(ncclComm_t) {
  return "";
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static std::atomic<int> next{0};
  *id = {};
  std::snprintf(id->internal, sizeof(id->internal), "clique %d", ++next);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int size, ncclUniqueId id, int number, ncclConfig_t* config) {
  const auto rank = std::make_shared<Rank>();
  {
    const std::lock_guard lock(registry_mutex);
    auto& known = registry[std::string(id.internal, sizeof(id.internal))];
    rank->clique = known.lock();
    if (rank->clique == nullptr) {
      known = rank->clique = std::make_shared<Clique>();
      rank->clique->devices.assign(static_cast<size_t>(size), -1);
      rank->clique->boxes.resize(static_cast<size_t>(size * size));
    }
  }
  Clique& clique = *rank->clique;
  std::unique_lock lock(clique.mutex);
  if (number < 0 || number >= size || clique.devices.size() != static_cast<size_t>(size) ||
      clique.devices[static_cast<size_t>(number)] != -1) {
    return ncclInvalidArgument;
  }
  rank->rank = number;
  rank->size = size;
  rank->device = current_device;
  rank->blocking = config == nullptr || config->blocking != 0;
  clique.refused =
      clique.refused || std::find(clique.devices.begin(), clique.devices.end(), current_device) != clique.devices.end();
  clique.devices[static_cast<size_t>(number)] = current_device;
  ++clique.joined;
  clique.changed.notify_all();
  if (rank->blocking) clique.changed.wait(lock, [&] { return clique.refused || clique.joined == size; });
  settle_joining(*rank);
  if (rank->blocking && rank->state != ncclSuccess) return rank->state;
  *made = new ncclComm{rank};
  ++communicators;
  return rank->blocking ? ncclSuccess : ncclInProgress;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t* result) {
  Rank& rank = *communicator->rank;
  if (rank.joining) {
    const std::lock_guard lock(rank.clique->mutex);
    settle_joining(rank);
  }
  *result = rank.joining ? ncclInProgress : rank.state.load();
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t communicator) {
  const std::shared_ptr<Rank> rank = communicator->rank;
  if (rank->joining || rank->state != ncclSuccess) return ncclInvalidUsage;
  rank->state = ncclInProgress;
  std::thread flush([rank] {
    while (rank->pending != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    rank->state = ncclSuccess;
  });
  if (rank->blocking) {
    flush.join();
    return ncclSuccess;
  }
  flush.detach();
  return ncclInProgress;
}
ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
  delete communicator;
  --communicators;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t communicator) {
  {
    const std::lock_guard lock(communicator->rank->clique->mutex);
    communicator->rank->aborted = true;
    communicator->rank->clique->changed.notify_all();
  }
  return ncclCommDestroy(communicator);
}

ncclResult_t ncclCommCount(const ncclComm_t communicator, int* count) {
  *count = communicator->rank->size;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t communicator, int* rank) {
  *rank = communicator->rank->rank;
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t communicator, int* device) {
  *device = communicator->rank->device;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++group.depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (--group.depth != 0 || group.rank == nullptr) return ncclSuccess;
  const Group asked = std::exchange(group, {});
  return launch(asked.rank, asked.stream, asked.operation);
}
ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator,
                      cudaStream_t stream) {
  return add_to_group(communicator->rank, stream, &Operation::sends,
                      {peer, const_cast<void*>(data), count * size_of(type)});
}
ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator,
                      cudaStream_t stream) {
  return add_to_group(communicator->rank, stream, &Operation::recvs, {peer, data, count * size_of(type)});
}

ncclResult_t ncclAllGather(const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t communicator,
                           cudaStream_t stream) {
  const size_t bytes = count * size_of(type);
  Operation operation;
  operation.kind = Kind::kAllGather;
  for (int r = 0; r < communicator->rank->size; ++r) {
    operation.sends.push_back({r, const_cast<void*>(send), bytes});
    operation.recvs.push_back({r, static_cast<std::byte*>(recv) + static_cast<size_t>(r) * bytes, bytes});
  }
  return launch(communicator->rank, stream, std::move(operation));
}
ncclResult_t ncclAllReduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t communicator, cudaStream_t stream) {
  if (type != ncclFloat32 || op != ncclSum) return ncclInvalidArgument;
  return reduce(communicator->rank, Kind::kAllReduce, send, recv, count, 0, stream);
}
ncclResult_t ncclReduceScatter(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t communicator, cudaStream_t stream) {
  if (type != ncclFloat32 || op != ncclSum) return ncclInvalidArgument;
  return reduce(communicator->rank, Kind::kReduceScatter, send, recv, count, count, stream);
}

}  // extern "C"
