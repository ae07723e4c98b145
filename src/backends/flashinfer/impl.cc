#include "folio/backends/flashinfer/impl.hpp"

#include <cmath>

#include "backends/common/tensor_checks.hpp"
#include "core/error.hpp"
#include "folio/backends/engine_config.hpp"

namespace folio::inline v0::backends {
namespace {

std::vector<float> checked_sinks(const ConstTensorView& sinks, int32_t num_heads) {
  return sinks_as_float(sinks, num_heads,
                        core::message("Sinks must have the same number of heads as the number of heads in the layer. "
                                      "Expected ",
                                      num_heads, ", but got ", sinks.shape[0], "."));
}

float host_value(const Scale& scale, const char* name) {
  core::require(scale.data == nullptr, name, " scale is an array; one host value is needed here");
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
    core::fail(ErrorCode::kUnsupported,
               "Encoder self-attention and encoder/decoder cross-attention are not implemented for FlashInferImpl");
  }
  core::require(num_heads_ >= 1 && num_kv_heads_ >= 1 && num_heads_ % num_kv_heads_ == 0, "num_heads is ", num_heads_,
                ", num_kv_heads ", num_kv_heads_, "; both must be at least 1 and the second divide the first");
  core::require(head_size_ >= 1, "head_size is ", head_size_, "; it must be at least 1");
  core::require(std::isfinite(scale_) && scale_ > 0.0f, "scale is ", scale_, "; it must be finite and above 0");
  core::require(config.sliding_window.value_or(1) >= 1, "sliding_window is ", config.sliding_window.value_or(1),
                "; it must be at least 1");
  core::require(std::isfinite(logits_soft_cap_) && logits_soft_cap_ >= 0.0f, "logits_soft_cap is ", logits_soft_cap_,
                "; it must be finite and not below 0");
  core::require(alibi_slopes_.empty() || alibi_slopes_.size() == static_cast<size_t>(num_heads_), "alibi_slopes has ",
                alibi_slopes_.size(), " entries; num_heads is ", num_heads_);
  if (config.sinks.data != nullptr) sinks_ = checked_sinks(config.sinks, num_heads_);
}

void FlashInferImpl::set_sinks(const ConstTensorView& sinks) {
  core::require(!sinks_.empty(), "the layer was constructed without sinks; give them to the constructor");
  core::require(sinks.data != nullptr, "sinks have no data");
  sinks_ = checked_sinks(sinks, num_heads_);
}

float FlashInferImpl::bmm1_scale(const AttentionLayerScales& layer, DType query_dtype) const {
  const float of_query = is_fp8(query_dtype) ? host_value(layer.q, "q") : 1.0f;
  return of_query * host_value(layer.k, "k") * scale_;
}

float FlashInferImpl::bmm2_scale(const AttentionLayerScales& layer) const {
  return host_value(layer.v, "v");
}

PerLayerParameters FlashInferImpl::per_layer_parameters() const noexcept {
  return {window_left_, logits_soft_cap_, scale_, !sinks_.empty()};
}

}  // namespace folio::inline v0::backends
