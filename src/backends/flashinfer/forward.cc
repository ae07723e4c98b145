#include <cmath>

#include "backends/common/batch_checks.hpp"
#include "backends/common/dcp_step.hpp"
#include "backends/common/kv_cache_tensor.hpp"
#include "backends/common/tensor_checks.hpp"
#include "backends/flashinfer/forward_call.hpp"
#include "core/error.hpp"
#include "folio/backends/flashinfer/backend.hpp"
#include "folio/kv_cache.hpp"

namespace folio::inline v0::backends {

void FlashInferImpl::check_output_quantization(const OutputQuantization& quantization,
                                               const FlashInferMetadata& metadata, const TensorView& output) const {
  const bool has_block_scale = quantization.block_scale.data != nullptr;
  core::require(quantization.scale != nullptr, "output_block_scale is not supported when fusion has not happened");
  if (metadata.profile != BackendProfile::kNative) {
    core::require(is_fp8(metadata.q_data_type), "Query must be FP8 when attn+quant fusion happened.");
    core::require(metadata.prefill_use_trtllm && metadata.decode_use_trtllm, "Must use TRT-LLM attn");
  }
  if (quantization.scale_where == Where::kHost) {
    const float scale = *quantization.scale;
    core::require(std::isfinite(scale) && scale > 0.0f, "output_scale is ", scale, "; it must be finite and positive");
  } else {
    core::require(on_gpu(context_), "output_quantization.scale is on a device; the context is a CPU's");
  }
  switch (output.dtype) {
    case DType::kFloat8E4M3:
      core::require(!has_block_scale, "output_block_scale should not be provided for fp8 output");
      return;
    case DType::kFloat4E2M1x2:
    case DType::kUnset: core::require(has_block_scale, "output_block_scale is required for nvfp4 output"); return;
    default: core::fail(ErrorCode::kInvalidArgument, "Unsupported output dtype: ", output.dtype);
  }
}

TensorView FlashInferImpl::forward(const AttentionLayerScales& layer, const ConstTensorView& query,
                                   const ConstTensorView& key, const ConstTensorView& value, const TensorView& kv_cache,
                                   const FlashInferMetadata* metadata, const TensorView& output,
                                   const OutputQuantization& output_quantization, Stream stream) const {
  const bool is_empty = output.rank == 3 && output.shape[0] == 0;  // an empty allocation may have no address
  core::require(output.data != nullptr || is_empty, "Output tensor must be provided.");
  const bool quantised = output_quantization.wanted();
  if (quantised && profile_ == BackendProfile::kVllm2025_07) {  // in profiling runs too
    core::fail(ErrorCode::kUnsupported, "fused output quantization is not yet supported for FlashInferImpl");
  }
  if (metadata == nullptr) {
    if (profile_ != BackendProfile::kVllm2025_07) fill_with_zeros(context_, output, stream);
    return output;
  }
  if (metadata->current_generation != nullptr && *metadata->current_generation != metadata->generation) {
    core::fail(ErrorCode::kStalePlan, "the metadata is of build ", metadata->generation, "; its builder has built ",
               *metadata->current_generation, " times");
  }
  if (quantised) check_output_quantization(output_quantization, *metadata, output);
  const bool planned_query = query.dtype == metadata->q_data_type;
  const bool quantised_query = profile_ == BackendProfile::kNative && query.dtype == DType::kFloat8E4M3;
  core::require(planned_query || (quantised_query && supports_quant_query_input()), "Query dtype mismatch: expected ",
                metadata->q_data_type, ", got ", query.dtype);
  TensorView typed = output;
  if (quantised && output.dtype == DType::kUnset) typed.dtype = DType::kFloat4E2M1x2;
  const bool planned_output = typed.dtype == metadata->output_data_type;
  const bool plain =
      typed.dtype == DType::kFloat32 || typed.dtype == DType::kFloat16 || typed.dtype == DType::kBFloat16;
  core::require(quantised || plain, "the output is ", typed.dtype, "; output_quantization.scale must be given");
  const int64_t num_tokens = metadata->num_actual_tokens;
  const bool fp4 = typed.dtype == DType::kFloat4E2M1x2;
  const int32_t out_ranks = dcp_out_ranks(metadata->dcp_plans);
  require_shape("query", query, num_tokens, num_heads_ * dcp_query_ranks_, head_size_);
  require_shape("output", output, num_tokens, num_heads_ * out_ranks, fp4 ? head_size_ / 2 : head_size_);
  check_cache_scales(layer);
  require_configured_layout(kv_cache, metadata->kv_cache_layout);
  // The typed view is made for layers that share a cache too: they read the same bytes.
  const Call call{layer,
                  query,
                  key,
                  value,
                  typed,
                  output_quantization,
                  *metadata,
                  FlashInferBackend::kv_cache_view(kv_cache, kv_cache_dtype_),
                  planned_query && planned_output};
  check_paths(call);
  if (FlashInferBackend::forward_includes_kv_cache_update(profile_) && !kv_sharing_target_layer_name_) {
    write_cache(layer, key, value, call.cache, metadata->slot_mapping, stream);
  }
  if (metadata->planned.num_requests > 0 && call.as_planned) run_planned(call, stream);
  run_block_tables(call, /*check_only=*/false, stream);
  return output;
}

void FlashInferImpl::check_cache_scales(const AttentionLayerScales& layer) const {
  if (is_fp8(kv_cache_dtype_)) return;
  require_no_scale("k", layer.k, kv_cache_dtype_);
  require_no_scale("v", layer.v, kv_cache_dtype_);
}

void FlashInferImpl::do_kv_cache_update(const AttentionLayerScales& layer, const ConstTensorView& key,
                                        const ConstTensorView& value, const TensorView& kv_cache,
                                        std::span<const int64_t> slot_mapping, Stream stream) const {
  if (kv_sharing_target_layer_name_) return;
  check_cache_scales(layer);
  write_cache(layer, key, value, FlashInferBackend::kv_cache_view(kv_cache, kv_cache_dtype_), slot_mapping, stream);
}

void FlashInferImpl::write_cache(const AttentionLayerScales& layer, const ConstTensorView& key,
                                 const ConstTensorView& value, const KvCacheView& cache,
                                 std::span<const int64_t> slot_mapping, Stream stream) const {
  const auto num_slots = static_cast<int64_t>(slot_mapping.size());
  require_shape("key", key, num_slots, num_kv_heads_, head_size_);
  require_shape("value", value, num_slots, num_kv_heads_, head_size_);
  CacheWriteArgs write;
  write.k = key;
  write.v = value;
  write.slot_mapping = slot_mapping.data();
  write.num_slots = num_slots;
  write.cache = cache;
  write.k_scale = layer.k;
  write.v_scale = layer.v;
  write_kv_cache(context_, write, stream);
}

}  // namespace folio::inline v0::backends
