#pragma once

#include <cstdint>

#include "bench_case.hpp"
#include "folio/distributed.hpp"

namespace folio::cli {

/// Context parallelism over ranks of which this machine runs one.
struct RanksOptions {
  int32_t ranks = 1;
  bool divide_queries = false;  ///< by PcpAttention; else by DcpAttention, whose ranks have heads of their own
  distributed::PcpExchange exchange = distributed::PcpExchange::kAutomatic;
  int32_t interleave = 1;
  distributed::DcpCombine combine = distributed::DcpCombine::kAllGatherReduceScatter;
  distributed::Topology topology;
};

struct RanksResult {
  BenchShape shape;
  int32_t ranks = 1;
  std::string kernel;
  Spread one_seconds;         ///< of a layer on one rank, undivided
  Spread rank_seconds;        ///< of rank 0's own work in a divided layer: kernels and copies
  double link_seconds = 0.0;  ///< of its operations, by the model of distributed::Topology
  double bytes_sent = 0.0;    ///< by it to others, a layer
  int64_t operations = 0;     ///< a layer
  Spread layer_seconds;       ///< rank_seconds + link_seconds: nothing overlaps
  Spread efficiency;          ///< one_seconds / (ranks * layer_seconds), round by round
};

/// Measures one layer undivided and as rank 0 of a simulated group, in rounds that alternate. The stack's q heads are
/// those of all ranks. Throws what DcpAttention and PcpAttention throw, and kInvalidArgument for heads that the ranks
/// do not divide.
RanksResult run_ranks_case(const Context& context, const replay::StackConfig& stack, const BenchShape& shape,
                           const RanksOptions& options, const BenchEffort& effort);

}  // namespace folio::cli
