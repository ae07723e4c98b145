#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "folio/context.hpp"
#include "folio/distributed/process_group.hpp"
#include "folio/types/export.hpp"

namespace folio::inline v0::distributed {

/// What brings the ranks of one group together: an ncclUniqueId.
using NcclUniqueId = std::array<std::byte, 128>;

/// Who adds float32 sums over a group of GPUs.
enum class NcclSums : int32_t {
  /// NCCL moves the parts, a kernel adds them in the order of the ranks: what ProcessGroup promises.
  kRankOrder = 0,
  /// NCCL's own reductions. The order of additions depends on the size, and so do the bits of a row among others.
  kNccl = 1,
};

struct NcclGroupOptions {
  /// An engine's communicator, an ncclComm_t. It is used and never destroyed or aborted, and outlives the group.
  void* communicator = nullptr;
  /// Else the group makes a communicator of its own for `rank` of `size` ranks, which all have this id from one call of
  /// nccl_unique_id. Without either, `control` brings the id and says rank and size.
  std::optional<NcclUniqueId> id = {};
  int32_t rank = 0;
  int32_t size = 0;
  /// A group of the same ranks over the host's memory (of threads, MPI or Python), or null. all_gather_host goes
  /// through it and then waits for no GPU. It outlives the group.
  ProcessGroup* control = nullptr;
  /// How long the other ranks are waited for in one operation, on the host or on the device. Above 0.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  /// Device memory for sums, made at once. One operation needs the bytes of `send` of reduce_scatter_sum or of `data`
  /// of all_reduce_sum, and up to 256 for each rank. Larger sums get more memory outside a capture, and are refused
  /// inside.
  size_t scratch_bytes = 0;
  NcclSums sums = NcclSums::kRankOrder;
  /// The file of libnccl.so.2. Empty: the one that the process has loaded (torch's), else the one that the dynamic
  /// linker finds. An engine's communicator must be of the same library.
  std::string library = {};
};

/// A group of ranks with a GPU each, over NCCL. In the library folio_nccl (CMake target folio::nccl), which loads NCCL
/// when the first group is made and does not link it:
///
///     const Context context = Context::cuda(rank);
///     NcclGroupOptions options;
///     options.id = id;  // rank 0's nccl_unique_id(), brought to every rank by any channel
///     options.rank = rank, options.size = size;
///     const auto group = make_nccl_group(context, options);  // every rank at the same time
///     group->all_gather(send, recv, bytes, stream);          // enqueued; a graph may capture it
///     cudaGraphLaunch(graph, stream), group->watch(stream);  // a step, replayed
///     group->check();                                        // once a step: throws if a rank is gone
///
/// Operations are enqueued and wait for nothing on the host. The first on a stream makes two events, sums may make
/// scratch (NcclGroupOptions::scratch_bytes), nothing else allocates. Sums share the scratch, so the streams of
/// successive ones, replays too, must be ordered. `barrier` holds its stream until every rank's has come to it.
///
/// Sent by each rank of n, and received, in bytes:
///
///     all_gather, all_to_all     (n - 1) * bytes
///     reduce_scatter_sum         (n - 1) * 4 * count           as NCCL's own
///     all_reduce_sum             2 * (n - 1) / n * 4 * count   as NCCL's own
///
/// **Failures.** A thread of the group watches what was enqueued outside captures, and `watch`. What the device has not
/// finished `timeout` after the call makes the group fail, as do an asynchronous error of NCCL and `fail`. A group then
/// aborts a communicator of its own: its operations end on the device with undefined results, and so do replays. An
/// engine's communicator goes on until the engine aborts it. Other ranks fail when their own time is up. Graphs that
/// captured operations are not launched after a failure. They are destroyed before the group, whose end else waits for
/// them some seconds and leaves NCCL's part to a thread.
class FOLIO_API NcclGroup : public ProcessGroup {
 public:
  ~NcclGroup() override;
  bool enqueues() const noexcept override { return true; }
  /// Watches what `stream` has so far, as an operation outside a capture is watched. For replays of graphs, which call
  /// no operation: without it a rank that is gone holds a replay for ever.
  virtual void watch(Stream stream) = 0;
};

/// An id for one group, made by one of its ranks, who must live until the group is made. `library` as in
/// NcclGroupOptions. Throws kUnavailable: no NCCL was found, or one older than 2.14.
FOLIO_API NcclUniqueId nccl_unique_id(const std::string& library = {});

/// Collective: returns when every rank has called it and all are connected. The buffers of operations lie in the
/// memory of `context`'s GPU. Throws kInvalidArgument for options that contradict each other, kUnavailable without
/// NCCL, where NCCL refuses (two ranks on one GPU), or when the time is up.
FOLIO_API std::unique_ptr<NcclGroup> make_nccl_group(const Context& context, const NcclGroupOptions& options);

}  // namespace folio::inline v0::distributed
