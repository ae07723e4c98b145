#include "folio/backends/flashinfer/impl.hpp"

#include <cmath>

#include "backends/common/batch_checks.hpp"
#include "backends/common/context_memory.hpp"
#include "backends/common/tensor_checks.hpp"
#include "core/error.hpp"
#include "folio/types/nvfp4.hpp"

namespace folio::inline v0::backends {
namespace {

std::vector<float> checked_sinks(const ConstTensorView& sinks, int32_t num_heads) {
  return sinks_as_float(sinks, num_heads,
                        core::message("Sinks must have the same number of heads as the number of heads in the layer. "
                                      "Expected ",
                                      num_heads, ", but got ", sinks.shape[0], "."));
}

bool can_use_block_tables(const FlashInferLayerConfig& config) {
  if (config.profile == BackendProfile::kNative) return true;
  if (config.profile == BackendProfile::kVllm2025_07 || !config.dispatch) return false;
  return config.dispatch->can_use_trtllm_attention(config.num_heads, config.num_kv_heads);
}

/// What July 2025's constructor took beyond its successors.
void check_july_2025(const FlashInferLayerConfig& config) {
  const bool july = config.profile == BackendProfile::kVllm2025_07;
  core::require(july || !config.use_irope, "use_irope is set; only the profile vllm-2025-07 has it");
  if (config.use_irope) {
    config.log(LogLevel::kWarning,
               "Using irope in FlashInfer is not supported yet, it will fall back to global attention for long "
               "context.");
  }
  if (config.blocksparse_params) {
    core::fail(ErrorCode::kUnsupported, "blocksparse_params are given; FlashInferImpl computes dense attention only");
  }
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
      dcp_query_ranks_(config.dcp_query_ranks),
      alibi_slopes_(config.alibi_slopes.begin(), config.alibi_slopes.end()),
      window_left_(config.sliding_window ? *config.sliding_window - 1 : -1),
      kv_cache_dtype_(kv_cache_dtype_from_name(config.kv_cache_dtype, config.model_dtype)),
      logits_soft_cap_(config.logits_soft_cap.value_or(0.0f)),
      kv_sharing_target_layer_name_(config.kv_sharing_target_layer_name),
      sinks_source_(config.sinks),
      profile_(config.profile),
      support_trtllm_attn_(false),
      disable_q_quantization_(config.disable_q_quantization) {
  check_july_2025(config);
  core::require(!config.dispatch || config.dispatch->profile() == profile_, "the layer's profile is ",
                to_string(profile_), "; its dispatch was made for ",
                to_string(config.dispatch ? config.dispatch->profile() : profile_));
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
  const int32_t query_heads = checked_query_heads(num_heads_, dcp_query_ranks_, alibi_slopes_);
  if (config.sinks.data != nullptr) sinks_ = checked_sinks(config.sinks, query_heads);
  gpu_alibi_slopes_ = copy_on_gpu(context_.device(), alibi_slopes_);
  gpu_sinks_ = copy_on_gpu(context_.device(), sinks_);
  support_trtllm_attn_ = can_use_block_tables(config);
}

void FlashInferImpl::set_sinks(const ConstTensorView& sinks) {
  core::require(!sinks_.empty(), "the layer was constructed without sinks; give them to the constructor");
  core::require(sinks.data != nullptr, "sinks have no data");
  sinks_ = checked_sinks(sinks, num_heads_ * dcp_query_ranks_);
  sinks_source_ = sinks;
  update_on_gpu(context_.device(), gpu_sinks_, sinks_);
}

void FlashInferImpl::process_weights_after_loading() {
  if (sinks_.empty()) return;
  sinks_ = checked_sinks(sinks_source_, num_heads_ * dcp_query_ranks_);
  update_on_gpu(context_.device(), gpu_sinks_, sinks_);
}

bool FlashInferImpl::fused_output_quant_supported(QuantKey key) const noexcept {
  const bool nvfp4 = key == QuantKey::kNvfp4;
  if (!nvfp4 && key != QuantKey::kFp8StaticTensorSym) return false;
  if (profile_ == BackendProfile::kNative) return !nvfp4 || head_size_ % kNvfp4BlockSize == 0;
  return support_trtllm_attn_ && is_fp8(kv_cache_dtype_);
}

bool FlashInferImpl::supports_quant_query_input() const noexcept {
  const bool native = profile_ == BackendProfile::kNative;
  return (native ? kv_cache_dtype_ == DType::kFloat8E4M3 : support_trtllm_attn_) && !disable_q_quantization_;
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
