#include "folio/backends/flash_attn/cascade_attention.hpp"

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "backends/common/batch_checks.hpp"
#include "backends/common/context_memory.hpp"
#include "core/error.hpp"
#include "folio/attention.hpp"

namespace folio::inline v0::backends {
namespace {

void check(const TensorView& output, const ConstTensorView& query, const KvCacheView& cache,
           const CascadeAttentionArgs& args) {
  if (args.profile != BackendProfile::kNative) {
    core::require(args.alibi_slopes.empty(), "Cascade attention does not support ALiBi.");
    core::require(args.sliding_window == SlidingWindow{}, "Cascade attention does not support sliding window.");
  }
  core::require(query.rank == 3 && output.rank == 3, "query and output must be [tokens, num_heads, head_size]");
  core::require(args.common_prefix_len > 0 && cache.page_size > 0 && args.common_prefix_len % cache.page_size == 0,
                "common_prefix_len is ", args.common_prefix_len, "; it must be one or more whole pages of ",
                cache.page_size, " tokens");
  core::require(!args.cu_query_lens.empty() && args.cu_query_lens.size() == args.suffix_kv_lens.size() + 1,
                "cu_query_lens has ", args.cu_query_lens.size(), " entries, suffix_kv_lens ",
                args.suffix_kv_lens.size(), "; the first needs one more than the second");
  const auto heads = static_cast<size_t>(query.shape[1]);
  core::require(args.alibi_slopes.empty() || args.alibi_slopes.size() == heads, "alibi_slopes has ",
                args.alibi_slopes.size(), " entries; the query has ", heads, " heads");
  core::require(args.s_aux.empty() || args.s_aux.size() == heads, "s_aux has ", args.s_aux.size(),
                " entries; the query has ", heads, " heads");
}

AttentionOp prepare_op(const Context& context, const TensorView& output, const ConstTensorView& query,
                       const KvCacheView& cache, const CascadeAttentionArgs& args) {
  AttentionConfig config;
  config.num_q_heads = static_cast<int32_t>(query.shape[1]);
  config.num_kv_heads = cache.num_kv_heads;
  config.head_dim_qk = cache.head_dim_qk;
  config.head_dim_v = cache.head_dim_v;
  config.q = query.dtype;
  config.kv = cache.dtype;
  config.out = output.dtype;
  config.kv_format = cache.format;
  config.page_size = cache.page_size;
  config.window_left = args.sliding_window.left;
  config.window_right = args.sliding_window.right;
  if (args.logits_soft_cap > 0.0f) config.features = config.features | Feature::kSoftCap;
  if (!args.alibi_slopes.empty()) config.features = config.features | Feature::kAlibi;
  if (!args.s_aux.empty()) config.features = config.features | Feature::kSinks;
  return prepare(context, config);
}

}  // namespace

void cascade_attention(const Context& context, const TensorView& output, const ConstTensorView& query,
                       const KvCacheView& kv_cache, const CascadeAttentionArgs& args, Stream stream) {
  check(output, query, kv_cache, args);
  const AttentionOp op = prepare_op(context, output, query, kv_cache, args);
  const auto num_reqs = static_cast<int32_t>(args.suffix_kv_lens.size());
  const std::array<int32_t, 2> group{0, num_reqs};
  const std::vector<int32_t> suffix_first_pos(args.suffix_kv_lens.size(), args.common_prefix_len);
  std::array<KvSegment, 2> segments;
  segments[0].kv_len = &args.common_prefix_len;
  segments[0].group_indptr = group.data();
  segments[0].num_groups = 1;
  segments[1].kv_len = args.suffix_kv_lens.data();
  segments[1].first_pos = suffix_first_pos.data();
  BatchView batch;
  batch.num_requests = num_reqs;
  batch.num_tokens = static_cast<int32_t>(query.shape[0]);
  batch.cu_q = args.cu_query_lens.data();
  batch.segments = segments;
  PlanBuffer buffer = make_plan_buffer(op);
  const AttentionPlan planned = plan(op, batch, buffer, stream);

  std::array<SegmentArgs, 2> parts;
  for (SegmentArgs& part : parts) {
    part.cache = kv_cache;
    part.table = to_page_table(args.block_table, num_reqs);
    part.k_scale = args.k_descale;
    part.v_scale = args.v_descale;
  }
  BlockTableView shared = args.block_table;
  shared.data += first_with_queries(args.cu_query_lens) * shared.row_stride;
  parts[0].table = to_page_table(shared, std::min(num_reqs, 1));
  parts[1].table.first_column = args.common_prefix_len / kv_cache.page_size;
  AttentionArgs layer;
  layer.q = query;
  layer.out = output;
  layer.segments = parts;
  layer.sm_scale = args.softmax_scale;
  layer.logits_soft_cap = args.logits_soft_cap;
  const std::shared_ptr<float> gpu_slopes = copy_on_gpu(context.device(), args.alibi_slopes);
  const std::shared_ptr<float> gpu_sinks = copy_on_gpu(context.device(), args.s_aux);
  layer.alibi_slopes = kernel_values(args.alibi_slopes, gpu_slopes);
  layer.sinks = kernel_values(args.s_aux, gpu_sinks);
  layer.q_scale = args.q_descale;
  ContextMemory memory(context.device());
  memory.reserve(std::max(workspace_size(planned), workspace_size(op)));
  init_workspace(op, {memory.data(), memory.bytes()}, stream);
  run(planned, layer, {memory.data(), memory.bytes()}, stream);
  // The plan, the workspace and the copies end with this call.
  synchronize(context, stream);
}

}  // namespace folio::inline v0::backends
