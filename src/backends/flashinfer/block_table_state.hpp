#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backends/common/context_memory.hpp"
#include "folio/attention.hpp"
#include "folio/backends/flashinfer/block_table.hpp"

namespace folio::inline v0::backends {

/// The kernel for one configuration, and the plan of the last lengths it was called with.
struct BlockTableKernel {
  explicit BlockTableKernel(AttentionOp prepared) : op(std::move(prepared)), buffer(make_plan_buffer(op)) {}

  AttentionOp op;
  PlanBuffer buffer;
  std::optional<AttentionPlan> plan;
  std::vector<int32_t> cu_q;      ///< [B + 1] of that plan
  std::vector<int32_t> seq_lens;  ///< [B]
  /// Of kernels that captured graphs know: memory of its own, which never grows.
  std::optional<ContextMemory> memory;
};

struct BlockTableWorkspace::State {
  Context context;
  Determinism determinism;
  std::string force_kernel;
  Workspace given;
  ContextMemory own;                                       ///< where no memory was given
  std::vector<std::unique_ptr<BlockTableKernel>> kernels;  ///< few: one for each window, section and kind of output
  std::vector<int32_t> cu_q;                               ///< of the present call
  bool of_captured_shape = false;                          ///< the present call's batch
  std::optional<GraphBounds> graph_bounds;                 ///< of captured shapes; on a GPU
  std::vector<std::unique_ptr<BlockTableKernel>> graph_kernels;  ///< for these, as `kernels`
  ContextMemory dequantized;                                     ///< a 16-bit copy of fp8 pages
  ContextMemory dequantized_table;                               ///< and its table
  size_t most_bytes = 0;
  int64_t num_plans = 0;

  BlockTableKernel& kernel_for(const AttentionConfig& config);
  /// On a GPU, for graphs: has the kernel now, since memory cannot be had while a stream is captured.
  void prepare_for_graphs(const AttentionConfig& config);
  /// Plans a step of a captured shape for every kernel that graphs may know. cu_q [B + 1] from 0, seq_lens [B]. What a
  /// graph then replays, or `forward` captures, finds its plan.
  void plan_for_graphs(std::span<const int32_t> cu_q, std::span<const int32_t> seq_lens, Stream stream);
  /// Bytes of memory had here, graphs' and copies of pages included.
  size_t held_bytes() const;
  /// Memory for that plan; throws kWorkspaceTooSmall where it was given and is too small.
  Workspace memory_for(BlockTableKernel& kernel);
};

/// Sets cu_q to the lengths of a decode or of prefills. Throw what those calls throw.
void set_decode_lengths(BlockTableWorkspace::State& state, const BlockTableArgs& args, int32_t q_len_per_req);
void set_context_lengths(BlockTableWorkspace::State& state, const BlockTableArgs& args,
                         std::span<const int32_t> cum_seq_lens_q, int32_t max_q_len);

/// Everything that a call with these lengths would refuse before it plans; chooses its kernel.
void check_block_table_call(BlockTableWorkspace::State& state, const BlockTableArgs& args);

}  // namespace folio::inline v0::backends
