#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/op_state.hpp"

namespace folio::inline v0::attention {

inline constexpr size_t kWorkspaceAlignment = 256;

constexpr size_t round_up_to_alignment(size_t bytes) {
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

/// Where the parts of a workspace begin, as byte offsets. One function carves and counts, so that the size asked for
/// and the size used cannot differ.
struct WorkspaceLayout {
  size_t partial_acc = 0;
  size_t partial_row_max = 0;
  size_t partial_row_sum = 0;
  size_t scratch = 0;
  size_t total = 0;
};

/// Whether a run of the plan may be in a graph that is replayed with later plans of its buffer, from the device's
/// lengths or the host's: what such a run enqueues may not depend on this one plan.
bool may_be_captured(const detail::PlanBufferState& plan);

/// Whether a run launches this pass on a GPU: it has work tiles, or may have some in a graph's replay. Where no pass
/// has, the first is launched.
bool is_launched(const detail::PlanBufferState& plan, size_t pass);

/// Partial rows of a plan, or of one of its passes; of a plan that may be captured, the most that its op's plans can
/// have. The workspace holds the passes' rows one after the other.
int64_t partial_rows(const detail::PlanBufferState& plan);
int64_t partial_rows(const detail::PlanBufferState& plan, size_t pass);

/// Throws kInvalidArgument if the sizes overflow.
WorkspaceLayout carve(const detail::OpState& op, int64_t partial_rows);

/// A CPU has no streams. Throws kInvalidArgument for one other than the default.
void check_stream(const detail::OpState& op, Stream stream);

/// Throws kWorkspaceTooSmall, or kInvalidArgument if it is null or not aligned.
void check_workspace(const Workspace& workspace, size_t needed);

}  // namespace folio::inline v0::attention
