#include "folio/backends/flashinfer/impl.hpp"

#include <cmath>
#include <cstring>

#include "folio/backends/engine_config.hpp"
#include "folio/backends/flashinfer/backend.hpp"
#include "folio/backends/flashinfer/metadata_builder.hpp"
#include "folio/types/error.hpp"
#include "folio/types/float_convert.hpp"

namespace folio::inline v0::backends {
namespace {

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorCode::kInvalidArgument, message); }

/// Element i of a host vector of floats, widened.
float element(const ConstTensorView& vector, int64_t i) {
  const int64_t at = i * vector.strides[0];
  switch (vector.dtype) {
    case DType::kFloat32: return static_cast<const float*>(vector.data)[at];
    case DType::kFloat16: return float16_to_float(static_cast<const uint16_t*>(vector.data)[at]);
    case DType::kBFloat16: return bfloat16_to_float(static_cast<const uint16_t*>(vector.data)[at]);
    default: refuse("sinks are " + std::string(to_string(vector.dtype)) + "; float32, float16 and bfloat16 are taken");
  }
}

std::vector<float> sinks_as_float(const ConstTensorView& sinks, int32_t num_heads) {
  if (sinks.rank != 1) refuse("sinks have rank " + std::to_string(sinks.rank) + "; it must be 1");
  if (sinks.shape[0] != num_heads) {
    refuse("Sinks must have the same number of heads as the number of heads in the layer. Expected " +
           std::to_string(num_heads) + ", but got " + std::to_string(sinks.shape[0]) + ".");
  }
  std::vector<float> values(static_cast<size_t>(num_heads));
  for (int32_t head = 0; head < num_heads; ++head) values[static_cast<size_t>(head)] = element(sinks, head);
  return values;
}

float host_value(const Scale& scale, const char* name) {
  if (scale.data != nullptr) refuse(std::string(name) + " scale is an array; one host value is needed here");
  return scale.value;
}

}  // namespace

FlashInferImpl::FlashInferImpl(const Context& context, const FlashInferLayerConfig& config)
    : context_(context),
      num_heads_(config.num_heads),
      head_size_(config.head_size),
      scale_(config.scale),
      num_kv_heads_(config.num_kv_heads),
      alibi_slopes_(config.alibi_slopes.begin(), config.alibi_slopes.end()),
      window_left_(config.sliding_window ? *config.sliding_window - 1 : -1),
      kv_cache_dtype_(kv_cache_dtype_from_name(config.kv_cache_dtype, config.model_dtype)),
      logits_soft_cap_(config.logits_soft_cap.value_or(0.0f)),
      kv_sharing_target_layer_name_(config.kv_sharing_target_layer_name) {
  if (config.attn_type != AttentionType::kDecoder) {
    throw Error(ErrorCode::kUnsupported,
                "Encoder self-attention and encoder/decoder cross-attention are not implemented for FlashInferImpl");
  }
  if (num_heads_ < 1 || num_kv_heads_ < 1 || num_heads_ % num_kv_heads_ != 0) {
    refuse("num_heads is " + std::to_string(num_heads_) + ", num_kv_heads " + std::to_string(num_kv_heads_) +
           "; both must be at least 1 and the second divide the first");
  }
  if (head_size_ < 1) refuse("head_size is " + std::to_string(head_size_) + "; it must be at least 1");
  if (!std::isfinite(scale_) || scale_ <= 0.0f) {
    refuse("scale is " + std::to_string(scale_) + "; it must be finite and above 0");
  }
  if (config.sliding_window && *config.sliding_window < 1) {
    refuse("sliding_window is " + std::to_string(*config.sliding_window) + "; it must be at least 1");
  }
  if (!std::isfinite(logits_soft_cap_) || logits_soft_cap_ < 0.0f) {
    refuse("logits_soft_cap is " + std::to_string(logits_soft_cap_) + "; it must be finite and not below 0");
  }
  if (!alibi_slopes_.empty() && alibi_slopes_.size() != static_cast<size_t>(num_heads_)) {
    refuse("alibi_slopes has " + std::to_string(alibi_slopes_.size()) + " entries; num_heads is " +
           std::to_string(num_heads_));
  }
  if (config.sinks.data != nullptr) sinks_ = sinks_as_float(config.sinks, num_heads_);
}

void FlashInferImpl::set_sinks(const ConstTensorView& sinks) {
  if (sinks_.empty()) refuse("the layer was constructed without sinks; give them to the constructor");
  if (sinks.data == nullptr) refuse("sinks have no data");
  sinks_ = sinks_as_float(sinks, num_heads_);
}

float FlashInferImpl::bmm1_scale(const AttentionLayerScales& layer, DType query_dtype) const {
  const float of_query = is_fp8(query_dtype) ? host_value(layer.q, "q") : 1.0f;
  return of_query * host_value(layer.k, "k") * scale_;
}

float FlashInferImpl::bmm2_scale(const AttentionLayerScales& layer) const { return host_value(layer.v, "v"); }

PerLayerParameters FlashInferImpl::per_layer_parameters() const noexcept {
  return {window_left_, logits_soft_cap_, scale_, !sinks_.empty()};
}

}  // namespace folio::inline v0::backends
