#include <algorithm>
#include <utility>

#include "attention/fork.hpp"
#include "attention/op_state.hpp"
#include "attention/workspace.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "folio/attention.hpp"

namespace folio::inline v0 {
namespace {

/// What is known on the host of a batch whose lengths lie on the device.
scheduler::PlanView outline(const BatchView& batch, std::vector<scheduler::SegmentLengths>& segments) {
  segments.clear();
  for (const KvSegment& segment : batch.segments) {
    scheduler::SegmentLengths lengths{};
    lengths.source = segment.source;
    lengths.num_rows = batch.num_requests;
    segments.push_back(lengths);
  }
  scheduler::PlanView view;
  view.num_requests = batch.num_requests;
  view.num_segments = static_cast<int32_t>(segments.size());
  view.segments = segments.data();
  return view;
}

}  // namespace

namespace attention {

namespace {

/// Partial rows that one scheduler's plan has, or may have in a graph's replay.
int64_t rows_of(const detail::PlanBufferState& plan, const scheduler::SchedulerConfig& config,
                const scheduler::PlanView& view) {
  if (!may_be_captured(plan)) return view.num_partial_rows;
  const int64_t most = scheduler::max_partial_rows(config);
  return plan.planned_on_device ? most : std::max<int64_t>(most, view.num_partial_rows);
}

/// The most that any plan of an op has.
int64_t most_rows_of(const detail::OpState& op) {
  const int64_t of_few = op.few_rows ? scheduler::max_partial_rows(*op.few_rows) : 0;
  return core::checked_add(scheduler::max_partial_rows(op.scheduler), of_few);
}

}  // namespace

bool may_be_captured(const detail::PlanBufferState& plan) {
  return plan.gpu != nullptr && plan.op->scheduler.bounds.has_value();
}

int64_t first_few_rows(const detail::PlanBufferState& plan) {
  return rows_of(plan, plan.op->scheduler, plan.view);
}

int64_t partial_rows(const detail::PlanBufferState& plan) {
  const int64_t of_few = plan.few_rows ? rows_of(plan, *plan.op->few_rows, plan.few_rows->view) : 0;
  return core::checked_add(first_few_rows(plan), of_few);
}

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
  layout.partial_row_max = take(partial_rows, kFloat);
  layout.partial_row_sum = take(partial_rows, kFloat);
  layout.scratch = take(op.scheduler.num_workers, static_cast<int64_t>(op.scratch_stride));
  return layout;
}

void check_stream(const detail::OpState& op, Stream stream) {
  if (op.gpu() == nullptr && stream.handle != nullptr) {
    core::fail(ErrorCode::kInvalidArgument, "a CPU op takes no stream; pass a default-constructed Stream");
  }
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

AttentionOp AttentionPlan::op() const {
  return AttentionOp(buffer_->op);
}

const detail::PlanBufferState& detail::checked(const AttentionPlan& plan) {
  const detail::PlanBufferState& buffer = plan.buffer();
  if (!buffer.planned || buffer.generation != plan.generation()) {
    core::fail(ErrorCode::kStalePlan, "this plan is number ", plan.generation(),
               " of its buffer, which has since been planned into ", buffer.generation - plan.generation(),
               " more times; keep one buffer per plan in flight");
  }
  return buffer;
}

namespace {

/// Packed rows that an item has at most. Who plans for a graph says what it may have: its launch stays what it is.
int32_t most_item_rows(const scheduler::SchedulerConfig& config, const scheduler::PlanView& plan) {
  const auto is_shared = [](const scheduler::SegmentLengths& lengths) { return lengths.shared; };
  if (config.bounds || std::any_of(plan.segments, plan.segments + plan.num_segments, is_shared)) {
    return config.tile.rows;
  }
  int64_t most = 0;
  for (int32_t r = 0; r < plan.num_requests; ++r) {
    const int64_t rows = int64_t{plan.cu_q[r + 1] - plan.cu_q[r]} * (config.num_q_heads / config.num_kv_heads);
    if (rows >= config.min_rows && rows <= config.max_rows) most = std::max(most, rows);
  }
  return static_cast<int32_t>(std::min<int64_t>(most, config.tile.rows));
}

/// Plans for every kernel, then uploads what has items, or may have some in a graph's replay.
void plan_on_host(const detail::OpState& op, const BatchView& batch, detail::PlanBufferState& state, Stream stream) {
  state.view = scheduler::make_plan(op.scheduler, batch, state.storage);
  if (state.few_rows != nullptr)
    state.few_rows->view = scheduler::make_plan(*op.few_rows, batch, state.few_rows->storage);
  if (state.gpu == nullptr) return;
  state.most_item_rows = most_item_rows(op.scheduler, state.view);
  if (state.few_rows != nullptr) state.few_rows->most_item_rows = most_item_rows(*op.few_rows, state.few_rows->view);
  const bool all = attention::may_be_captured(state);
  const bool few = state.few_rows != nullptr && (all || state.few_rows->view.num_work_tiles > 0);
  if (few) state.few_rows->gpu->upload(state.few_rows->view, stream);
  if (!few || all || state.view.num_work_tiles > 0) state.gpu->upload(state.view, stream);
}

void add_to(PlanSummary& summary, const scheduler::PlanView& view) {
  summary.num_workers = std::max(summary.num_workers, view.num_workers);
  summary.num_work_tiles += view.num_work_tiles;
  summary.num_partial_rows += view.num_partial_rows;
  summary.num_combine_tiles += view.num_combine_tiles;
  for (int32_t i = 0; i < view.num_work_tiles; ++i) {
    const scheduler::WorkTile& item = view.work_tiles[i];
    const int64_t kv_tokens = item.kv_end - item.kv_begin;
    summary.kv_tokens_read += kv_tokens;
    summary.qk_pairs += kv_tokens * (item.row_end - item.row_begin);
  }
}

}  // namespace

PlanBuffer::PlanBuffer(std::unique_ptr<detail::PlanBufferState> state) : state_(std::move(state)) {}
PlanBuffer::PlanBuffer(PlanBuffer&&) noexcept = default;
PlanBuffer& PlanBuffer::operator=(PlanBuffer&&) noexcept = default;
PlanBuffer::~PlanBuffer() = default;

PlanBuffer make_plan_buffer(const AttentionOp& op) {
  auto state = std::make_unique<detail::PlanBufferState>();
  state->op = op.shared_state();
  if (const attention::GpuBackend* gpu = op.state().gpu()) {
    state->gpu = gpu->make_plan_memory(op.state().scheduler, true);
    if (op.state().few_rows) {
      state->few_rows = std::make_unique<detail::FewRowsPlan>();
      // Both plans meet the same lengths; one report of them is enough.
      state->few_rows->gpu = gpu->make_plan_memory(*op.state().few_rows, false);
      state->few_rows->stream = gpu->make_side_stream();
    }
  }
  return PlanBuffer(std::move(state));
}

AttentionPlan plan(const AttentionOp& op, const BatchView& batch, PlanBuffer& buffer, Stream stream) {
  detail::PlanBufferState& state = buffer.state();
  if (state.op.get() != &op.state()) {
    core::fail(ErrorCode::kInvalidArgument, "the plan buffer was made for another op; call make_plan_buffer(op)");
  }
  attention::check_stream(op.state(), stream);
  ++state.generation;
  state.planned = false;
  if (state.gpu != nullptr) state.gpu->report();
  state.planned_on_device = state.gpu != nullptr && batch.where == Where::kDevice;
  if (state.planned_on_device) {
    if (detail::FewRowsPlan* const few = state.few_rows.get()) {
      // Side by side: each is a chain of small steps.
      attention::Fork fork(*few->stream, stream);
      few->gpu->plan_on_device(batch, fork.stream());
      state.gpu->plan_on_device(batch, stream);
      fork.join();
      few->view = scheduler::PlanView{};
      few->most_item_rows = op.state().few_rows->tile.rows;
    } else {
      state.gpu->plan_on_device(batch, stream);
    }
    state.view = outline(batch, state.device_segments);
    state.most_item_rows = op.state().scheduler.tile.rows;
  } else {
    plan_on_host(op.state(), batch, state, stream);
  }
  state.num_tokens = batch.num_tokens;
  state.planned = true;
  return AttentionPlan(&state, state.generation);
}

void check_plans(PlanBuffer& buffer) {
  if (buffer.state().gpu != nullptr) buffer.state().gpu->report();
}

PlanSummary summary(const AttentionPlan& plan) {
  const detail::PlanBufferState& state = detail::checked(plan);
  if (state.planned_on_device) {
    core::fail(ErrorCode::kUnsupported,
               "the plan was made on the device, where its lists are; plan host lengths to see them");
  }
  PlanSummary summary;
  add_to(summary, state.view);
  if (state.few_rows != nullptr) add_to(summary, state.few_rows->view);
  return summary;
}

size_t workspace_size(const AttentionOp& op) {
  return attention::carve(op.state(), attention::most_rows_of(op.state())).total;
}

size_t workspace_size(const AttentionPlan& plan) {
  const detail::PlanBufferState& state = detail::checked(plan);
  return attention::carve(*state.op, attention::partial_rows(state)).total;
}

void init_workspace(const AttentionOp& op, Workspace workspace, Stream stream) {
  attention::check_stream(op.state(), stream);
  attention::check_workspace(workspace, workspace_size(op));
}

}  // namespace folio::inline v0
