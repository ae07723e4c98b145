#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attention/gpu_backend.hpp"
#include "folio/distributed/process_group.hpp"
#include "kernels/cuda/common/peer_memory/peer_memory.hpp"

/// Memory of the GPUs of one host that the ranks of a group store to directly.
namespace folio::inline v0::distributed {

/// One rank as the others see it.
struct PeerRecord {
  int64_t rank = -1;
  uint64_t host = 0;     ///< the same on one host
  uint64_t process = 0;  ///< the same in one process
  attention::GpuIdentity gpu{};
  int64_t num_sms = 0;
};

/// What ranks know of each other before they share any memory. But for `records[r].process` the same on all ranks.
struct PeerAccess {
  std::vector<PeerRecord> records;
  std::string why_not;      ///< why there can be no peer memory; empty: there may be
  bool shares_gpu = false;  ///< two ranks have one GPU
  int32_t grid = 1;         ///< CTAs of an exchange: so many that those of all ranks of a GPU run at once
};
/// Collective, by all_gather_host. Throws as that does.
PeerAccess find_peers(const attention::GpuBackend& gpu, ProcessGroup& group);

/// Bytes that an exchange needs.
struct PeerSizes {
  size_t slopes = 0;
  size_t queries = 0;
  size_t half = 0;
  bool holds(const PeerSizes& other) const {
    return slopes >= other.slopes && queries >= other.queries && half >= other.half;
  }
  /// What holds both.
  PeerSizes with(const PeerSizes& other) const;
};

/// This rank's memory, and every other's as this rank reaches it. A rank's memory lives until the last rank of its
/// process has let go of it. A rank of another process holds pages of it, but the process that has it should end only
/// once the others' exchanges are through.
class PeerMemory {
 public:
  /// Collective, by all_gather_host: null on all ranks where one of them cannot have its memory or another's, and then
  /// `why_not` says why. Throws as all_gather_host does.
  static std::unique_ptr<PeerMemory> connect(const attention::GpuBackend& gpu, ProcessGroup& group,
                                             const PeerAccess& access, const PeerSizes& sizes, std::string& why_not);

  const PeerSizes& sizes() const { return sizes_; }
  const kernels::cuda::PeerRanks& ranks() const { return ranks_; }
  std::byte* own() const { return ranks_.memory[ranks_.rank]; }

  /// Throws kUnavailable, and makes the group fail, if a rank has not come to an exchange in time. Waits for nothing.
  void report(ProcessGroup& group) const;
  /// For a rank that throws while the others wait for it, or will: makes the group fail, and tells the other ranks'
  /// exchanges, which then wait no longer. `report` throws from here on. Nothing where `stream` is being captured,
  /// since nothing has run.
  void abandon(const attention::GpuBackend& gpu, ProcessGroup& group, Stream stream) const noexcept;
  /// Lets go of the other ranks' memory, which they may free then.
  void disconnect() { memory_.resize(1); }

 private:
  PeerMemory() = default;

  PeerSizes sizes_;
  kernels::cuda::PeerRanks ranks_;
  std::shared_ptr<kernels::cuda::PeerFault> fault_;
  std::vector<std::shared_ptr<void>> memory_;  ///< this rank's, then the others'
};

}  // namespace folio::inline v0::distributed
