#pragma once

#include "attention/op_state.hpp"
#include "attention/workspace.hpp"

namespace folio::inline v0::attention {

/// One layer's arguments, checked before, as kernels on a GPU take them. `args` has its defaults resolved.
kernels::cuda::AttentionParams gpu_params(const detail::PlanBufferState& plan, const AttentionArgs& args,
                                          const WorkspaceLayout& layout, std::byte* workspace);

/// Whether the kernel merges what it splits, in this plan and, where a run may be captured, in every later one: rows of
/// shared segments are merged by a second kernel.
bool combines_in_kernel(const detail::PlanBufferState& plan);

/// What a GPU cannot take although a CPU can: more segments than a launch carries, addresses that are not aligned to
/// elements. Throws.
void check_gpu_args(const detail::PlanBufferState& plan, const AttentionArgs& args);

}  // namespace folio::inline v0::attention
