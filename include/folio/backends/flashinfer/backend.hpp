#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "folio/backends/engine_config.hpp"
#include "folio/types/dtype.hpp"
#include "folio/types/export.hpp"
#include "folio/types/kv_cache.hpp"
#include "folio/types/tensor_view.hpp"

namespace folio::inline v0::backends {

/// A page size a backend takes: `value` alone, or every multiple of it.
struct PageSizeRule {
  int32_t value = 1;
  bool multiples = false;
  friend bool operator==(const PageSizeRule&, const PageSizeRule&) = default;
};

/// What the backend is called, what it takes and how its KV cache lies in memory. Stateless.
/// The cache's logical shape is [num_pages, 2, page_size, num_kv_heads, head_size], K at index 0 of the second
/// dimension and V at 1; the layout only changes the strides.
struct FOLIO_API FlashInferBackend {
  /// The backend writes into an output that the engine allocates.
  static constexpr bool accept_output_buffer = true;

  /// "FLASHINFER"; "FLASHINFER_VLLM_V1" in July 2025.
  static std::string_view get_name(BackendProfile profile = BackendProfile::kNative);

  /// Model dtypes. vLLM: float16, bfloat16; native: float32 too.
  static std::span<const DType> supported_dtypes(BackendProfile profile = BackendProfile::kNative);

  /// Names of KV cache dtypes, see kv_cache_dtype_from_name.
  static std::span<const std::string_view> supported_kv_cache_dtypes(BackendProfile profile = BackendProfile::kNative);

  /// Head sizes. vLLM: 64, 128, 256 (the sizes FlashInfer's dispatch macros instantiate); native: multiples of 8 up to
  /// 256.
  static std::span<const int32_t> get_supported_head_sizes(BackendProfile profile = BackendProfile::kNative);

  /// Tokens per page that kernels take; an engine's own pages may be multiples of them. vLLM (December 2025): 16, 32,
  /// 64; July 2025 did not restrict them, nor does native.
  static std::span<const PageSizeRule> get_supported_kernel_page_sizes(
      BackendProfile profile = BackendProfile::kNative);

  static bool supports_head_size(int32_t head_size, BackendProfile profile = BackendProfile::kNative);
  /// True for a multiple of any supported kernel page size.
  static bool supports_page_size(int32_t page_size, BackendProfile profile = BackendProfile::kNative);

  /// Throws kInvalidArgument, with July 2025's text, for an unsupported head size.
  static void validate_head_size(int32_t head_size, BackendProfile profile = BackendProfile::kNative);

  static std::array<int64_t, 5> get_kv_cache_shape(int64_t num_pages, int32_t page_size, int32_t num_kv_heads,
                                                   int32_t head_size);

  /// Which logical dimension stands at each physical position, outermost first.
  static std::array<int32_t, 5> get_kv_cache_stride_order(KvCacheLayout layout);
  /// The same with a leading logical dimension of layers: one memory for all layers, each page's layers side by side.
  static std::array<int32_t, 6> get_layered_kv_cache_stride_order(KvCacheLayout layout);

  /// fp8 and fp8_e4m3 are e4m3, fp8_e5m2 is e5m2; any other name throws kInvalidArgument.
  static DType get_fp8_dtype_for_flashinfer(std::string_view kv_cache_dtype);

  /// The logical view over packed memory in that layout.
  static TensorView kv_cache_tensor(void* data, DType dtype, const std::array<int64_t, 5>& shape, KvCacheLayout layout);

  /// The core's view of a cache given as one tensor of logical shape and any strides. `dtype` is what the bytes mean;
  /// the tensor's own is either that or kUnset (storage without a type). Throws kInvalidArgument naming what does not
  /// fit.
  static KvCacheView kv_cache_view(const TensorView& kv_cache, DType dtype);
};

}  // namespace folio::inline v0::backends
