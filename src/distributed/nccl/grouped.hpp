#pragma once

#include <cstddef>

#include "distributed/nccl/nccl_library.hpp"
#include "platform/cuda/stream.hpp"

namespace folio::inline v0::distributed {

/// Sends and receives that NCCL runs as one operation, between ncclGroupStart and ncclGroupEnd. The group is ended
/// whatever goes wrong in it; its first error is the result.
class Grouped {
 public:
  explicit Grouped(const NcclLibrary& nccl) : nccl_(nccl), result_(nccl.group_start()) {}
  Grouped(const Grouped&) = delete;
  Grouped& operator=(const Grouped&) = delete;

  void send(const void* data, size_t bytes, size_t rank, ncclComm_t communicator, Stream stream) {
    if (bytes == 0) return;
    keep(nccl_.send(data, bytes, ncclUint8, static_cast<int>(rank), communicator, platform::cuda::native(stream)));
  }
  void recv(void* data, size_t bytes, size_t rank, ncclComm_t communicator, Stream stream) {
    if (bytes == 0) return;
    keep(nccl_.recv(data, bytes, ncclUint8, static_cast<int>(rank), communicator, platform::cuda::native(stream)));
  }
  ncclResult_t end() {
    keep(nccl_.group_end());
    return result_;
  }

 private:
  void keep(ncclResult_t result) {
    if (result_ == ncclSuccess || result_ == ncclInProgress) result_ = result;
  }

  const NcclLibrary& nccl_;
  ncclResult_t result_;
};

}  // namespace folio::inline v0::distributed
