#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "folio/backends/capability.hpp"
#include "folio/backends/engine_config.hpp"
#include "folio/backends/flash_attn/version.hpp"
#include "folio/types/dtype.hpp"
#include "folio/types/export.hpp"
#include "folio/types/kv_cache.hpp"
#include "folio/types/tensor_view.hpp"

namespace folio::inline v0::backends {

class FlashAttentionImpl;
class FlashAttentionMetadataBuilder;

/// What the backend's answers depend on, stated by the caller. The native profile needs none of it: it says what
/// Folio's own kernels do, on every device.
struct FlashAttentionFacts {
  BackendProfile profile = BackendProfile::kNative;
  FlashAttentionPlatform platform;
  bool is_varlen_func_available = true;  ///< vLLM: always with CUDA and XPU, with ROCm where flash-attn is installed
  bool is_hybrid_model = false;          ///< attention layers and state-space layers share pages
  std::string mamba_cache_dtype = "auto";
  std::string mamba_ssm_cache_dtype = "auto";
};

/// vLLM's FlashAttention backend: what it is called, what it takes and how its KV cache lies in memory. Stateless.
/// The cache's logical shape is [2, num_pages, page_size, num_kv_heads, head_size], K at index 0 of the first dimension
/// and V at 1; the layout only changes the strides. Profiles are kNative and kVllm2026_03; others throw kUnsupported.
struct FOLIO_API FlashAttentionBackend {
  using Impl = FlashAttentionImpl;                ///< get_impl_cls
  using Builder = FlashAttentionMetadataBuilder;  ///< get_builder_cls

  /// The backend writes into an output that the engine allocates.
  static constexpr bool accept_output_buffer = true;
  /// The new keys and values are written by a call of their own, before `forward`.
  static constexpr bool forward_includes_kv_cache_update = false;

  /// "FLASH_ATTN".
  static std::string_view get_name() noexcept;

  /// Everything that the backend takes, as values: what validate_configuration and the selection of a backend read.
  static BackendCapability capability(const FlashAttentionFacts& facts);
  /// Every reason why the requirements cannot be met, see backends::validate_configuration; empty = they can.
  static std::vector<std::string> validate_configuration(const AttentionRequirements& requirements,
                                                         const FlashAttentionFacts& facts);

  /// Model dtypes. vLLM: float16, bfloat16; native: float32 too.
  static std::span<const DType> supported_dtypes(BackendProfile profile = BackendProfile::kNative);
  /// The list that does not depend on the device. vLLM: auto, float16, bfloat16; native: fp8's names and float32 too.
  static std::span<const std::string_view> supported_kv_cache_dtypes(BackendProfile profile = BackendProfile::kNative);
  /// That list, and vLLM: every name of fp8 where version 3 runs on a 9.x. (It takes fp8_e5m2 here and refuses it in
  /// get_fp8_dtype_for_flashattn.)
  static bool supports_kv_cache_dtype(const std::optional<std::string>& kv_cache_dtype,
                                      const FlashAttentionFacts& facts);
  /// Tokens per page that kernels take. vLLM: multiples of 16; 16, 32 and 64 for hybrid models with float32 states,
  /// whose stale bits would be NaNs to kernels that load whole tiles. Native: any (what a request does not own is never
  /// read for its value).
  static std::span<const PageSizeRule> get_supported_kernel_page_sizes(const FlashAttentionFacts& facts);
  /// The default where it is supported; at least 64 on XPU.
  static int32_t get_preferred_page_size(int32_t default_page_size, const FlashAttentionFacts& facts);
  /// Multiples of 8 up to 256.
  static bool supports_head_size(int32_t head_size) noexcept;
  static bool supports_attn_type(AttentionType type) noexcept;  ///< all four
  static bool supports_non_causal() noexcept;                   ///< true
  /// vLLM: from version 3 on; native: always.
  static bool supports_per_head_quant_scales(const FlashAttentionFacts& facts);
  /// vLLM: where the kernel takes sinks, see flash_attn_supports_sinks; native: always.
  static bool supports_sink(const FlashAttentionFacts& facts);
  /// vLLM: from 8.0 on; native: every device.
  static bool supports_compute_capability(const ComputeDevice& device,
                                          BackendProfile profile = BackendProfile::kNative);
  /// The reason why a combination is not taken though each part is; none if it is. vLLM: sinks below 9.0.
  static std::optional<std::string> supports_combination(bool has_sinks, const ComputeDevice& device,
                                                         BackendProfile profile = BackendProfile::kNative);
  /// vLLM: kAlways with version 3, otherwise kUniformBatch (graphs captured with single tokens would pack groups of
  /// heads, which is wrong for mixed batches). Native: kAlways; plans have a fixed shape for any batch.
  static GraphSupport get_cudagraph_support(const FlashAttentionFacts& facts);

  /// Throws kInvalidArgument for page sizes that the profile does not take; vLLM: "Block size must be a multiple of
  /// 16."
  static std::array<int64_t, 5> get_kv_cache_shape(int64_t num_pages, int32_t page_size, int32_t num_kv_heads,
                                                   int32_t head_size, BackendProfile profile = BackendProfile::kNative);
  /// 1: which dimension of that shape counts pages.
  static int32_t get_kv_cache_page_dim();
  /// Which logical dimension stands at each physical position, outermost first.
  static std::array<int32_t, 5> get_kv_cache_stride_order(KvCacheLayout layout);
  /// The same with a leading logical dimension of layers: NHD is [pages, layers, 2, tokens, heads, dim], HND is
  /// [pages, heads, layers, 2, tokens, dim].
  static std::array<int32_t, 6> get_layered_kv_cache_stride_order(KvCacheLayout layout);

  /// fp8 and fp8_e4m3 are e4m3; native: fp8_e5m2 is e5m2; any other name throws kInvalidArgument.
  static DType get_fp8_dtype_for_flashattn(std::string_view kv_cache_dtype,
                                           BackendProfile profile = BackendProfile::kNative);

  /// The logical view over packed memory in that layout.
  static TensorView kv_cache_tensor(void* data, DType dtype, const std::array<int64_t, 5>& shape, KvCacheLayout layout);
  /// The core's view of a cache given as one tensor of logical shape and any strides. `dtype` is what the bytes mean;
  /// the tensor's own is either that or kUnset (storage without a type). Throws kInvalidArgument naming what does not
  /// fit.
  static KvCacheView kv_cache_view(const TensorView& kv_cache, DType dtype);
};

}  // namespace folio::inline v0::backends
