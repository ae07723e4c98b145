#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "distributed/dcp_case_test_util.hpp"
#include "folio/distributed.hpp"

namespace folio::inline v0::distributed::testing {

/// A batch, a model and how queries and cache are divided. `whole.heads` are every rank's.
struct PcpSetup {
  DcpSetup whole;
  PcpExchange exchange = PcpExchange::kAutomatic;
  bool packed = false;  ///< the cache's format is kCpuPacked
  std::optional<GraphBounds> bounds = {};
  int32_t max_tokens = 0;  ///< PcpBatch's
};

/// A problem whose queries are divided too: a DcpCase with the rows of its first rank dealt to all. New tokens are not
/// in the caches, whose slots for them hold NaN.
class PcpCase {
 public:
  explicit PcpCase(const PcpSetup& setup, uint32_t seed = 1);

  /// One rank's step: plans, runs into NaN-filled memory, and keeps what came out.
  void run(PcpAttention& attention);
  /// What the kernels of `attention` round probabilities to: wrong_outputs allows for it. run() does this.
  void note_p_dtype(const PcpAttention& attention);
  void run(ProcessGroup& group, const Context& context);
  /// All ranks, in threads, each with a context of its own.
  void run_in_threads();

  /// Puts the ranks' results together and compares them with attention in float64 over the undivided cache. Empty if
  /// all is well.
  std::string wrong_outputs();

  PcpConfig config() const;
  PcpBatch batch() const;
  PcpArgs args(int32_t rank);
  int32_t world() const { return setup.whole.world; }

  PcpSetup setup;
  DcpCase whole;  ///< its first rank has everybody's queries, keys, values and results

  struct Rank {
    int32_t num_tokens = 0;
    int32_t rows = 0;                     ///< that a step may write: num_tokens or, if more, PcpSetup::max_tokens
    std::vector<int32_t> tokens;          ///< of the batch
    std::vector<std::byte> q, k, v, out;  ///< with padding rows
    std::vector<float> lse;
    std::vector<std::byte> packed;                   ///< the cache, if it is packed
    PcpExchange exchange = PcpExchange::kAutomatic;  ///< what the step took
  };
  std::vector<Rank> ranks;

 private:
  KvCacheView packed_view(int32_t rank);
};

}  // namespace folio::inline v0::distributed::testing
