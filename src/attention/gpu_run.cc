#include <algorithm>
#include <array>
#include <initializer_list>

#include "attention/run_args.hpp"
#include "core/error.hpp"

namespace folio::inline v0::attention {
namespace {

using core::require;
namespace cuda = kernels::cuda;

/// A misaligned address is an error that takes the whole CUDA context with it; so all are looked at.
void check_aligned(const char* name, const void* data, int32_t element) {
  require(reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(element) == 0, name,
          " is not aligned to its elements of ", element, " bytes");
}

void check_segment_aligned(const SegmentArgs& segment, DType ragged_kv) {
  check_aligned("ragged.k.data", segment.ragged.k.data, size_of(ragged_kv));
  check_aligned("ragged.v.data", segment.ragged.v.data, size_of(ragged_kv));
  check_aligned("ragged.indptr", segment.ragged.indptr, sizeof(int32_t));
  check_aligned("table.indices", segment.table.indices, sizeof(int32_t));
  check_aligned("table.indptr", segment.table.indptr, sizeof(int32_t));
  check_aligned("k_scale.data", segment.k_scale.data, sizeof(float));
  check_aligned("v_scale.data", segment.v_scale.data, sizeof(float));
}

/// Where a segment's keys and values lie.
cuda::SegmentParams located(const SegmentArgs& args, bool paged) {
  cuda::SegmentParams params;
  params.paged = paged;
  if (paged) {
    params.k = args.cache.k;
    params.v = args.cache.v;
    params.ds_mla = args.cache.format == KvFormat::kFp8DsMla;
    params.k_strides = args.cache.k_strides;
    params.v_strides = args.cache.v_strides;
    params.page_size = args.cache.page_size;
    params.num_pages = args.cache.num_pages;
    params.indices = args.table.indices;
    params.indptr = args.table.kind == PageTableKind::kCsr ? args.table.indptr : nullptr;
    params.num_rows = args.table.num_rows;
    params.num_indices = static_cast<int32_t>(std::min<int64_t>(args.table.num_indices, INT32_MAX));
    params.row_stride = args.table.row_stride;
    params.first_column = args.table.first_column;
    return params;
  }
  params.k = args.ragged.k.data;
  params.v = args.ragged.v.data;
  params.k_strides = {.page = 0, .token = args.ragged.k.strides[0], .head = args.ragged.k.strides[1]};
  params.v_strides = {.page = 0, .token = args.ragged.v.strides[0], .head = args.ragged.v.strides[1]};
  params.indptr = args.ragged.indptr;
  return params;
}

/// Whether an address and, in elements of `element` bytes, all strides are multiples of `bytes`.
bool is_aligned(int64_t bytes, const void* data, int64_t element, std::initializer_list<int64_t> strides) {
  if (reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(bytes) != 0) return false;
  return std::all_of(strides.begin(), strides.end(), [&](int64_t s) { return s % (bytes / element) == 0; });
}

/// Rows that all begin at multiples of eight elements' size.
bool is_wide(const void* data, int64_t element, const KvStrides& strides) {
  return is_aligned(8 * element, data, element, {strides.page, strides.token, strides.head});
}

cuda::SegmentParams segment_params(const SegmentArgs& args, bool paged, DType dtype) {
  cuda::SegmentParams params = located(args, paged);
  params.dtype = dtype;
  params.k_scale = args.k_scale;
  params.v_scale = args.v_scale;
  params.wide =
      is_wide(params.k, size_of(dtype), params.k_strides) && is_wide(params.v, size_of(dtype), params.v_strides);
  return params;
}

/// Whether a pass's kernel combines its own splits, in this plan and, where a run may be captured, in every later one:
/// the splits of shared segments are combined by a second kernel.
bool combines_in_kernel(const detail::PlanBufferState& plan, size_t pass) {
  if (!plan.op->passes[pass].gpu_kernel->combines_in_kernel) return false;
  if (may_be_captured(plan)) return plan.op->options.bounds->max_shared_levels == 0;
  const scheduler::SegmentLengths* const segments = plan.view().segments;
  return std::none_of(segments, segments + plan.view().num_segments,
                      [](const scheduler::SegmentLengths& segment) { return segment.shared; });
}

/// One layer's arguments as kernels on a GPU take them, but for what set_pass adds.
cuda::AttentionParams gpu_params(const detail::PlanBufferState& plan, const AttentionArgs& args,
                                 const WorkspaceLayout& layout, std::byte* workspace) {
  const AttentionConfig& config = plan.op->config;
  cuda::AttentionParams params;
  for (size_t i = 0; i < args.segments.size(); ++i) {
    const bool paged = plan.view().segments[i].source == KvSource::kPaged;
    params.segments[i] = segment_params(args.segments[i], paged, paged ? config.kv : config.ragged_kv);
  }
  params.num_q_heads = config.num_q_heads;
  params.num_kv_heads = config.num_kv_heads;
  params.head_dim_qk = config.head_dim_qk;
  params.head_dim_v = config.head_dim_v;
  params.mask = scheduler::mask_rules(config);
  params.out_dtype = config.out;
  params.q = args.q.data;
  params.q_token_stride = args.q.strides[0];
  params.q_head_stride = args.q.strides[1];
  params.q_dtype = config.q;
  params.q_scale = args.q_scale;
  params.q_wide =
      is_aligned(8 * size_of(config.q), args.q.data, size_of(config.q), {args.q.strides[0], args.q.strides[1]});
  params.out = args.out.data;
  params.out_token_stride = args.out.strides[0];
  params.out_head_stride = args.out.strides[1];
  params.out_scale = args.out_scale;
  params.out_pairs = is_aligned(2 * size_of(config.out), args.out.data, size_of(config.out),
                                {args.out.strides[0], args.out.strides[1]});
  params.out_block_scales = static_cast<uint8_t*>(args.out_block_scale.data);
  params.out_first_row = args.out_block_scale.first_row;
  params.rope = {config.features.has(Feature::kRopeLlama), args.rope.theta, args.rope.scale};
  params.lse = args.lse;
  params.sm_scale = args.sm_scale;
  params.soft_cap = args.logits_soft_cap;
  params.alibi_slopes = args.alibi_slopes;
  params.sinks = args.sinks;
  params.custom_mask = args.custom_mask;
  params.determinism = config.determinism;
  params.partial_acc = reinterpret_cast<float*>(workspace + layout.partial_acc);
  params.partial_row_max = reinterpret_cast<float*>(workspace + layout.partial_row_max);
  params.partial_row_sum = reinterpret_cast<float*>(workspace + layout.partial_row_sum);
  return params;
}

/// Adds the pass that a run launches beside `pass`, if both kernels can share the GPU. Passes are at most two.
void set_other_pass(const detail::PlanBufferState& plan, size_t pass, cuda::AttentionParams& params) {
  static_assert(cuda::kMaxPasses == 2);
  if (plan.passes.size() < 2 || !is_launched(plan, 1 - pass)) return;
  const cuda::AttentionKernel& prefill = *plan.op->passes[0].gpu_kernel;
  const cuda::AttentionKernel& decode = *plan.op->passes[1].gpu_kernel;
  if (prefill.pass_cost == nullptr || decode.pass_cost == nullptr) return;
  params.other_plan = plan.passes[1 - pass].gpu->image();
  params.prefill_cost = prefill.pass_cost(plan.op->config);
  params.decode_cost = decode.pass_cost(plan.op->config);
}

/// Adds what a pass's kernel takes of that pass's plan. `partials`: the pass's partial rows begin there.
cuda::AttentionParams params_of_pass(const detail::PlanBufferState& plan, size_t pass, cuda::AttentionParams params,
                                     int64_t partials) {
  const GpuPlanMemory& memory = *plan.passes[pass].gpu;
  params.plan = memory.image();
  set_other_pass(plan, pass, params);
  params.tile_counters = memory.tile_counters();
  params.combine_counters = combines_in_kernel(plan, pass) ? memory.combine_counters() : nullptr;
  params.partial_acc += partials * plan.op->config.head_dim_v;
  params.partial_row_max += partials;
  params.partial_row_sum += partials;
  params.other_partials = pass == 0 ? partial_rows(plan, 0) : 0;
  return params;
}

cuda::LaunchShape shape_of_pass(const detail::PlanBufferState& plan, size_t pass) {
  const detail::OpState& op = *plan.op;
  return {.q = op.config.q,
          .kv = op.config.kv,
          .ragged_kv = op.config.ragged_kv,
          .ds_mla = op.config.kv_format == KvFormat::kFp8DsMla,
          .num_workers = op.passes[pass].scheduler.num_workers,
          .max_rows = plan.passes[pass].most_tile_rows,
          .fp8_mma = op.passes[pass].fp8_mma};
}

/// Whether a launch may leave splits that a second kernel combines.
bool may_combine(const detail::PlanBufferState& plan, size_t pass) {
  if (combines_in_kernel(plan, pass)) return false;
  return may_be_captured(plan) || plan.passes[pass].view.num_combine_tiles > 0;
}

}  // namespace

void check_gpu_args(const detail::PlanBufferState& plan, const AttentionArgs& args) {
  const AttentionConfig& config = plan.op->config;
  if (args.segments.size() > cuda::kMaxSegments) {
    core::fail(ErrorCode::kUnsupported, "the batch has ", args.segments.size(), " segments; kernels on a GPU take ",
               cuda::kMaxSegments, " or fewer");
  }
  check_aligned("q.data", args.q.data, size_of(config.q));
  check_aligned("out.data", args.out.data, size_of(config.out));
  check_aligned("lse.data", args.lse.data, sizeof(float));
  check_aligned("alibi_slopes", args.alibi_slopes, sizeof(float));
  check_aligned("sinks", args.sinks, sizeof(float));
  for (const SegmentArgs& segment : args.segments) check_segment_aligned(segment, config.ragged_kv);
}

void run_on_gpu(const detail::PlanBufferState& plan, const AttentionArgs& args, const WorkspaceLayout& layout,
                std::byte* workspace, Stream stream) {
  const detail::OpState& op = *plan.op;
  const cuda::AttentionParams params = gpu_params(plan, args, layout, workspace);
  std::array<cuda::AttentionParams, cuda::kMaxPasses> of_pass;
  int64_t partials = 0;  // the passes' lie one after the other
  for (size_t pass = 0; pass < plan.passes.size(); ++pass) {
    of_pass[pass] = params_of_pass(plan, pass, params, partials);
    partials += partial_rows(plan, pass);
  }
  // The passes' kernels follow one another: the second begins beside the first by programmatic dependent launch. The
  // combine comes behind both.
  for (size_t pass = 0; pass < plan.passes.size(); ++pass) {
    if (!is_launched(plan, pass)) continue;
    op.gpu()->launch(*op.passes[pass].gpu_kernel, of_pass[pass], shape_of_pass(plan, pass), stream);
  }
  for (size_t pass = 0; pass < plan.passes.size(); ++pass) {
    if (!is_launched(plan, pass) || !may_combine(plan, pass)) continue;
    // One combine takes the splits of both passes. Its CTAs wait beside the last pass's kernel.
    const bool both = of_pass[pass].other_plan != nullptr;
    const size_t last = both ? plan.passes.size() - 1 : pass;
    op.gpu()->combine(*op.passes[last].gpu_kernel, of_pass[pass], shape_of_pass(plan, last), stream);
    if (both) break;
  }
}

}  // namespace folio::inline v0::attention
