#include "folio/backends/capability.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace folio::inline v0::backends {
namespace {

template <typename T, typename U>
bool contains(std::span<const T> values, const U& value) {
  return std::ranges::find(values, value) != values.end();
}

}  // namespace

bool BackendCapability::supports_head_size(int32_t head_size) const noexcept {
  return head_sizes.empty() || contains(head_sizes, head_size);
}

bool BackendCapability::supports_dtype(DType dtype) const noexcept {
  return contains(dtypes, dtype);
}

bool BackendCapability::supports_kv_cache_dtype(const std::optional<std::string>& dtype_name) const noexcept {
  return !dtype_name || kv_cache_dtypes.empty() || contains(kv_cache_dtypes, std::string_view(*dtype_name));
}

bool BackendCapability::supports_page_size(std::optional<int32_t> page_size) const noexcept {
  if (!page_size) return true;
  if (*page_size <= 0) return false;
  return page_sizes.empty() ||
         std::ranges::any_of(page_sizes, [&](const PageSizeRule& rule) { return *page_size % rule.value == 0; });
}

bool BackendCapability::supports_attn_type(AttentionType type) const noexcept {
  return contains(attn_types, type);
}

bool BackendCapability::supports_compute_capability(const ComputeDevice& device) const noexcept {
  if (!min_capability && !max_capability) return true;
  if (!device.capability) return false;
  return (!min_capability || *device.capability >= *min_capability) &&
         (!max_capability || *device.capability <= *max_capability);
}

int32_t BackendCapability::get_preferred_page_size(int32_t default_page_size) const noexcept {
  if (least_preferred_page_size > 0) return std::max(default_page_size, least_preferred_page_size);
  if (page_sizes.empty() || supports_page_size(default_page_size)) return default_page_size;
  return std::ranges::min_element(page_sizes, {}, &PageSizeRule::value)->value;
}

std::optional<std::string> BackendCapability::combination_refusal(bool has_sinks, const ComputeDevice& device) const {
  if (!has_sinks || !min_capability_for_sinks || !device.capability) return std::nullopt;
  const DeviceCapability least = *min_capability_for_sinks;
  if (*device.capability >= least) return std::nullopt;
  return core::message("sink not supported on compute capability < ", least.major, ".", least.minor);
}

std::vector<std::string> validate_configuration(const BackendCapability& backend, const AttentionRequirements& asked) {
  std::vector<std::string> reasons;
  const auto refuse_if = [&](bool refused, const auto&... parts) {
    if (refused) reasons.push_back(core::message(parts...));
  };
  refuse_if(!backend.supports_head_size(asked.head_size), "head_size not supported");
  refuse_if(!backend.supports_dtype(asked.dtype), "dtype not supported");
  refuse_if(!backend.supports_kv_cache_dtype(asked.kv_cache_dtype), "kv_cache_dtype not supported");
  refuse_if(!backend.supports_page_size(asked.page_size), "block_size not supported");
  refuse_if(asked.use_mm_prefix && !backend.supports_mm_prefix,
            "partial multimodal token full attention not supported");
  refuse_if(asked.use_mla != backend.is_mla, asked.use_mla ? "MLA not supported" : "non-MLA not supported");
  refuse_if(asked.has_sinks && !backend.supports_sink, "attention sinks not supported");
  refuse_if(asked.use_sparse != backend.is_sparse,
            asked.use_sparse ? "sparse not supported" : "non-sparse not supported");
  refuse_if(asked.use_per_head_quant_scales && !backend.supports_per_head_quant_scales,
            "per-head quant scales not supported");
  refuse_if(!backend.supports_compute_capability(asked.device), "compute capability not supported");
  refuse_if(!backend.supports_attn_type(asked.attn_type), "attention type ", to_string(asked.attn_type),
            " not supported");
  refuse_if(asked.use_non_causal && !backend.supports_non_causal, "non-causal attention not supported");
  refuse_if(asked.use_batch_invariant && !backend.supports_batch_invariance, "batch invariance not supported");
  refuse_if(asked.use_kv_connector && !backend.supports_kv_connector, "KV connector not supported");
  if (auto refusal = backend.combination_refusal(asked.has_sinks, asked.device)) reasons.push_back(*refusal);
  return reasons;
}

std::string_view to_string(AttentionType type) {
  switch (type) {
    case AttentionType::kDecoder: return "decoder";
    case AttentionType::kEncoder: return "encoder";
    case AttentionType::kEncoderOnly: return "encoder_only";
    case AttentionType::kEncoderDecoder: return "encoder_decoder";
  }
  return "invalid";
}

std::string_view to_string(Platform platform) {
  switch (platform) {
    case Platform::kCpu: return "cpu";
    case Platform::kCuda: return "cuda";
    case Platform::kRocm: return "rocm";
    case Platform::kXpu: return "xpu";
  }
  return "invalid";
}

std::string_view to_string(GraphSupport support) {
  switch (support) {
    case GraphSupport::kNever: return "NEVER";
    case GraphSupport::kUniformSingleTokenDecode: return "UNIFORM_SINGLE_TOKEN_DECODE";
    case GraphSupport::kUniformBatch: return "UNIFORM_BATCH";
    case GraphSupport::kAlways: return "ALWAYS";
  }
  return "invalid";
}

}  // namespace folio::inline v0::backends
