#include <cmath>

#include "backends/common/batch_checks.hpp"
#include "backends/common/context_memory.hpp"
#include "backends/common/dcp_step.hpp"
#include "backends/common/kv_cache_tensor.hpp"
#include "backends/common/layer_plans.hpp"
#include "backends/common/step_levels.hpp"
#include "backends/common/tensor_checks.hpp"
#include "core/error.hpp"
#include "folio/attention.hpp"
#include "folio/backends/flash_attn/impl.hpp"
#include "folio/backends/flash_attn/metadata_builder.hpp"
#include "folio/kv_cache.hpp"
#include "folio/sealed_plan.hpp"

namespace folio::inline v0::backends {
namespace {

void check_output_quantization(const Context& context, const OutputQuantization& wanted, BackendProfile profile,
                               const FlashAttentionMetadata* metadata) {
  if (profile == BackendProfile::kNative && metadata == nullptr) return;
  const DType dtype = metadata != nullptr ? metadata->output_data_type : DType::kUnset;
  const bool fp4 = dtype == DType::kFloat4E2M1x2;
  const bool offered = profile == BackendProfile::kNative && (fp4 || is_fp8(dtype));
  if (!offered && wanted.wanted()) {
    core::fail(ErrorCode::kUnsupported, "fused output quantization is not yet supported for FlashAttentionImpl",
               profile == BackendProfile::kNative
                   ? "; it is with metadata of builders whose output_dtype is fp8 or fp4_e2m1x2"
                   : "");
  }
  if (!offered) return;
  core::require(wanted.scale != nullptr, "the output is ", dtype, "; output_quantization.scale must be given");
  if (wanted.scale_where == Where::kHost) {
    const float scale = *wanted.scale;
    core::require(std::isfinite(scale) && scale > 0.0f, "output_scale is ", scale, "; it must be finite and positive");
  } else {
    core::require(on_gpu(context), "output_quantization.scale_where is kDevice; the context is a CPU's");
  }
  const bool has_block_scale = wanted.block_scale.data != nullptr;
  core::require(fp4 || !has_block_scale, "output_block_scale should not be provided for fp8 output");
  core::require(!fp4 || has_block_scale, "output_block_scale is required for nvfp4 output");
}

/// The output as the kernel takes it. Throws unless it is of the metadata's dtype; NVFP4's may be an engine's bytes.
TensorView typed_output(const TensorView& output, DType dtype) {
  TensorView typed = output;
  if (dtype == DType::kFloat4E2M1x2 && output.dtype == DType::kUnset) typed.dtype = dtype;
  core::require(typed.dtype == dtype, "the output is ", output.dtype, "; the metadata was built for ", dtype);
  return typed;
}

/// Throws for a stale plan and for another schedule than its own.
void check_schedule(const char* name, const std::optional<AttentionPlan>& plan, std::span<const int32_t> schedule,
                    Stream stream) {
  if (plan && is_sealed(*plan)) {
    check_sealed(*plan, schedule, stream);
    return;
  }
  if (plan) static_cast<void>(workspace_size(*plan));
  core::require(schedule.empty(), name, " is given for a step planned without one");
}

/// The keys and values of a step as the plan's segments take them.
struct StepSegments {
  LevelArgs all;
  size_t count = 1;
};

StepSegments paged_segments(const FlashAttentionMetadata& metadata, const KvCacheView& cache,
                            const AttentionLayerScales& layer) {
  StepSegments segments;
  SegmentArgs segment;
  segment.cache = cache;
  segment.table = to_page_table(metadata.block_table, metadata.num_reqs);
  segment.k_scale = layer.k;
  segment.v_scale = layer.v;
  segments.all[0] = segment;
  if (metadata.cascade.num_segments > 0) {
    segments.count = segment_args(metadata.cascade, segment, segments.all).size();
    return segments;
  }
  if (!metadata.use_cascade) return segments;
  segments.count = 2;
  BlockTableView shared = metadata.block_table;
  shared.data += metadata.prefix_request * shared.row_stride;
  segments.all[0].table = to_page_table(shared, 1);
  segments.all[1] = segment;
  segments.all[1].table.first_column = metadata.common_prefix_len / metadata.page_size;
  return segments;
}

}  // namespace

KvCacheView FlashAttentionImpl::cache_view(const TensorView& kv_cache) const {
  // Raises for e5m2 in vLLM's profile, whose capabilities take it.
  const DType dtype = is_fp8(kv_cache_dtype_)
                          ? FlashAttentionBackend::get_fp8_dtype_for_flashattn(kv_cache_dtype_name_, profile_)
                          : kv_cache_dtype_;
  return FlashAttentionBackend::kv_cache_view(kv_cache, dtype);
}

void FlashAttentionImpl::check_scales(const AttentionLayerScales& layer) const {
  if (is_fp8(kv_cache_dtype_)) return;
  require_no_scale("k", layer.k, kv_cache_dtype_);
  require_no_scale("v", layer.v, kv_cache_dtype_);
}

void FlashAttentionImpl::do_kv_cache_update(const AttentionLayerScales& layer, const ConstTensorView& key,
                                            const ConstTensorView& value, const TensorView& kv_cache,
                                            std::span<const int64_t> slot_mapping, Stream stream) const {
  if (is_encoder() || kv_sharing_target_layer_name_) return;
  if (key.data == nullptr && value.data == nullptr) return;
  check_scales(layer);
  const auto num_slots = static_cast<int64_t>(slot_mapping.size());
  require_shape("key", key, num_slots, num_kv_heads_, head_size_);
  require_shape("value", value, num_slots, num_kv_heads_, head_size_);
  CacheWriteArgs write;
  write.k = key;
  write.v = value;
  write.slot_mapping = slot_mapping.data();
  write.num_slots = num_slots;
  write.cache = FlashAttentionBackend::kv_cache_view(kv_cache, kv_cache_dtype_);
  write.k_scale = layer.k;
  write.v_scale = layer.v;
  write_kv_cache(context_, write, stream);
}

TensorView FlashAttentionImpl::forward(const AttentionLayerScales& layer, const ConstTensorView& query,
                                       const ConstTensorView& key, const ConstTensorView& value,
                                       const TensorView& kv_cache, const FlashAttentionMetadata* metadata,
                                       const TensorView& output, const OutputQuantization& output_quantization,
                                       Stream stream) const {
  const bool is_empty = output.rank == 3 && output.shape[0] == 0;  // an empty allocation may have no address
  core::require(output.data != nullptr || is_empty, "Output tensor must be provided.");
  core::require(version_.has_value(), "FlashAttention version not detected.");
  check_output_quantization(context_, output_quantization, profile_, metadata);
  if (metadata == nullptr) {
    fill_with_zeros(context_, output, stream);
    return output;
  }
  core::require(metadata->attn_type == attn_type_, "the layer is for ", to_string(attn_type_),
                " attention; the metadata was built for ", to_string(metadata->attn_type));
  core::require(query.dtype == metadata->q_data_type, "Query dtype mismatch: expected ", metadata->q_data_type,
                ", got ", query.dtype);
  const int64_t num_tokens = metadata->num_actual_tokens;
  require_shape("query", query, num_tokens, num_heads_ * dcp_query_ranks_, head_size_);
  const bool fp4 = metadata->output_data_type == DType::kFloat4E2M1x2;
  const int32_t out_heads = num_heads_ * dcp_out_ranks(metadata->dcp_plans);
  require_shape("output", output, num_tokens, out_heads, fp4 ? head_size_ / 2 : head_size_);
  check_scales(layer);
  AttentionArgs args;
  args.out = first_tokens(typed_output(output, metadata->output_data_type), num_tokens);
  if (fp4) {
    args.out_block_scale =
        nvfp4_block_scale("output_block_scale", output_quantization.block_scale, 0, num_tokens, num_heads_, head_size_);
  }

  StepSegments segments;
  if (is_encoder()) {
    if (is_fp8(kv_cache_dtype_)) {
      core::fail(ErrorCode::kUnsupported, "quantization is not supported for encoder attention");
    }
    require_shape("key", key, num_tokens, num_kv_heads_, head_size_);
    require_shape("value", value, num_tokens, num_kv_heads_, head_size_);
    segments.all[0].ragged = {first_tokens(key, num_tokens), first_tokens(value, num_tokens),
                              metadata->query_start_loc.data()};
  } else {
    require_configured_layout(kv_cache, metadata->kv_cache_layout);
    segments = paged_segments(*metadata, cache_view(kv_cache), layer);
  }
  const bool divided = metadata->dcp_plans.front().has_value();
  const DcpWindowPlan* dcp_plan = divided ? &dcp_plan_for_window(metadata->dcp_plans, window_.left) : nullptr;
  const AttentionPlan* plan = divided ? nullptr : &plan_for_window(metadata->plans, window_.left);
  // Throws for a stale plan or a damaged schedule while the cache is still untouched.
  if (divided) {
    check_schedule("scheduler_metadata", dcp_plan->plan.cached, metadata->scheduler_metadata, stream);
    check_schedule("new_tokens_scheduler_metadata", dcp_plan->plan.fresh, metadata->new_tokens_scheduler_metadata,
                   stream);
  } else {
    check_schedule("scheduler_metadata", *plan, metadata->scheduler_metadata, stream);
  }
  if (update_in_forward_) do_kv_cache_update(layer, key, value, kv_cache, metadata->slot_mapping, stream);

  args.q = first_tokens(query, num_tokens);
  args.segments = std::span(segments.all).first(segments.count);
  args.sm_scale = scale_;
  args.logits_soft_cap = logits_soft_cap_;
  args.alibi_slopes = kernel_values(alibi_slopes_, gpu_alibi_slopes_);
  args.sinks = kernel_values(sinks_, gpu_sinks_);
  // A checkpoint's q scale describes quantised queries; 16-bit ones are what they are.
  if (is_fp8(query.dtype)) args.q_scale = layer.q;
  if (output_quantization.scale != nullptr && output_quantization.scale_where == Where::kHost) {
    args.out_scale.value = *output_quantization.scale;
  } else {
    args.out_scale.data = output_quantization.scale;
  }
  if (divided) {
    run_dcp(*dcp_plan, args, key, value, metadata->workspace, stream);
  } else {
    run(*plan, args, metadata->workspace, stream);
  }
  return output;
}

}  // namespace folio::inline v0::backends
