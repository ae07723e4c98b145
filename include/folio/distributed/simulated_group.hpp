#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "folio/context.hpp"
#include "folio/distributed/process_group.hpp"
#include "folio/types/export.hpp"

namespace folio::inline v0::distributed {

/// A link out of one rank, each direction by itself.
struct Link {
  double bytes_per_second = 0.0;
  double seconds_per_operation = 0.0;  ///< of an operation that moves nothing
  /// To one other rank; 0: as many as to all. Less, where a message to one rank does not fill the link.
  double bytes_per_second_to_one = 0.0;
};

/// Ranks on equal nodes. Within a node they reach each other by one link, other nodes by another.
struct Topology {
  int32_t ranks_per_node = 8;
  /// NVLink 4, eight GPUs on a switch. To one of them NCCL moved 80 to 100 GB/s in messages of 0.5 to 1 MB, on two H200
  /// (docs/scaling.md).
  Link within_node = {450e9, 6e-6, 90e9};
  Link between_nodes = {50e9, 15e-6};  ///< InfiniBand NDR, one adapter of 400 Gbit/s a GPU
};

struct SimulatedGroupOptions {
  int32_t rank = 0;
  Topology topology;
  /// A GPU's: buffers lie in its memory. A CPU's, or none: host memory.
  std::optional<Context> context = std::nullopt;
};

/// What the operations of a simulated group would have moved.
struct Traffic {
  int64_t operations = 0;
  double bytes_sent = 0.0;  ///< by this rank to others
  double seconds = 0.0;     ///< by the model of `Topology`
};

/// One rank of a group whose other ranks do not exist: for planning. Operations copy as if every rank sent what this
/// one sends, enqueue only, and count what links would have taken. So one GPU runs what a rank of many would run.
///
/// Model: an operation takes the larger of its times on the two links, each `seconds_per_operation` plus this rank's
/// bytes there by its rate, or those to one rank by the rate to one. all_gather, all_to_all and reduce_scatter send a
/// part to each other rank; all_reduce is a reduce_scatter and an all_gather.
class FOLIO_API SimulatedGroup : public ProcessGroup {
 public:
  virtual Traffic traffic() const noexcept = 0;  ///< since the last reset
  virtual void reset_traffic() noexcept = 0;
};

/// Throws kInvalidArgument for a world below 1, a rank that is none of it, nodes of no ranks and rates that are not
/// above 0.
FOLIO_API std::unique_ptr<SimulatedGroup> make_simulated_group(int32_t world,
                                                               const SimulatedGroupOptions& options = {});

}  // namespace folio::inline v0::distributed
