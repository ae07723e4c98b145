#pragma once

#include "attention/op_state.hpp"
#include "attention/workspace.hpp"

namespace folio::inline v0::attention {

/// One layer's arguments, checked before, as kernels on a GPU take them; but for what set_pass adds. `args` has its
/// defaults resolved.
kernels::cuda::AttentionParams gpu_params(const detail::PlanBufferState& plan, const AttentionArgs& args,
                                          const WorkspaceLayout& layout, std::byte* workspace);

/// Adds what a pass's kernel takes of that pass's plan.
void set_pass(const detail::PlanBufferState& plan, size_t pass, kernels::cuda::AttentionParams& params);

/// Whether a pass's kernel combines its own splits, in this plan and, where a run may be captured, in every later one:
/// the splits of shared segments are combined by a second kernel.
bool combines_in_kernel(const detail::PlanBufferState& plan, size_t pass);

/// What a GPU cannot take although a CPU can: more segments than a launch carries, addresses that are not aligned to
/// elements. Throws.
void check_gpu_args(const detail::PlanBufferState& plan, const AttentionArgs& args);

}  // namespace folio::inline v0::attention
