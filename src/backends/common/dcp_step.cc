#include "backends/common/dcp_step.hpp"

#include <algorithm>

#include "backends/common/batch_checks.hpp"
#include "core/error.hpp"
#include "folio/page_table.hpp"

namespace folio::inline v0::backends {

void check_dcp_ranks(const Context& context, const ParallelConfig& parallel) {
  const int32_t size = parallel.decode_context_parallel_size;
  core::require(size >= 1, "decode_context_parallel_size is ", size, "; it must be 1 or more");
  const distributed::DcpCombine combine = distributed::dcp_combine_from_name(parallel.dcp_comm_backend, size);
  core::require(!parallel.dcp_all_heads_out || parallel.dcp_replicated_queries,
                "dcp_all_heads_out is set with dcp_replicated_queries false; new tokens need the queries of all heads");
  core::require(!parallel.dcp_all_heads_out || combine == distributed::DcpCombine::kAllGatherReduceScatter,
                "dcp_all_heads_out is set with a dcp_comm_backend of ", parallel.dcp_comm_backend,
                ", which leaves every rank its own heads; it needs ag_rs");
  if (size == 1) {
    core::require(parallel.dcp_group == nullptr || parallel.dcp_group->size() == 1,
                  "dcp_group is given, but decode_context_parallel_size is 1");
    return;
  }
  core::require(parallel.dcp_group != nullptr, "decode_context_parallel_size is ", size, "; dcp_group must be given");
  core::require(
      parallel.dcp_group->size() == size && parallel.dcp_group->rank() == parallel.decode_context_parallel_rank,
      "dcp_group is rank ", parallel.dcp_group->rank(), " of ", parallel.dcp_group->size(),
      "; the configuration's is rank ", parallel.decode_context_parallel_rank, " of ", size);
  core::require(parallel.dcp_group->device() == context.device(),
                "dcp_group's buffers lie in another memory than the context's: a group of threads over a GPU's has ",
                "ThreadGroupOptions::context");
  core::require(parallel.cp_kv_cache_interleave_size >= 1, "cp_kv_cache_interleave_size is ",
                parallel.cp_kv_cache_interleave_size, "; it must be 1 or more");
}

void check_dcp_config(const Context& context, const EngineConfig& config, const AttentionSpec& spec) {
  const ParallelConfig& parallel = config.parallel;
  check_dcp_ranks(context, parallel);
  if (!uses_dcp(config)) return;
  const int32_t interleave = parallel.cp_kv_cache_interleave_size;
  core::require(spec.page_size % interleave == 0, "cp_kv_cache_interleave_size is ", interleave,
                "; it must divide the page size, ", spec.page_size);
  if (config.compilation.decode_graph_mode == DecodeGraphMode::kNone) return;
  if (context.device().type == DeviceType::kCpu || !parallel.dcp_group->enqueues()) {
    core::fail(ErrorCode::kUnsupported, "decode_graph_mode is kFull, and dcp_group's operations wait on the host; ",
               "graphs need a group over a GPU whose ProcessGroup::enqueues is true");
  }
}

void check_dcp_lengths(const EngineConfig& config, const CommonAttentionMetadata& batch) {
  const std::span<const int32_t> local = batch.dcp_local_seq_lens;
  if (local.empty()) return;
  const ParallelConfig& parallel = config.parallel;
  core::require(batch.seq_lens.size() >= static_cast<size_t>(batch.num_reqs), "dcp_local_seq_lens is given with ",
                batch.seq_lens.size(), " seq_lens; num_reqs is ", batch.num_reqs);
  if (!uses_dcp(config)) {
    core::fail(ErrorCode::kUnsupported, "dcp_local_seq_lens is given, but decode_context_parallel_size is 1");
  }
  core::require(local.size() >= static_cast<size_t>(batch.num_reqs), "dcp_local_seq_lens has ", local.size(),
                " entries; num_reqs is ", batch.num_reqs);
  for (int32_t i = 0; i < batch.num_reqs; ++i) {
    const auto at = static_cast<size_t>(i);
    const int32_t expected = shard_len(batch.seq_lens[at], parallel.decode_context_parallel_size,
                                       parallel.decode_context_parallel_rank, parallel.cp_kv_cache_interleave_size);
    core::require(local[at] == expected, "request ", i, " has a dcp_local_seq_lens of ", local[at], "; of ",
                  batch.seq_lens[at], " tokens this rank has ", expected);
  }
}

distributed::DcpConfig dcp_config(const ParallelConfig& parallel, const PrepareOptions& options) {
  distributed::DcpConfig dcp;
  dcp.interleave = parallel.cp_kv_cache_interleave_size;
  dcp.combine = distributed::dcp_combine_from_name(parallel.dcp_comm_backend, parallel.decode_context_parallel_size);
  dcp.replicated_queries = parallel.dcp_replicated_queries;
  dcp.all_heads_out = parallel.dcp_all_heads_out;
  dcp.transport = parallel.dcp_transport;
  dcp.partial_dtype = parallel.dcp_partial_dtype;
  dcp.force_kernel = options.force_kernel;
  dcp.max_kv_splits = options.max_kv_splits;
  dcp.bounds = options.bounds;
  if (dcp.bounds) dcp.bounds->max_shared_levels = 0;  // what requests share is not divided over ranks as well
  return dcp;
}

DcpStepPlans::DcpStepPlans(const Context& context, const EngineConfig& config, std::span<const WindowOp> windows,
                           DcpKeys keys, const PrepareOptions& options)
    : workspace_(context.device()), keys_(keys) {
  if (keys == DcpKeys::kNewBesideCache && config.determinism == Determinism::kScheduleInvariant) {
    keys_ = DcpKeys::kCached;
  }
  const ParallelConfig& parallel = config.parallel;
  distributed::DcpConfig dcp = dcp_config(parallel, options);
  size_t workspace_bytes = 0;
  for (const WindowOp& window : windows) {
    dcp.attention = window.op.config();
    windows_.push_back({window.window_left, distributed::DcpAttention(context, *parallel.dcp_group, dcp)});
    if (dcp.bounds) workspace_bytes = std::max(workspace_bytes, windows_.back().attention.workspace_size());
  }
  workspace_.reserve(workspace_bytes);
}

DcpWindowPlans DcpStepPlans::plan(const CommonAttentionMetadata& batch, int32_t num_decodes, Stream stream) {
  distributed::DcpBatch step;
  step.where = batch.where;
  if (batch.where == Where::kDevice) step.num_tokens = batch.num_actual_tokens;
  step.num_requests = batch.num_reqs;
  step.cu_q = batch.query_start_loc.data();
  step.seq_lens = batch.seq_lens.data();
  step.num_cached = keys_ == DcpKeys::kNewBesideCache ? num_decodes : batch.num_reqs;
  step.cross_attention = keys_ == DcpKeys::kEncoders;
  DcpWindowPlans plans;
  size_t workspace_bytes = 0;
  for (size_t i = 0; i < windows_.size(); ++i) {
    Window& window = windows_[i];
    // Not causal, a decoder's layer without window sees all keys; one with a window ends at its query.
    step.all_visible = !step.cross_attention && !batch.causal && window.window_left < 0;
    plans[i] = DcpWindowPlan{window.window_left, &window.attention, window.attention.plan(step, stream)};
    workspace_bytes = std::max(workspace_bytes, window.attention.workspace_size(plans[i]->plan));
  }
  workspace_.reserve(workspace_bytes);
  return plans;
}

const DcpWindowPlan& dcp_plan_for_window(const DcpWindowPlans& plans, int32_t window_left) {
  for (const std::optional<DcpWindowPlan>& planned : plans) {
    if (!planned || planned->window_left != window_left) continue;
    static_cast<void>(planned->attention->workspace_size(planned->plan));  // throws for a stale plan
    return *planned;
  }
  core::fail(ErrorCode::kInvalidArgument, "the layer's window_left is ", window_left,
             "; the metadata was not planned for it");
}

int32_t dcp_out_ranks(const DcpWindowPlans& plans) {
  if (!plans.front()) return 1;
  const distributed::DcpAttention& attention = *plans.front()->attention;
  return attention.config().all_heads_out ? attention.group().size() : 1;
}

void run_dcp(const DcpWindowPlan& plan, const AttentionArgs& args, const ConstTensorView& key,
             const ConstTensorView& value, Workspace workspace, Stream stream) {
  const SegmentArgs& shard = args.segments.front();
  distributed::DcpArgs dcp;
  dcp.q = args.q;
  if (plan.plan.reads_new_tokens) {
    dcp.k = key;
    dcp.v = value;
  }
  dcp.cache = shard.cache;
  dcp.table = shard.table;
  dcp.k_scale = shard.k_scale;
  dcp.v_scale = shard.v_scale;
  dcp.q_scale = args.q_scale;
  dcp.out = args.out;
  dcp.out_scale = args.out_scale;
  dcp.lse = args.lse;
  dcp.sm_scale = args.sm_scale;
  dcp.logits_soft_cap = args.logits_soft_cap;
  dcp.alibi_slopes = args.alibi_slopes;
  const distributed::DcpConfig& config = plan.attention->config();
  dcp.sinks = args.sinks;
  if (dcp.sinks != nullptr && config.replicated_queries &&
      !config.all_heads_out) {  // a layer's are those of its queries
    dcp.sinks += plan.attention->group().rank() * config.attention.num_q_heads;
  }
  plan.attention->run(plan.plan, dcp, workspace, stream);
}

}  // namespace folio::inline v0::backends
