#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "backends/common/context_memory.hpp"
#include "backends/common/layer_plans.hpp"
#include "core/error.hpp"
#include "folio/backends/attention_layer.hpp"
#include "folio/backends/attention_metadata.hpp"
#include "folio/backends/dcp_plans.hpp"
#include "folio/backends/engine_config.hpp"
#include "folio/context.hpp"

namespace folio::inline v0::backends {

/// Whether requests' KV is divided over ranks.
inline bool uses_dcp(const EngineConfig& config) {
  return config.parallel.decode_context_parallel_size > 1;
}

/// Throws where the ranks of decode context parallelism contradict each other or the context.
void check_dcp_ranks(const Context& context, const ParallelConfig& parallel);

/// Throws where the configuration of decode context parallelism contradicts itself or its group; kUnsupported for what
/// does not go with it.
void check_dcp_config(const Context& context, const EngineConfig& config, const AttentionSpec& spec);

/// Throws kInvalidArgument where a layer is given the query heads of other ranks than the configuration says.
/// `divided`: the layers' keys are divided over ranks.
template <typename Impl>
void check_query_ranks(const EngineConfig& config, bool divided, std::span<const AttentionLayer<Impl>> layers) {
  const ParallelConfig& parallel = config.parallel;
  const bool replicated = divided && parallel.dcp_replicated_queries;
  const int32_t expected = replicated ? parallel.decode_context_parallel_size : 1;
  for (const AttentionLayer<Impl>& layer : layers) {
    const int32_t given = layer.impl->dcp_query_ranks();
    core::require(given == expected, "layer ", layer.name, " has a dcp_query_ranks of ", given, "; with ",
                  parallel.decode_context_parallel_size, " ranks and dcp_replicated_queries ",
                  parallel.dcp_replicated_queries ? "true" : "false", " it is ", expected);
  }
}

/// Throws where a batch's dcp_local_seq_lens, which may be left out, are not this rank's. O(R).
void check_dcp_lengths(const EngineConfig& config, const CommonAttentionMetadata& batch);

/// What attention over these ranks is prepared for, but for the attention itself.
distributed::DcpConfig dcp_config(const ParallelConfig& parallel, const PrepareOptions& options);

/// Where a group's keys are.
enum class DcpKeys {
  kNewBesideCache,  ///< those of new tokens, decodes apart, are read from the step's key and value
  kCached,          ///< all in the cache
  kEncoders,        ///< all in the cache, and none is a query's own
};

/// What StepPlans is without decode context parallelism.
class DcpStepPlans {
 public:
  /// `windows`: the kernels that would attend to undivided caches. `options`: theirs. With bounds forward passes can be
  /// captured, the workspace never moves, and making this is collective.
  DcpStepPlans(const Context& context, const EngineConfig& config, std::span<const WindowOp> windows, DcpKeys keys,
               const PrepareOptions& options);

  /// What attends for the group's first window.
  const distributed::DcpAttention& attention() const { return windows_.front().attention; }

  /// A workspace of so many bytes at least, before there are plans.
  void reserve(size_t bytes) { workspace_.reserve(bytes); }

  /// Plans a step for every window; earlier plans go stale. The new tokens of the first `num_decodes` requests are read
  /// from the cache. Lengths on the device need bounds. Allocates nothing once warm.
  DcpWindowPlans plan(const CommonAttentionMetadata& batch, int32_t num_decodes, Stream stream);

  /// Enough for every plan that `plan` has made; it moves where one needs more than it had.
  Workspace workspace() noexcept { return {workspace_.data(), workspace_.bytes()}; }

 private:
  struct Window {
    int32_t window_left;
    distributed::DcpAttention attention;
  };
  std::vector<Window> windows_;  ///< at most kMaxWindows
  ContextMemory workspace_;
  DcpKeys keys_;
};

/// How many ranks' heads `forward` writes.
int32_t dcp_out_ranks(const DcpWindowPlans& plans);

/// The plan of the layers of that window. Throws kInvalidArgument where nothing was planned for it, kStalePlan.
const DcpWindowPlan& dcp_plan_for_window(const DcpWindowPlans& plans, int32_t window_left);

/// One layer. `args`: as they are for an undivided cache, with one paged segment, which is this rank's shard. `key` and
/// `value`: the new tokens'. Collective.
void run_dcp(const DcpWindowPlan& plan, const AttentionArgs& args, const ConstTensorView& key,
             const ConstTensorView& value, Workspace workspace, Stream stream);

}  // namespace folio::inline v0::backends
