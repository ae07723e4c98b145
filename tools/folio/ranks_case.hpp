#pragma once

#include <cstdint>
#include <string>

#include "bench_case.hpp"
#include "folio/distributed.hpp"
#include "rank_layer.hpp"

namespace folio::cli {

struct RanksResult {
  BenchShape shape;
  int32_t ranks = 1;
  std::string kernel;
  bool over_peer_memory = false;  ///< the layer's exchanges; else they are the group's
  Spread one_seconds;             ///< of a layer on one rank, undivided
  Spread layer_seconds;           ///< of a divided layer, on the slowest rank; simulated: rank_seconds + link_seconds
  Spread efficiency;              ///< one_seconds / (ranks * layer_seconds), round by round
  // Simulated ranks only.
  Spread rank_seconds;        ///< of rank 0's own work: kernels and copies
  double link_seconds = 0.0;  ///< of its operations, by the model of distributed::Topology; nothing overlaps
  double bytes_sent = 0.0;    ///< by it to others, a layer
  int64_t operations = 0;     ///< a layer
};

/// Measures one layer undivided and as rank 0 of a simulated group, in rounds that alternate. The stack's q heads are
/// those of all ranks. Throws what make_rank_layer throws, and kInvalidArgument for heads that the ranks do not divide.
RanksResult simulate_ranks(const Context& context, const replay::StackConfig& stack, const BenchShape& shape,
                           const RanksOptions& options, const distributed::Topology& topology,
                           const BenchEffort& effort);

/// Measures it on as many GPUs of this host over NCCL or peer memory, a thread a rank, beside the undivided layer on
/// the first. Throws kUnavailable with fewer GPUs, and in builds without folio::nccl.
RanksResult measure_ranks(const replay::StackConfig& stack, const BenchShape& shape, const RanksOptions& options,
                          const BenchEffort& effort);

}  // namespace folio::cli
