#include <cmath>

#include "attention/gpu_params.hpp"
#include "attention/op_state.hpp"
#include "attention/run_args.hpp"
#include "attention/workspace.hpp"
#include "core/error.hpp"
#include "folio/attention.hpp"
#include "folio/page_table.hpp"

namespace folio::inline v0 {
namespace {

struct Launch {
  const kernels::AttentionKernel* kernel;
  kernels::AttentionParams params;
};

void worker_body(void* context, int64_t index) noexcept {
  const auto& launch = *static_cast<const Launch*>(context);
  launch.kernel->run_worker(launch.params, static_cast<int32_t>(index));
}

void merge_body(void* context, int64_t index) noexcept {
  const auto& launch = *static_cast<const Launch*>(context);
  launch.kernel->run_merge(launch.params, static_cast<int32_t>(index));
}

void run_on_cpu(const detail::PlanBufferState& state, const AttentionArgs& args,
                const attention::WorkspaceLayout& layout, std::byte* workspace) {
  const detail::OpState& op = *state.op;
  Launch launch{op.kernel, {}};
  launch.params.config = &op.config;
  launch.params.args = &args;
  launch.params.plan = state.view;
  launch.params.tile = op.planner.tile;
  launch.params.group_size = op.config.num_q_heads / op.config.num_kv_heads;
  launch.params.partial_acc = reinterpret_cast<float*>(workspace + layout.partial_acc);
  launch.params.partial_max = reinterpret_cast<float*>(workspace + layout.partial_max);
  launch.params.partial_sum = reinterpret_cast<float*>(workspace + layout.partial_sum);
  launch.params.scratch = workspace + layout.scratch;
  launch.params.scratch_stride = op.scratch_stride;
  op.context.parallel_for(state.view.num_workers, worker_body, &launch);
  if (state.view.num_merges > 0) op.context.parallel_for(state.view.num_merges, merge_body, &launch);
}

void run_on_gpu(const detail::PlanBufferState& state, const AttentionArgs& args,
                const attention::WorkspaceLayout& layout, std::byte* workspace, Stream stream) {
  const detail::OpState& op = *state.op;
  attention::check_gpu_args(state, args);
  const bool may_split = attention::may_be_captured(state) || state.view.num_merges > 0;
  const kernels::cuda::LaunchShape shape{.q = op.config.q,
                                         .kv = op.config.kv,
                                         .ragged_kv = op.config.ragged_kv,
                                         .num_workers = op.planner.num_workers,
                                         .merge = may_split && !attention::merges_itself(state)};
  op.gpu()->launch(*op.gpu_kernel, attention::gpu_params(state, args, layout, workspace), shape, stream);
}

}  // namespace

void run(const AttentionPlan& plan, const AttentionArgs& args, Workspace workspace, Stream stream) {
  const detail::PlanBufferState& state = detail::checked(plan);
  const detail::OpState& op = *state.op;
  attention::check_stream(op, stream);
  attention::check_args(state, args);
  const attention::WorkspaceLayout layout = attention::carve(op, attention::partial_rows(state));
  attention::check_workspace(workspace, layout.total);

  AttentionArgs resolved = args;
  if (resolved.sm_scale == 0.0f) resolved.sm_scale = 1.0f / std::sqrt(static_cast<float>(op.config.head_dim_qk));
  auto* bytes = static_cast<std::byte*>(workspace.data);
  if (op.gpu() != nullptr) {
    run_on_gpu(state, resolved, layout, bytes, stream);
  } else {
    run_on_cpu(state, resolved, layout, bytes);
  }
}

void validate(const AttentionPlan& plan, const AttentionArgs& args) {
  const detail::PlanBufferState& state = detail::checked(plan);
  if (state.op->gpu() != nullptr) {
    core::fail(ErrorCode::kUnsupported, "validate reads tables on the host; on a GPU, check them where they are made");
  }
  attention::check_args(state, args);
  for (size_t i = 0; i < args.segments.size(); ++i) {
    const planner::SegmentLengths& lengths = state.view.segments[i];
    if (lengths.source != KvSource::kPaged) continue;
    const SegmentArgs& segment = args.segments[i];
    validate(segment.table, {lengths.kv_len, static_cast<size_t>(lengths.num_rows)}, segment.cache.page_size,
             segment.cache.num_pages);
  }
}

}  // namespace folio::inline v0
