#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "attention/aliasing.hpp"
#include "attention/profiler_range.hpp"
#include "attention/run_args.hpp"
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

void combine_body(void* context, int64_t index) noexcept {
  const auto& launch = *static_cast<const Launch*>(context);
  launch.kernel->run_combine(launch.params, static_cast<int32_t>(index));
}

void run_on_cpu(const detail::PlanBufferState& state, const AttentionArgs& args,
                const attention::WorkspaceLayout& layout, std::byte* workspace) {
  const detail::OpState& op = *state.op;
  const detail::Pass& pass = op.passes.front();
  const scheduler::PlanView& plan = state.view();
  std::atomic<int32_t> next_work_tile{0};
  Launch launch{pass.cpu_kernel, {}};
  launch.params.config = &op.config;
  launch.params.args = &args;
  launch.params.plan = plan;
  launch.params.tile = pass.scheduler.tile;
  launch.params.group_size = op.config.num_q_heads / op.config.num_kv_heads;
  launch.params.partial_acc = reinterpret_cast<float*>(workspace + layout.partial_acc);
  launch.params.partial_row_max = reinterpret_cast<float*>(workspace + layout.partial_row_max);
  launch.params.partial_row_sum = reinterpret_cast<float*>(workspace + layout.partial_row_sum);
  launch.params.scratch = workspace + layout.scratch;
  launch.params.scratch_stride = op.scratch_stride;
  launch.params.next_work_tile = &next_work_tile;
  op.context.parallel_for(std::min(plan.num_workers, plan.num_dynamic_tiles), worker_body, &launch);
  if (plan.num_combine_tiles > 0) op.context.parallel_for(plan.num_combine_tiles, combine_body, &launch);
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
  const attention::ProfilerRange range("run", state.num_tokens);
  attention::check_stream(op, stream);
  attention::check_args(state, args);
  const attention::WorkspaceLayout layout = attention::carve(op, attention::partial_rows(state));
  attention::check_workspace(workspace, layout.total);
  attention::check_outputs_apart(state, args, {workspace.data, layout.total});

  AttentionArgs resolved = args;
  if (resolved.sm_scale == 0.0f) resolved.sm_scale = 1.0f / std::sqrt(static_cast<float>(op.config.head_dim_qk));
  auto* bytes = static_cast<std::byte*>(workspace.data);
  if (op.gpu() != nullptr) attention::check_gpu_args(state, args);
  if (op.context.state().validate_tables) attention::check_tables(state, args, stream);
  if (op.gpu() != nullptr) {
    attention::run_on_gpu(state, resolved, layout, bytes, stream);
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
  attention::check_outputs_apart(state, args, {});
  for (size_t i = 0; i < args.segments.size(); ++i) {
    const scheduler::SegmentLengths& lengths = state.view().segments[i];
    if (lengths.source != KvSource::kPaged) continue;
    const SegmentArgs& segment = args.segments[i];
    HostTable copy;
    const PageTableView& table = gpu != nullptr ? copy.of(*gpu, segment.table) : segment.table;
    validate(table, {lengths.kv_len, static_cast<size_t>(lengths.num_rows)}, segment.cache.page_size,
             segment.cache.num_pages);
  }
}

}  // namespace folio::inline v0
