#include "folio/backends/flashinfer/backend.hpp"

#include <algorithm>
#include <cstddef>
#include <string>

#include "core/checked_math.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends {
namespace {

constexpr std::array<DType, 3> kDtypes{DType::kFloat16, DType::kBFloat16, DType::kFloat32};
constexpr std::array<std::string_view, 7> kKvCacheDtypes{"auto",    "fp8",      "fp8_e4m3", "fp8_e5m2",
                                                         "float16", "bfloat16", "float32"};
constexpr std::array<int32_t, 3> kVllmHeadSizes{64, 128, 256};
constexpr std::array<PageSizeRule, 3> kVllmPageSizes{PageSizeRule{16}, PageSizeRule{32}, PageSizeRule{64}};
constexpr std::array<PageSizeRule, 1> kAnyPageSize{PageSizeRule{1, true}};

/// Multiples of 8 up to 256.
constexpr std::array<int32_t, 32> native_head_sizes() {
  std::array<int32_t, 32> sizes{};
  for (size_t i = 0; i < sizes.size(); ++i) sizes[i] = static_cast<int32_t>(8 * (i + 1));
  return sizes;
}
constexpr std::array<int32_t, 32> kNativeHeadSizes = native_head_sizes();

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

std::span<const DType> FlashInferBackend::supported_dtypes(BackendProfile profile) {
  return std::span(kDtypes).first(profile == BackendProfile::kNative ? 3 : 2);
}

std::span<const std::string_view> FlashInferBackend::supported_kv_cache_dtypes(BackendProfile profile) {
  return std::span(kKvCacheDtypes).first(profile == BackendProfile::kNative ? 7 : 4);
}

std::span<const int32_t> FlashInferBackend::get_supported_head_sizes(BackendProfile profile) {
  if (profile == BackendProfile::kNative) return kNativeHeadSizes;
  return kVllmHeadSizes;
}

std::span<const PageSizeRule> FlashInferBackend::get_supported_kernel_page_sizes(BackendProfile profile) {
  if (profile == BackendProfile::kVllm2025_12) return kVllmPageSizes;
  return kAnyPageSize;
}

bool FlashInferBackend::supports_head_size(int32_t head_size, BackendProfile profile) {
  return std::ranges::count(get_supported_head_sizes(profile), head_size) > 0;
}

bool FlashInferBackend::supports_page_size(int32_t page_size, BackendProfile profile) {
  return page_size > 0 && std::ranges::any_of(get_supported_kernel_page_sizes(profile),
                                              [&](const PageSizeRule& rule) { return page_size % rule.value == 0; });
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

std::array<int32_t, 5> FlashInferBackend::get_kv_cache_stride_order(KvCacheLayout layout) {
  if (layout == KvCacheLayout::kHnd) return {0, 1, 3, 2, 4};
  return {0, 1, 2, 3, 4};
}

std::array<int32_t, 6> FlashInferBackend::get_layered_kv_cache_stride_order(KvCacheLayout layout) {
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
  TensorView tensor;
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.rank = 5;
  tensor.shape = shape;
  const std::array<int32_t, 5> order = get_kv_cache_stride_order(layout);
  int64_t stride = 1;
  for (size_t position = order.size(); position-- > 0;) {
    const auto dimension = static_cast<size_t>(order[position]);
    tensor.strides[dimension] = stride;
    stride *= shape[dimension];
  }
  return tensor;
}

KvCacheView FlashInferBackend::kv_cache_view(const TensorView& kv_cache, DType dtype) {
  core::require(kv_cache.rank == 5, "kv_cache has rank ", kv_cache.rank,
                "; its logical shape is [num_pages, 2, page_size, num_kv_heads, head_size]");
  core::require(kv_cache.shape[1] == 2, "dimension 1 of kv_cache has ", kv_cache.shape[1],
                " entries; it holds K and V");
  core::require(kv_cache.dtype == DType::kUnset || kv_cache.dtype == dtype, "kv_cache is ", kv_cache.dtype,
                "; the layer's cache dtype is ", dtype);
  core::require(kv_cache.strides[4] == 1, "kv_cache has stride ", kv_cache.strides[4],
                " between components; it must be 1");
  KvCacheView view;
  view.dtype = dtype;
  view.k = kv_cache.data;
  view.v = static_cast<std::byte*>(kv_cache.data) + kv_cache.strides[1] * size_of(dtype);
  view.num_pages = kv_cache.shape[0];
  view.page_size = core::checked_cast<int32_t>(kv_cache.shape[2]);
  view.num_kv_heads = core::checked_cast<int32_t>(kv_cache.shape[3]);
  view.head_dim_qk = core::checked_cast<int32_t>(kv_cache.shape[4]);
  view.head_dim_v = view.head_dim_qk;
  view.k_strides = {kv_cache.strides[0], kv_cache.strides[2], kv_cache.strides[3]};
  view.v_strides = view.k_strides;
  return view;
}

}  // namespace folio::inline v0::backends
