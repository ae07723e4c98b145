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
  if (metadata.profile == BackendProfile::kVllm2025_07) {
    core::fail(ErrorCode::kUnsupported, "fused output quantization is not yet supported for FlashInferImpl");
  }
  if (metadata.profile != BackendProfile::kNative) {
    core::require(is_fp8(metadata.q_data_type), "Query must be FP8 when attn+quant fusion happened.");
    core::require(metadata.prefill_use_trtllm && metadata.decode_use_trtllm, "Must use TRT-LLM attn");
  } else if (metadata.dcp_plans.front()) {
    core::fail(ErrorCode::kUnsupported,
               "the output is quantised under decode context parallelism; outputs of the model's dtype are offered");
  } else if (metadata.common_prefix_len > 0) {
    core::fail(ErrorCode::kUnsupported,
               "the output is quantised in a batch with a shared prefix; build it with common_prefix_len 0");
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
  if (metadata == nullptr) {
    if (profile_ != BackendProfile::kVllm2025_07) fill_with_zeros(context_, output, stream);
    return output;
  }
  if (metadata->current_generation != nullptr && *metadata->current_generation != metadata->generation) {
    core::fail(ErrorCode::kStalePlan, "the metadata is of build ", metadata->generation, "; its builder has built ",
               *metadata->current_generation, " times");
  }
  const bool quantised = output_quantization.wanted();
  if (quantised) check_output_quantization(output_quantization, *metadata, output);
  core::require(query.dtype == metadata->q_data_type, "Query dtype mismatch: expected ", metadata->q_data_type,
                ", got ", query.dtype);
  const int64_t num_tokens = metadata->num_actual_tokens;
  const bool fp4 = quantised && output.dtype != DType::kFloat8E4M3;
  require_shape("query", query, num_tokens, num_heads_, head_size_);
  require_shape("output", output, num_tokens, num_heads_, fp4 ? head_size_ / 2 : head_size_);
  if (!is_fp8(kv_cache_dtype_)) {
    require_no_scale("k", layer.k, kv_cache_dtype_);
    require_no_scale("v", layer.v, kv_cache_dtype_);
  }
  // The typed view is made for layers that share a cache too: they read the same bytes.
  const Call call{layer,     query,
                  key,       value,
                  output,    output_quantization,
                  *metadata, FlashInferBackend::kv_cache_view(kv_cache, kv_cache_dtype_)};
  check_paths(call);
  if (!kv_sharing_target_layer_name_) write_cache(call, stream);
  if (metadata->planned.num_requests > 0 && !quantised) run_planned(call, stream);
  run_block_tables(call, /*check_only=*/false, stream);
  return output;
}

void FlashInferImpl::write_cache(const Call& call, Stream stream) const {
  const std::span<const int64_t> slots = call.metadata.slot_mapping;
  const auto num_slots = static_cast<int64_t>(slots.size());
  require_shape("key", call.key, num_slots, num_kv_heads_, head_size_);
  require_shape("value", call.value, num_slots, num_kv_heads_, head_size_);
  CacheWriteArgs write;
  write.k = call.key;
  write.v = call.value;
  write.slot_mapping = slots.data();
  write.num_slots = num_slots;
  write.cache = call.cache;
  write.k_scale = call.layer.k;
  write.v_scale = call.layer.v;
  write_kv_cache(context_, write, stream);
}

}  // namespace folio::inline v0::backends
