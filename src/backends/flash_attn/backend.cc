#include "folio/backends/flash_attn/backend.hpp"

#include "backends/common/kv_cache_tensor.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends {
namespace {

constexpr std::array<DType, 3> kDtypes{DType::kFloat16, DType::kBFloat16, DType::kFloat32};
/// The first 3 are vLLM's list, the first 8 what it takes with version 3: every cache dtype whose name begins with fp8.
constexpr std::array<std::string_view, 8> kVllmKvCacheDtypes{"auto",     "float16",  "bfloat16", "fp8",
                                                             "fp8_e4m3", "fp8_e5m2", "fp8_inc",  "fp8_ds_mla"};
constexpr std::array<std::string_view, 7> kNativeKvCacheDtypes{"auto", "float16",  "bfloat16", "float32",
                                                               "fp8",  "fp8_e4m3", "fp8_e5m2"};
constexpr std::array<AttentionType, 4> kAttentionTypes{AttentionType::kDecoder, AttentionType::kEncoder,
                                                       AttentionType::kEncoderOnly, AttentionType::kEncoderDecoder};
constexpr std::array<PageSizeRule, 1> kMultiplesOf16{PageSizeRule{16, true}};
constexpr std::array<PageSizeRule, 3> kHybridPageSizes{PageSizeRule{16}, PageSizeRule{32}, PageSizeRule{64}};
constexpr std::array<PageSizeRule, 1> kAnyPageSize{PageSizeRule{1, true}};
constexpr DeviceCapability kLeastCapability{8, 0};
constexpr DeviceCapability kLeastCapabilityForSinks{9, 0};

/// Whether the profile is native; throws for those that this backend does not have.
bool is_native(BackendProfile profile) {
  if (profile == BackendProfile::kNative) return true;
  if (profile == BackendProfile::kVllm2026_03) return false;
  core::fail(ErrorCode::kUnsupported, "profile is ", to_string(profile),
             "; the FlashAttention backend offers native and vllm-2026-03");
}

bool has_float32_states(const FlashAttentionFacts& facts) {
  return facts.is_hybrid_model && (facts.mamba_ssm_cache_dtype == "float32" || facts.mamba_cache_dtype == "float32");
}

}  // namespace

std::string_view FlashAttentionBackend::get_name() noexcept {
  return "FLASH_ATTN";
}

BackendCapability FlashAttentionBackend::capability(const FlashAttentionFacts& facts) {
  const bool native = is_native(facts.profile);
  BackendCapability result;
  result.name = get_name();
  result.dtypes = supported_dtypes(facts.profile);
  result.head_sizes = kNativeHeadSizes;
  result.page_sizes = get_supported_kernel_page_sizes(facts);
  result.attn_types = kAttentionTypes;
  result.supports_non_causal = true;
  result.supports_batch_invariance = true;
  result.supports_sink = supports_sink(facts);
  result.supports_per_head_quant_scales = supports_per_head_quant_scales(facts);
  if (native) {
    result.kv_cache_dtypes = kNativeKvCacheDtypes;
    return result;
  }
  result.kv_cache_dtypes = std::span(kVllmKvCacheDtypes).first(flash_attn_supports_fp8(facts.platform) ? 8 : 3);
  result.least_preferred_page_size = facts.platform.device.platform == Platform::kXpu ? 64 : 0;
  result.min_capability = kLeastCapability;
  result.min_capability_for_sinks = kLeastCapabilityForSinks;
  return result;
}

std::vector<std::string> FlashAttentionBackend::validate_configuration(const AttentionRequirements& requirements,
                                                                       const FlashAttentionFacts& facts) {
  return backends::validate_configuration(capability(facts), requirements);
}

std::span<const DType> FlashAttentionBackend::supported_dtypes(BackendProfile profile) {
  return std::span(kDtypes).first(is_native(profile) ? 3 : 2);
}

std::span<const std::string_view> FlashAttentionBackend::supported_kv_cache_dtypes(BackendProfile profile) {
  if (is_native(profile)) return kNativeKvCacheDtypes;
  return std::span(kVllmKvCacheDtypes).first(3);
}

bool FlashAttentionBackend::supports_kv_cache_dtype(const std::optional<std::string>& kv_cache_dtype,
                                                    const FlashAttentionFacts& facts) {
  return capability(facts).supports_kv_cache_dtype(kv_cache_dtype);
}

std::span<const PageSizeRule> FlashAttentionBackend::get_supported_kernel_page_sizes(const FlashAttentionFacts& facts) {
  if (is_native(facts.profile)) return kAnyPageSize;
  if (has_float32_states(facts)) return kHybridPageSizes;
  return kMultiplesOf16;
}

int32_t FlashAttentionBackend::get_preferred_page_size(int32_t default_page_size, const FlashAttentionFacts& facts) {
  return capability(facts).get_preferred_page_size(default_page_size);
}

bool FlashAttentionBackend::supports_head_size(int32_t head_size) noexcept {
  return head_size > 0 && head_size % 8 == 0 && head_size <= 256;
}

bool FlashAttentionBackend::supports_attn_type(AttentionType type) noexcept {
  return type >= AttentionType::kDecoder && type <= AttentionType::kEncoderDecoder;
}

bool FlashAttentionBackend::supports_non_causal() noexcept {
  return true;
}

bool FlashAttentionBackend::supports_per_head_quant_scales(const FlashAttentionFacts& facts) {
  return is_native(facts.profile) || get_flash_attn_version(facts.platform).value_or(0) >= 3;
}

bool FlashAttentionBackend::supports_sink(const FlashAttentionFacts& facts) {
  return is_native(facts.profile) || (facts.is_varlen_func_available && flash_attn_supports_sinks(facts.platform));
}

bool FlashAttentionBackend::supports_compute_capability(const ComputeDevice& device, BackendProfile profile) {
  return is_native(profile) || (device.capability && *device.capability >= kLeastCapability);
}

std::optional<std::string> FlashAttentionBackend::supports_combination(bool has_sinks, const ComputeDevice& device,
                                                                       BackendProfile profile) {
  FlashAttentionFacts facts;
  facts.profile = profile;
  return capability(facts).combination_refusal(has_sinks, device);
}

GraphSupport FlashAttentionBackend::get_cudagraph_support(const FlashAttentionFacts& facts) {
  if (is_native(facts.profile) || get_flash_attn_version(facts.platform) == 3) return GraphSupport::kAlways;
  return GraphSupport::kUniformBatch;
}

std::array<int64_t, 5> FlashAttentionBackend::get_kv_cache_shape(int64_t num_pages, int32_t page_size,
                                                                 int32_t num_kv_heads, int32_t head_size,
                                                                 BackendProfile profile) {
  core::require(is_native(profile) || page_size % 16 == 0, "Block size must be a multiple of 16.");
  core::require(page_size > 0, "page_size is ", page_size, "; it must be at least 1");
  return {2, num_pages, page_size, num_kv_heads, head_size};
}

int32_t FlashAttentionBackend::get_kv_cache_page_dim() {
  return kv_cache_page_dim([](auto... sizes) { return get_kv_cache_shape(sizes..., BackendProfile::kNative); }, 16, 1,
                           8);
}

std::array<int32_t, 5> FlashAttentionBackend::get_kv_cache_stride_order(KvCacheLayout layout) {
  require_layout(layout);
  if (layout == KvCacheLayout::kHnd) return {0, 1, 3, 2, 4};
  return {0, 1, 2, 3, 4};
}

std::array<int32_t, 6> FlashAttentionBackend::get_layered_kv_cache_stride_order(KvCacheLayout layout) {
  require_layout(layout);
  if (layout == KvCacheLayout::kHnd) return {2, 4, 0, 1, 3, 5};
  return {2, 0, 1, 3, 4, 5};
}

DType FlashAttentionBackend::get_fp8_dtype_for_flashattn(std::string_view kv_cache_dtype, BackendProfile profile) {
  if (kv_cache_dtype == "fp8" || kv_cache_dtype == "fp8_e4m3") return DType::kFloat8E4M3;
  if (kv_cache_dtype == "fp8_e5m2" && is_native(profile)) return DType::kFloat8E5M2;
  core::fail(ErrorCode::kInvalidArgument, "Unrecognized FP8 dtype: ", kv_cache_dtype);
}

TensorView FlashAttentionBackend::kv_cache_tensor(void* data, DType dtype, const std::array<int64_t, 5>& shape,
                                                  KvCacheLayout layout) {
  return permuted_tensor(data, dtype, shape, get_kv_cache_stride_order(layout));
}

KvCacheView FlashAttentionBackend::kv_cache_view(const TensorView& kv_cache, DType dtype) {
  return view_of_cache_tensor(kv_cache, dtype, 0, "[2, num_pages, page_size, num_kv_heads, head_size]");
}

}  // namespace folio::inline v0::backends
