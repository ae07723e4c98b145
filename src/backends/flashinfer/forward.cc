#include "backends/common/dcp_step.hpp"
#include "backends/common/layer_plans.hpp"
#include "backends/common/tensor_checks.hpp"
#include "core/error.hpp"
#include "folio/attention.hpp"
#include "folio/backends/flashinfer/backend.hpp"
#include "folio/backends/flashinfer/impl.hpp"
#include "folio/backends/flashinfer/metadata_builder.hpp"
#include "folio/kv_cache.hpp"

namespace folio::inline v0::backends {
TensorView FlashInferImpl::forward(const AttentionLayerScales& layer, const ConstTensorView& query,
                                   const ConstTensorView& key, const ConstTensorView& value, const TensorView& kv_cache,
                                   const FlashInferMetadata* metadata, const TensorView& output,
                                   const OutputQuantization& output_quantization, Stream stream) const {
  const bool is_empty = output.rank == 3 && output.shape[0] == 0;  // an empty allocation may have no address
  core::require(output.data != nullptr || is_empty, "Output tensor must be provided.");
  if (output_quantization.wanted()) {
    core::fail(ErrorCode::kUnsupported,
               "fused output quantization is not yet supported for FlashInferImpl; outputs of the model's dtype are");
  }
  if (metadata == nullptr) {
    fill_with_zeros(output);
    return output;
  }
  core::require(query.dtype == metadata->q_data_type, "Query dtype mismatch: expected ", metadata->q_data_type,
                ", got ", query.dtype);
  const int64_t num_tokens = metadata->num_actual_tokens;
  require_shape("query", query, num_tokens, num_heads_, head_size_);
  require_shape("output", output, num_tokens, num_heads_, head_size_);
  if (!is_fp8(kv_cache_dtype_)) {
    require_no_scale("k", layer.k, kv_cache_dtype_);
    require_no_scale("v", layer.v, kv_cache_dtype_);
  }
  // The typed view is made for layers that share a cache too: they read the same bytes.
  const KvCacheView cache = FlashInferBackend::kv_cache_view(kv_cache, kv_cache_dtype_);
  // Throws for a stale plan while the cache is still untouched.
  const bool divided = metadata->dcp_plans.front().has_value();
  const DcpWindowPlan* dcp_plan = divided ? &dcp_plan_for_window(metadata->dcp_plans, window_left_) : nullptr;
  const AttentionPlan* plan = divided ? nullptr : &plan_for_window(metadata->plans, window_left_);
  if (!divided) static_cast<void>(workspace_size(*plan));

  if (!kv_sharing_target_layer_name_) {
    const auto num_slots = static_cast<int64_t>(metadata->slot_mapping.size());
    require_shape("key", key, num_slots, num_kv_heads_, head_size_);
    require_shape("value", value, num_slots, num_kv_heads_, head_size_);
    CacheWriteArgs write;
    write.k = key;
    write.v = value;
    write.slot_mapping = metadata->slot_mapping.data();
    write.num_slots = num_slots;
    write.cache = cache;
    write.k_scale = layer.k;
    write.v_scale = layer.v;
    write_kv_cache(context_, write, stream);
  }

  SegmentArgs segment;
  segment.cache = cache;
  segment.table = to_page_table(metadata->block_table, metadata->num_reqs);
  segment.k_scale = layer.k;
  segment.v_scale = layer.v;
  AttentionArgs args;
  args.q = first_tokens(query, num_tokens);
  args.out = first_tokens(output, num_tokens);
  args.segments = {&segment, 1};
  args.sm_scale = scale_;
  args.logits_soft_cap = logits_soft_cap_;
  args.alibi_slopes = alibi_slopes_.empty() ? nullptr : alibi_slopes_.data();
  args.sinks = sinks_.empty() ? nullptr : sinks_.data();
  // A checkpoint's q scale describes quantised queries; 16-bit ones are what they are.
  if (is_fp8(query.dtype)) args.q_scale = layer.q;
  if (divided) {
    run_dcp(*dcp_plan, args, key, value, metadata->workspace, stream);
  } else {
    run(*plan, args, metadata->workspace, stream);
  }
  return output;
}

}  // namespace folio::inline v0::backends
