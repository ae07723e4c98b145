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
};

struct BlockTableWorkspace::State {
  Context context;
  Determinism determinism;
  std::string force_kernel;
  Workspace given;
  ContextMemory own;                                       ///< where no memory was given
  std::vector<std::unique_ptr<BlockTableKernel>> kernels;  ///< few: one for each window, section and kind of output
  std::vector<int32_t> cu_q;                               ///< of the present call
  ContextMemory dequantized;                               ///< a 16-bit copy of fp8 pages
  ContextMemory dequantized_table;                         ///< and its table
  size_t most_bytes = 0;
  int64_t num_plans = 0;

  BlockTableKernel& kernel_for(const AttentionConfig& config);
  /// Memory for that plan; throws kWorkspaceTooSmall where it was given and is too small.
  Workspace memory_for(const BlockTableKernel& kernel);
};

/// Sets cu_q to the lengths of a decode or of prefills. Throw what those calls throw.
void set_decode_lengths(BlockTableWorkspace::State& state, const BlockTableArgs& args, int32_t q_len_per_req);
void set_context_lengths(BlockTableWorkspace::State& state, const BlockTableArgs& args,
                         std::span<const int32_t> cum_seq_lens_q, int32_t max_q_len);

/// Everything that a call with these lengths would refuse before it plans; chooses its kernel.
void check_block_table_call(BlockTableWorkspace::State& state, const BlockTableArgs& args);

}  // namespace folio::inline v0::backends
