#include <cmath>
#include <optional>
#include <vector>

#include "attention/fork.hpp"
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
  launch.kernel->run_combine(launch.params, static_cast<int32_t>(index));
}

void run_on_cpu(const detail::PlanBufferState& state, const AttentionArgs& args,
                const attention::WorkspaceLayout& layout, std::byte* workspace) {
  const detail::OpState& op = *state.op;
  Launch launch{op.kernel, {}};
  launch.params.config = &op.config;
  launch.params.args = &args;
  launch.params.plan = state.view;
  launch.params.tile = op.scheduler.tile;
  launch.params.group_size = op.config.num_q_heads / op.config.num_kv_heads;
  launch.params.partial_acc = reinterpret_cast<float*>(workspace + layout.partial_acc);
  launch.params.partial_row_max = reinterpret_cast<float*>(workspace + layout.partial_row_max);
  launch.params.partial_row_sum = reinterpret_cast<float*>(workspace + layout.partial_row_sum);
  launch.params.scratch = workspace + layout.scratch;
  launch.params.scratch_stride = op.scratch_stride;
  op.context.parallel_for(state.view.num_workers, worker_body, &launch);
  if (state.view.num_combine_tiles > 0) op.context.parallel_for(state.view.num_combine_tiles, merge_body, &launch);
}

void run_on_gpu(const detail::PlanBufferState& state, const AttentionArgs& args,
                const attention::WorkspaceLayout& layout, std::byte* workspace, Stream stream) {
  const detail::OpState& op = *state.op;
  attention::check_gpu_args(state, args);
  const bool captured = attention::may_be_captured(state);
  const auto launch = [&](const kernels::cuda::AttentionKernel& kernel, const scheduler::SchedulerConfig& scheduler,
                          const scheduler::PlanView& view, int32_t max_rows,
                          const kernels::cuda::AttentionParams& params, Stream on) {
    const kernels::cuda::LaunchShape shape{
        .q = op.config.q,
        .kv = op.config.kv,
        .ragged_kv = op.config.ragged_kv,
        .num_workers = scheduler.num_workers,
        .merge = (captured || view.num_combine_tiles > 0) && !params.combine_counters,
        .max_rows = max_rows,
        .fp8_mma = op.fp8_mma && &kernel == op.gpu_launched};
    op.gpu()->launch(kernel, params, shape, on);
  };
  kernels::cuda::AttentionParams params = attention::gpu_params(state, args, layout, workspace);
  detail::FewRowsPlan* const few = state.few_rows.get();
  const bool few_run = few != nullptr && (captured || few->view.num_work_tiles > 0);
  const bool many_run = !few_run || captured || state.view.num_work_tiles > 0;
  std::optional<attention::Fork> fork;
  if (few_run && many_run) fork.emplace(*few->stream, stream);
  if (many_run) launch(*op.gpu_launched, op.scheduler, state.view, state.most_item_rows, params, stream);
  if (!few_run) return;
  const int64_t first = attention::first_few_rows(state);
  params.plan = few->gpu->image();
  params.tile_counters = few->gpu->tile_counters();
  params.combine_counters = nullptr;  // rows of few tokens are claimed
  params.partial_acc += first * op.config.head_dim_v;
  params.partial_row_max += first;
  params.partial_row_sum += first;
  launch(*op.gpu_kernel->few_rows, *op.few_rows, few->view, few->most_item_rows, params,
         fork ? fork->stream() : stream);
  if (fork) fork->join();
}

/// A GPU's table, in host memory.
struct HostTable {
  std::vector<int32_t> indices;
  std::vector<int32_t> indptr;
  PageTableView view;

  const PageTableView& of(const attention::GpuBackend& gpu, const PageTableView& table) {
    view = table;
    indices.resize(static_cast<size_t>(table.num_indices));
    if (!indices.empty()) gpu.download(indices.data(), table.indices, indices.size() * sizeof(int32_t), {});
    view.indices = indices.data();
    if (table.kind == PageTableKind::kCsr) {
      indptr.resize(static_cast<size_t>(table.num_rows) + 1);
      gpu.download(indptr.data(), table.indptr, indptr.size() * sizeof(int32_t), {});
      view.indptr = indptr.data();
    }
    return view;
  }
};

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
  const attention::GpuBackend* const gpu = state.op->gpu();
  if (state.planned_on_device) {
    core::fail(ErrorCode::kUnsupported, "the plan was made on the device, where its lengths are; plan host lengths to ",
               "validate, or check tables by `validate` of folio/table_ops.hpp");
  }
  attention::check_args(state, args);
  for (size_t i = 0; i < args.segments.size(); ++i) {
    const scheduler::SegmentLengths& lengths = state.view.segments[i];
    if (lengths.source != KvSource::kPaged) continue;
    const SegmentArgs& segment = args.segments[i];
    HostTable copy;
    const PageTableView& table = gpu != nullptr ? copy.of(*gpu, segment.table) : segment.table;
    validate(table, {lengths.kv_len, static_cast<size_t>(lengths.num_rows)}, segment.cache.page_size,
             segment.cache.num_pages);
  }
}

}  // namespace folio::inline v0
