#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "bench_case.hpp"
#include "folio/distributed.hpp"

namespace folio::cli {

/// How ranks divide a layer.
struct RanksOptions {
  int32_t ranks = 1;
  bool divide_queries = false;  ///< by PcpAttention; else by DcpAttention, whose ranks have heads of their own
  distributed::PcpExchange exchange = distributed::PcpExchange::kAutomatic;
  int32_t interleave = 1;
  distributed::DcpCombine combine = distributed::DcpCombine::kAllGatherReduceScatter;
  distributed::DcpTransport transport = distributed::DcpTransport::kAuto;
  DType partial_dtype = DType::kFloat32;
  bool graph = false;  ///< runs are captured: the op has bounds
};

/// One rank's layer, planned, with all its memory.
class RankLayer {
 public:
  virtual ~RankLayer() = default;
  virtual void run(Stream stream = {}) = 0;
  virtual std::string kernel_name() const = 0;
  virtual bool over_peer_memory() const { return false; }
};

/// The group outlives the layer. Where there are several ranks on GPUs, it is collective. Throws what DcpAttention and
/// PcpAttention throw.
std::unique_ptr<RankLayer> make_rank_layer(const Context& context, distributed::ProcessGroup& group,
                                           const replay::StackConfig& stack, const RanksOptions& options,
                                           const BenchShape& shape);

}  // namespace folio::cli
