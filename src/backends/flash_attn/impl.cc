#include "folio/backends/flash_attn/impl.hpp"

#include <cmath>

#include "backends/common/context_memory.hpp"
#include "backends/common/tensor_checks.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends {
namespace {

/// vLLM's windows reach to both sides of encoder-only layers alone; an encoder's end at the query.
SlidingWindow window_of(const FlashAttentionLayerConfig& config, BackendProfile profile) {
  if (!config.sliding_window) return {};
  const int32_t left = *config.sliding_window - 1;
  const bool native_encoder = profile == BackendProfile::kNative && config.attn_type == AttentionType::kEncoder;
  const bool both_sides = native_encoder || config.attn_type == AttentionType::kEncoderOnly;
  return {left, both_sides ? left : 0};
}

/// What the profile's original refuses when a layer is made.
void check_profile(const FlashAttentionLayerConfig& config, const FlashAttentionFacts& facts, DType kv_cache_dtype) {
  if (facts.profile == BackendProfile::kNative) return;
  if (is_fp8(kv_cache_dtype) && !flash_attn_supports_fp8(facts.platform)) {
    core::fail(ErrorCode::kUnsupported, "FlashAttention does not support fp8 kv-cache on this device.");
  }
  core::require(config.sinks.data == nullptr || flash_attn_supports_sinks(facts.platform),
                "Sinks are only supported in FlashAttention 3");
}

}  // namespace

FlashAttentionImpl::FlashAttentionImpl(const Context& context, const FlashAttentionLayerConfig& config,
                                       const FlashAttentionFacts& facts, const OnceLog& log)
    : context_(context),
      num_heads_(config.num_heads),
      head_size_(config.head_size),
      scale_(config.scale),
      num_kv_heads_(config.num_kv_heads),
      dcp_query_ranks_(config.dcp_query_ranks),
      alibi_slopes_(config.alibi_slopes.begin(), config.alibi_slopes.end()),
      window_(window_of(config, facts.profile)),
      kv_cache_dtype_name_(config.kv_cache_dtype),
      kv_cache_dtype_(kv_cache_dtype_from_name(config.kv_cache_dtype, config.model_dtype)),
      logits_soft_cap_(config.logits_soft_cap.value_or(0.0f)),
      attn_type_(config.attn_type),
      kv_sharing_target_layer_name_(config.kv_sharing_target_layer_name),
      update_in_forward_(config.update_kv_cache_in_forward),
      profile_(facts.profile),
      version_(3) {
  core::require(num_heads_ >= 1 && num_kv_heads_ >= 1 && num_heads_ % num_kv_heads_ == 0, "num_heads is ", num_heads_,
                ", num_kv_heads ", num_kv_heads_, "; both must be at least 1 and the second divide the first");
  core::require(head_size_ >= 1, "head_size is ", head_size_, "; it must be at least 1");
  core::require(std::isfinite(scale_) && scale_ > 0.0f, "scale is ", scale_, "; it must be finite and above 0");
  core::require(config.sliding_window.value_or(1) >= 1, "sliding_window is ", config.sliding_window.value_or(1),
                "; it must be at least 1");
  core::require(std::isfinite(logits_soft_cap_) && logits_soft_cap_ >= 0.0f, "logits_soft_cap is ", logits_soft_cap_,
                "; it must be finite and not below 0");
  const int32_t query_heads = checked_query_heads(num_heads_, dcp_query_ranks_, alibi_slopes_);
  core::require(FlashAttentionBackend::supports_attn_type(attn_type_), "attn_type is ",
                static_cast<int32_t>(attn_type_), "; decoder, encoder, encoder_only and encoder_decoder are offered");
  if (profile_ != BackendProfile::kNative) {
    FlashAttentionBackend::supported_dtypes(profile_);  // throws for profiles that are not this backend's
    version_ = get_flash_attn_version(facts.platform, !alibi_slopes_.empty(), head_size_, log);
    log(LogLevel::kInfo,
        core::message("Using FlashAttention version ", version_ ? std::to_string(*version_) : std::string("None")));
  }
  check_profile(config, facts, kv_cache_dtype_);
  if (config.sinks.data != nullptr) {
    sinks_ = sinks_as_float(config.sinks, query_heads,
                            "Sinks must have the same number of heads as the number of heads in the layer");
  }
  gpu_alibi_slopes_ = copy_on_gpu(context_.device(), alibi_slopes_);
  gpu_sinks_ = copy_on_gpu(context_.device(), sinks_);
}

PerLayerParameters FlashAttentionImpl::per_layer_parameters() const noexcept {
  return {window_.left, logits_soft_cap_, scale_, !sinks_.empty()};
}

}  // namespace folio::inline v0::backends
