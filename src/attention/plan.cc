#include <utility>

#include "attention/op_state.hpp"
#include "attention/workspace.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "folio/attention.hpp"

namespace folio::inline v0 {

namespace attention {

WorkspaceLayout carve(const detail::OpState& op, int64_t partial_rows) {
  WorkspaceLayout layout;
  const auto take = [&layout](int64_t count, int64_t bytes_each) {
    const size_t begin = layout.total;
    const auto bytes = static_cast<size_t>(core::checked_mul(count, bytes_each));
    layout.total = core::checked_add(begin, round_up_to_alignment(bytes));
    return begin;
  };
  constexpr int64_t kFloat = sizeof(float);
  layout.partial_acc = take(core::checked_mul(partial_rows, int64_t{op.config.head_dim_v}), kFloat);
  layout.partial_max = take(partial_rows, kFloat);
  layout.partial_sum = take(partial_rows, kFloat);
  layout.scratch = take(op.planner.num_workers, static_cast<int64_t>(op.scratch_stride));
  return layout;
}

void check_workspace(const Workspace& workspace, size_t needed) {
  if (workspace.bytes < needed) {
    core::fail(ErrorCode::kWorkspaceTooSmall, "the workspace has ", workspace.bytes, " bytes; ", needed, " are needed");
  }
  if (needed > 0 && workspace.data == nullptr) core::fail(ErrorCode::kInvalidArgument, "workspace.data is null");
  if (reinterpret_cast<uintptr_t>(workspace.data) % kWorkspaceAlignment != 0) {
    core::fail(ErrorCode::kInvalidArgument, "workspace.data must be aligned to ", kWorkspaceAlignment, " bytes");
  }
}

}  // namespace attention

const detail::PlanBufferState& detail::checked(const AttentionPlan& plan) {
  const detail::PlanBufferState& buffer = plan.buffer();
  if (!buffer.planned || buffer.generation != plan.generation()) {
    core::fail(ErrorCode::kStalePlan, "this plan is number ", plan.generation(),
               " of its buffer, which has since been planned into ", buffer.generation - plan.generation(),
               " more times; keep one buffer per plan in flight");
  }
  return buffer;
}

PlanBuffer::PlanBuffer(std::unique_ptr<detail::PlanBufferState> state) : state_(std::move(state)) {}
PlanBuffer::PlanBuffer(PlanBuffer&&) noexcept = default;
PlanBuffer& PlanBuffer::operator=(PlanBuffer&&) noexcept = default;
PlanBuffer::~PlanBuffer() = default;

PlanBuffer make_plan_buffer(const AttentionOp& op) {
  auto state = std::make_unique<detail::PlanBufferState>();
  state->op = op.shared_state();
  return PlanBuffer(std::move(state));
}

AttentionPlan plan(const AttentionOp& op, const BatchView& batch, PlanBuffer& buffer, Stream stream) {
  detail::PlanBufferState& state = buffer.state();
  if (state.op.get() != &op.state()) {
    core::fail(ErrorCode::kInvalidArgument, "the plan buffer was made for another op; call make_plan_buffer(op)");
  }
  if (stream.handle != nullptr)
    core::fail(ErrorCode::kInvalidArgument, "a CPU op takes no stream; pass a default-constructed Stream");
  ++state.generation;
  state.planned = false;
  state.view = planner::make_plan(op.state().planner, batch, state.storage);
  state.num_tokens = batch.num_tokens;
  state.planned = true;
  return AttentionPlan(&state, state.generation);
}

PlanSummary summary(const AttentionPlan& plan) {
  const planner::PlanView& view = detail::checked(plan).view;
  PlanSummary summary;
  summary.num_workers = view.num_workers;
  summary.num_items = view.num_items;
  summary.num_partial_rows = view.num_partial_rows;
  summary.num_merges = view.num_merges;
  for (int32_t i = 0; i < view.num_items; ++i) {
    const planner::WorkItem& item = view.items[i];
    const int64_t kv_tokens = item.kv_end - item.kv_begin;
    summary.kv_tokens_read += kv_tokens;
    summary.qk_pairs += kv_tokens * (item.row_end - item.row_begin);
  }
  return summary;
}

size_t workspace_size(const AttentionOp& op) {
  return attention::carve(op.state(), planner::max_partial_rows(op.state().planner)).total;
}

size_t workspace_size(const AttentionPlan& plan) {
  const detail::PlanBufferState& state = detail::checked(plan);
  return attention::carve(*state.op, state.view.num_partial_rows).total;
}

void init_workspace(const AttentionOp& op, Workspace workspace, Stream stream) {
  if (stream.handle != nullptr)
    core::fail(ErrorCode::kInvalidArgument, "a CPU op takes no stream; pass a default-constructed Stream");
  attention::check_workspace(workspace, workspace_size(op));
}

}  // namespace folio::inline v0
