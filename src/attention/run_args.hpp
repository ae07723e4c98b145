#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/op_state.hpp"
#include "folio/attention.hpp"

/// What `run` is given: checks of its arguments, the workspace, and the launches on a GPU.
namespace folio::inline v0::attention {

/// Checks one layer's arguments against the op and the plan: shapes, strides, dtypes, features, table and indptr
/// lengths (O(requests)); not page ids. Throws kInvalidArgument, naming the field, the request and what was expected.
void check_args(const detail::PlanBufferState& plan, const AttentionArgs& args);

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

/// Throws kInvalidArgument if the sizes overflow.
WorkspaceLayout carve(const detail::OpState& op, int64_t partial_rows);

/// Throws kWorkspaceTooSmall, or kInvalidArgument if it is null or not aligned.
void check_workspace(const Workspace& workspace, size_t needed);

/// ContextOptions::validate_tables: checks what a run will read of tables and indptrs, with args that check_args has
/// passed. Throws kInvalidArgument. Where `stream` is being captured it enqueues the check instead, which reports
/// through the plan's buffer.
void check_tables(const detail::PlanBufferState& plan, const AttentionArgs& args, Stream stream);

/// What a GPU cannot take although a CPU can: more segments than a launch carries, addresses that are not aligned to
/// elements. Throws kUnsupported or kInvalidArgument.
void check_gpu_args(const detail::PlanBufferState& plan, const AttentionArgs& args);

/// Enqueues the passes of one layer. `args` is checked and has its defaults resolved.
void run_on_gpu(const detail::PlanBufferState& plan, const AttentionArgs& args, const WorkspaceLayout& layout,
                std::byte* workspace, Stream stream);

}  // namespace folio::inline v0::attention
