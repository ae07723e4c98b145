#include "folio/backends/flashinfer/backend.hpp"

#include <algorithm>
#include <string>

#include "backends/common/kv_cache_tensor.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends {
namespace {

constexpr std::array<DType, 3> kDtypes{DType::kFloat16, DType::kBFloat16, DType::kFloat32};
/// The first 4 are those of 2025, the first 6 those of March 2026.
constexpr std::array<std::string_view, 7> kKvCacheDtypes{"auto",    "fp8",      "fp8_e4m3", "fp8_e5m2",
                                                         "float16", "bfloat16", "float32"};
constexpr std::array<int32_t, 3> kVllmHeadSizes{64, 128, 256};
constexpr std::array<PageSizeRule, 3> kVllmPageSizes{PageSizeRule{16}, PageSizeRule{32}, PageSizeRule{64}};
constexpr std::array<PageSizeRule, 1> kAnyPageSize{PageSizeRule{1, true}};

constexpr std::array<AttentionType, 1> kAttentionTypes{AttentionType::kDecoder};
constexpr DeviceCapability kLeastCapability{7, 5};
constexpr DeviceCapability kGreatestCapability{12, 1};

/// The versions of vLLM whose backend says which devices, pages and sinks it takes.
bool has_capability_queries(BackendProfile profile) {
  return profile == BackendProfile::kVllm2025_12 || profile == BackendProfile::kVllm2026_03;
}

std::string list(std::span<const int32_t> values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); ++i) {
    core::append(text, i > 0 ? ", " : "");
    core::append(text, values[i]);
  }
  return text + "]";
}

}  // namespace

std::string_view FlashInferBackend::get_name(BackendProfile profile) {
  return profile == BackendProfile::kVllm2025_07 ? "FLASHINFER_VLLM_V1" : "FLASHINFER";
}

BackendCapability FlashInferBackend::capability(const FlashInferFacts& facts) {
  const BackendProfile profile = facts.profile;
  BackendCapability result;
  result.name = get_name(profile);
  result.dtypes = supported_dtypes(profile);
  result.kv_cache_dtypes = supported_kv_cache_dtypes(profile);
  result.head_sizes = get_supported_head_sizes(profile);
  result.page_sizes = get_supported_kernel_page_sizes(profile);
  result.attn_types = kAttentionTypes;
  result.supports_sink = supports_sink(facts);
  result.supports_per_head_quant_scales = profile == BackendProfile::kNative;
  result.supports_batch_invariance = profile != BackendProfile::kVllm2025_07;
  result.required_layout = get_required_kv_cache_layout(facts);
  if (has_capability_queries(profile)) {
    result.min_capability = kLeastCapability;
    result.max_capability = kGreatestCapability;
  } else if (profile == BackendProfile::kVllm2025_07) {
    result.min_capability = DeviceCapability{};  // a GPU, any
  }
  return result;
}

std::vector<std::string> FlashInferBackend::validate_configuration(const AttentionRequirements& requirements,
                                                                   const FlashInferFacts& facts) {
  return backends::validate_configuration(capability(facts), requirements);
}

std::span<const DType> FlashInferBackend::supported_dtypes(BackendProfile profile) {
  return std::span(kDtypes).first(profile == BackendProfile::kNative ? 3 : 2);
}

std::span<const std::string_view> FlashInferBackend::supported_kv_cache_dtypes(BackendProfile profile) {
  if (profile == BackendProfile::kNative) return kKvCacheDtypes;
  return std::span(kKvCacheDtypes).first(profile == BackendProfile::kVllm2026_03 ? 6 : 4);
}

std::span<const int32_t> FlashInferBackend::get_supported_head_sizes(BackendProfile profile) {
  if (profile == BackendProfile::kNative) return kNativeHeadSizes;
  return kVllmHeadSizes;
}

std::span<const PageSizeRule> FlashInferBackend::get_supported_kernel_page_sizes(BackendProfile profile) {
  if (has_capability_queries(profile)) return kVllmPageSizes;
  return kAnyPageSize;
}

bool FlashInferBackend::supports_head_size(int32_t head_size, BackendProfile profile) {
  return std::ranges::count(get_supported_head_sizes(profile), head_size) > 0;
}

bool FlashInferBackend::supports_page_size(int32_t page_size, BackendProfile profile) {
  return page_size > 0 && std::ranges::any_of(get_supported_kernel_page_sizes(profile),
                                              [&](const PageSizeRule& rule) { return page_size % rule.value == 0; });
}

int32_t FlashInferBackend::get_preferred_page_size(int32_t default_page_size, BackendProfile profile) {
  FlashInferFacts facts;
  facts.profile = profile;
  return capability(facts).get_preferred_page_size(default_page_size);
}

bool FlashInferBackend::supports_compute_capability(const ComputeDevice& device, BackendProfile profile) {
  FlashInferFacts facts;
  facts.profile = profile;
  return capability(facts).supports_compute_capability(device);
}

bool FlashInferBackend::supports_sink(const FlashInferFacts& facts) {
  if (facts.profile == BackendProfile::kNative) return true;
  return has_capability_queries(facts.profile) && facts.use_block_table_kernels.value_or(true) &&
         facts.supports_block_table_kernels;
}

bool FlashInferBackend::supports_attn_type(AttentionType type) noexcept {
  return type == AttentionType::kDecoder;
}

std::optional<KvCacheLayout> FlashInferBackend::get_required_kv_cache_layout(const FlashInferFacts& facts) {
  const std::optional<DeviceCapability>& device = facts.device.capability;
  if (has_capability_queries(facts.profile) && device && device->major == 10) return KvCacheLayout::kHnd;
  return std::nullopt;
}

GraphSupport FlashInferBackend::get_cudagraph_support(const FlashInferFacts& facts, int32_t num_qo_heads,
                                                      std::span<const int32_t> num_kv_heads) {
  for (int32_t heads : num_kv_heads) core::require(heads > 0, "num_kv_heads is ", heads, "; it must be at least 1");
  if (facts.profile == BackendProfile::kNative) {
    // On a CPU a graph is a plan like any other; on a GPU decodes have plans whose memory stays.
    return facts.device.platform == Platform::kCuda ? GraphSupport::kUniformBatch : GraphSupport::kAlways;
  }
  if (facts.profile == BackendProfile::kVllm2025_07) return GraphSupport::kNever;
  // December 2025 asks about one group of layers, the builder's; March 2026 about all.
  const auto groups = facts.profile == BackendProfile::kVllm2026_03
                          ? num_kv_heads
                          : num_kv_heads.first(std::min<size_t>(num_kv_heads.size(), 1));
  const bool serves_all = facts.supports_block_table_kernels && facts.use_block_table_kernels.value_or(true) &&
                          std::ranges::all_of(groups, [&](int32_t heads) { return num_qo_heads % heads == 0; });
  return serves_all ? GraphSupport::kUniformBatch : GraphSupport::kUniformSingleTokenDecode;
}

void FlashInferBackend::validate_head_size(int32_t head_size, BackendProfile profile) {
  core::require(
      supports_head_size(head_size, profile), "Head size ", head_size,
      " is not supported by FlashInfer. Supported head sizes are: ", list(get_supported_head_sizes(profile)),
      ". Set VLLM_ATTENTION_BACKEND=FLEX_ATTENTION to use FlexAttention backend which supports all head sizes.");
}

std::array<int64_t, 5> FlashInferBackend::get_kv_cache_shape(int64_t num_pages, int32_t page_size, int32_t num_kv_heads,
                                                             int32_t head_size) {
  return {num_pages, 2, page_size, num_kv_heads, head_size};
}

int32_t FlashInferBackend::get_kv_cache_page_dim() {
  return kv_cache_page_dim(get_kv_cache_shape, 16, 1, 8);
}

std::array<int32_t, 5> FlashInferBackend::get_kv_cache_stride_order(KvCacheLayout layout) {
  require_layout(layout);
  if (layout == KvCacheLayout::kHnd) return {0, 1, 3, 2, 4};
  return {0, 1, 2, 3, 4};
}

std::array<int32_t, 6> FlashInferBackend::get_layered_kv_cache_stride_order(KvCacheLayout layout) {
  require_layout(layout);
  if (layout == KvCacheLayout::kHnd) return {1, 2, 4, 0, 3, 5};
  return {1, 0, 2, 3, 4, 5};
}

DType FlashInferBackend::get_fp8_dtype_for_flashinfer(std::string_view kv_cache_dtype) {
  if (kv_cache_dtype == "fp8" || kv_cache_dtype == "fp8_e4m3") return DType::kFloat8E4M3;
  if (kv_cache_dtype == "fp8_e5m2") return DType::kFloat8E5M2;
  core::fail(ErrorCode::kInvalidArgument, "Unrecognized FP8 dtype: ", kv_cache_dtype);
}

TensorView FlashInferBackend::kv_cache_tensor(void* data, DType dtype, const std::array<int64_t, 5>& shape,
                                              KvCacheLayout layout) {
  return permuted_tensor(data, dtype, shape, get_kv_cache_stride_order(layout));
}

KvCacheView FlashInferBackend::kv_cache_view(const TensorView& kv_cache, DType dtype) {
  return view_of_cache_tensor(kv_cache, dtype, 1, "[num_pages, 2, page_size, num_kv_heads, head_size]");
}

}  // namespace folio::inline v0::backends
