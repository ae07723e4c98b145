#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "attention/log.hpp"
#include "attention/profiler_range.hpp"
#include "attention/run_args.hpp"
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

/// The most partial rows that any plan of an op has.
int64_t max_partial_rows(const detail::OpState& op) {
  int64_t rows = 0;
  for (const detail::Pass& pass : op.passes)
    rows = core::checked_add(rows, scheduler::max_partial_rows(pass.scheduler));
  return rows;
}

}  // namespace

bool may_be_captured(const detail::PlanBufferState& plan) {
  return plan.op->gpu() != nullptr && plan.op->options.bounds.has_value();
}

bool is_launched(const detail::PlanBufferState& plan, size_t pass) {
  const auto has_work = [captured = may_be_captured(plan)](const detail::PassPlan& p) {
    return captured || p.view.num_work_tiles > 0;
  };
  return has_work(plan.passes[pass]) || (pass == 0 && std::none_of(plan.passes.begin(), plan.passes.end(), has_work));
}

const int32_t* cu_q_on_device(const detail::PlanBufferState& plan) {
  size_t pass = 0;  // all passes have planned the same batch, but not all are uploaded
  while (!plan.planned_on_device && !is_launched(plan, pass)) ++pass;
  return plan.passes[pass].gpu->cu_q();
}

int64_t partial_rows(const detail::PlanBufferState& plan, size_t pass) {
  const scheduler::PlanView& view = plan.passes[pass].view;
  if (!may_be_captured(plan)) return view.num_partial_rows;
  const int64_t most = scheduler::max_partial_rows(plan.op->passes[pass].scheduler);
  return plan.planned_on_device ? most : std::max<int64_t>(most, view.num_partial_rows);
}

int64_t partial_rows(const detail::PlanBufferState& plan) {
  int64_t rows = 0;
  for (size_t i = 0; i < plan.passes.size(); ++i) rows = core::checked_add(rows, partial_rows(plan, i));
  return rows;
}

void check_stream(const detail::OpState& op, Stream stream) {
  if (op.gpu() == nullptr && stream.handle != nullptr) {
    core::fail(ErrorCode::kInvalidArgument, "a CPU op takes no stream; pass a default-constructed Stream");
  }
}

}  // namespace attention

AttentionOp AttentionPlan::op() const {
  return AttentionOp(buffer_->op);
}

const detail::PlanBufferState& detail::checked(const AttentionPlan& plan) {
  const detail::PlanBufferState& buffer = plan.buffer();
  if (plan.generation() > buffer.generation) {
    core::fail(ErrorCode::kStalePlan, "this plan is number ", plan.generation(), " of its buffer, which has made ",
               buffer.generation, " so far: the plan is another buffer's, perhaps of one that stood here before");
  }
  if (!buffer.planned || buffer.generation != plan.generation()) {
    core::fail(ErrorCode::kStalePlan, "this plan is number ", plan.generation(),
               " of its buffer, which has since been planned into ", buffer.generation - plan.generation(),
               " more times; keep one buffer per plan in flight");
  }
  return buffer;
}

namespace {

/// Packed rows that a work tile has at most. With bounds, what any plan may have: a graph keeps its launch.
int32_t most_tile_rows(const scheduler::SchedulerConfig& config, const scheduler::PlanView& plan) {
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

/// Plans every pass, then uploads those that a run launches, the first pass last.
void plan_on_host(const BatchView& batch, detail::PlanBufferState& state, Stream stream) {
  for (size_t i = 0; i < state.passes.size(); ++i) {
    detail::PassPlan& pass = state.passes[i];
    pass.view = scheduler::make_plan(state.op->passes[i].scheduler, batch, pass.storage);
  }
  if (state.op->gpu() == nullptr) return;
  for (size_t i = state.passes.size(); i-- > 0;) {
    detail::PassPlan& pass = state.passes[i];
    pass.most_tile_rows = most_tile_rows(state.op->passes[i].scheduler, pass.view);
    if (attention::is_launched(state, i)) pass.gpu->upload(pass.view, stream);
  }
}

/// Plans the passes side by side, because each plan is a chain of small kernels; the first pass on the caller's stream.
void plan_on_device(const BatchView& batch, detail::PlanBufferState& state, Stream stream) {
  std::array<std::optional<attention::Fork>, kernels::cuda::kMaxPasses> forks;
  for (size_t i = state.passes.size(); i-- > 0;) {
    detail::PassPlan& pass = state.passes[i];
    if (i > 0) forks[i].emplace(*pass.side, stream);
    pass.gpu->plan_on_device(batch, i > 0 ? forks[i]->stream() : stream);
    pass.view = scheduler::PlanView{};
    pass.most_tile_rows = state.op->passes[i].scheduler.tile.rows;
  }
  for (std::optional<attention::Fork>& fork : forks) {
    if (fork) fork->join();
  }
  state.passes.front().view = outline(batch, state.device_segments);
}

void add_to(PlanSummary& summary, const scheduler::PlanView& view) {
  summary.num_workers = std::max(summary.num_workers, view.num_workers);
  summary.num_work_tiles += view.num_work_tiles;
  summary.num_partial_rows += view.num_partial_rows;
  summary.num_combine_tiles += view.num_combine_tiles;
  for (int32_t i = 0; i < view.num_work_tiles; ++i) {
    const scheduler::WorkTile& tile = view.work_tiles[i];
    const int64_t kv_tokens = tile.kv_end - tile.kv_begin;
    summary.kv_tokens_read += kv_tokens;
    summary.qk_pairs += kv_tokens * (tile.row_end - tile.row_begin);
  }
}

}  // namespace

namespace {

void log_planned(const detail::PlanBufferState& state) {
  if (!attention::is_logged(LogLevel::kDebug)) return;
  if (state.planned_on_device) {
    attention::log(LogLevel::kDebug, "plan: ", state.view().num_requests, " requests, ", state.num_tokens,
                   " tokens, planned on the device");
    return;
  }
  PlanSummary totals{};
  for (const detail::PassPlan& pass : state.passes) add_to(totals, pass.view);
  attention::log(LogLevel::kDebug, "plan: ", state.view().num_requests, " requests, ", state.num_tokens, " tokens, ",
                 totals.num_work_tiles, " work tiles, ", totals.num_partial_rows, " partial rows, ", totals.num_workers,
                 " workers");
}

}  // namespace

PlanBuffer::PlanBuffer(std::unique_ptr<detail::PlanBufferState> state) : state_(std::move(state)) {}
PlanBuffer::PlanBuffer(PlanBuffer&&) noexcept = default;
PlanBuffer& PlanBuffer::operator=(PlanBuffer&&) noexcept = default;
PlanBuffer::~PlanBuffer() = default;

PlanBuffer make_plan_buffer(const AttentionOp& op) {
  auto state = std::make_unique<detail::PlanBufferState>();
  state->op = op.shared_state();
  const attention::GpuBackend* const gpu = op.state().gpu();
  for (const detail::Pass& pass : op.state().passes) {
    const bool first = state->passes.empty();
    detail::PassPlan& plan = state->passes.emplace_back();
    if (gpu == nullptr) continue;
    plan.gpu = gpu->make_plan_memory(pass.scheduler, first);  // all passes meet the same lengths: one report is enough
    if (!first) plan.side = gpu->make_side_stream();
  }
  return PlanBuffer(std::move(state));
}

AttentionPlan plan(const AttentionOp& op, const BatchView& batch, PlanBuffer& buffer, Stream stream) {
  detail::PlanBufferState& state = buffer.state();
  if (state.op.get() != &op.state()) {
    core::fail(ErrorCode::kInvalidArgument, "the plan buffer was made for another op; call make_plan_buffer(op)");
  }
  attention::check_stream(op.state(), stream);
  const attention::ProfilerRange range("plan", batch.num_tokens);
  ++state.generation;
  state.planned = false;
  const bool on_gpu = op.state().gpu() != nullptr;
  if (on_gpu) state.passes.front().gpu->report();
  state.planned_on_device = on_gpu && batch.where == Where::kDevice;
  if (state.planned_on_device) {
    plan_on_device(batch, state, stream);
  } else {
    plan_on_host(batch, state, stream);
  }
  state.num_tokens = batch.num_tokens;
  state.planned = true;
  log_planned(state);
  return AttentionPlan(&state, state.generation);
}

void check_plans(PlanBuffer& buffer) {
  const detail::PassPlan& first = buffer.state().passes.front();
  if (first.gpu != nullptr) first.gpu->report();
}

PlanSummary summary(const AttentionPlan& plan) {
  const detail::PlanBufferState& state = detail::checked(plan);
  if (state.planned_on_device) {
    core::fail(ErrorCode::kUnsupported,
               "the plan was made on the device, where its lists are; plan host lengths to see them");
  }
  PlanSummary summary;
  for (const detail::PassPlan& pass : state.passes) add_to(summary, pass.view);
  return summary;
}

size_t workspace_size(const AttentionOp& op) {
  return attention::carve(op.state(), attention::max_partial_rows(op.state())).total;
}

size_t workspace_size(const AttentionPlan& plan) {
  const detail::PlanBufferState& state = detail::checked(plan);
  return attention::carve(*state.op, attention::partial_rows(state)).total;
}

void init_workspace(const AttentionOp& op, Workspace workspace, Stream stream) {
  attention::check_stream(op.state(), stream);
  attention::check_workspace(workspace, attention::carve(op.state(), 0).total);
}

}  // namespace folio::inline v0
