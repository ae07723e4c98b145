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
#include "folio/types/dtype.hpp"
#include "folio/types/export.hpp"
#include "folio/types/kv_cache.hpp"
#include "folio/types/tensor_view.hpp"

namespace folio::inline v0::backends {

class FlashInferImpl;
class FlashInferMetadataBuilder;

/// What the backend's answers depend on, stated by the caller. The native profile needs none of it: it says what
/// Folio's own kernels do, on every device.
struct FlashInferFacts {
  BackendProfile profile = BackendProfile::kNative;
  ComputeDevice device;
  /// What supports_trtllm_attention (folio/backends/dispatch.hpp) answers: kernels that take block tables are there.
  bool supports_block_table_kernels = false;
  std::optional<bool> use_block_table_kernels;  ///< as in EngineConfig: forced on or off
};

/// What the backend is called, what it takes and how its KV cache lies in memory. Stateless.
/// The cache's logical shape is [num_pages, 2, page_size, num_kv_heads, head_size], K at index 0 of the second
/// dimension and V at 1; the layout only changes the strides.
struct FOLIO_API FlashInferBackend {
  using Impl = FlashInferImpl;                ///< get_impl_cls
  using Builder = FlashInferMetadataBuilder;  ///< get_builder_cls

  /// The backend writes into an output that the engine allocates.
  static constexpr bool accept_output_buffer = true;
  /// Whether the new keys and values are written inside `forward`: in Folio's and in the vLLM of 2025; in March 2026 by
  /// a call of their own before it, FlashInferImpl::do_kv_cache_update.
  static constexpr bool forward_includes_kv_cache_update(BackendProfile profile = BackendProfile::kNative) noexcept {
    return profile != BackendProfile::kVllm2026_03;
  }

  /// "FLASHINFER"; "FLASHINFER_VLLM_V1" in July 2025.
  static std::string_view get_name(BackendProfile profile = BackendProfile::kNative);

  /// Model dtypes. vLLM: float16, bfloat16; native: float32 too.
  static std::span<const DType> supported_dtypes(BackendProfile profile = BackendProfile::kNative);

  /// Everything that the backend takes, as values: what validate_configuration and the selection of a backend read.
  static BackendCapability capability(const FlashInferFacts& facts);
  /// Every reason why the requirements cannot be met, see backends::validate_configuration; empty = they can. (July
  /// 2025 had no such function; the profile gives what that version's properties amount to.)
  static std::vector<std::string> validate_configuration(const AttentionRequirements& requirements,
                                                         const FlashInferFacts& facts);

  /// Names of KV cache dtypes, see kv_cache_dtype_from_name. vLLM (2025): auto and fp8's names; March 2026: float16 and
  /// bfloat16 too; native: float32 too.
  static std::span<const std::string_view> supported_kv_cache_dtypes(BackendProfile profile = BackendProfile::kNative);

  /// Head sizes. vLLM: 64, 128, 256 (the sizes FlashInfer's dispatch macros instantiate); native: multiples of 8 up to
  /// 256.
  static std::span<const int32_t> get_supported_head_sizes(BackendProfile profile = BackendProfile::kNative);

  /// Tokens per page that kernels take; an engine's own pages may be multiples of them. vLLM (from December 2025 on):
  /// 16, 32, 64; July 2025 did not restrict them, nor does native.
  static std::span<const PageSizeRule> get_supported_kernel_page_sizes(
      BackendProfile profile = BackendProfile::kNative);

  static bool supports_head_size(int32_t head_size, BackendProfile profile = BackendProfile::kNative);
  /// True for a multiple of any supported kernel page size.
  static bool supports_page_size(int32_t page_size, BackendProfile profile = BackendProfile::kNative);

  /// The default where it is supported, otherwise the smallest kernel page.
  static int32_t get_preferred_page_size(int32_t default_page_size, BackendProfile profile = BackendProfile::kNative);
  /// vLLM (from December 2025 on): 7.5 to 12.1; July 2025: any GPU; native: every device.
  static bool supports_compute_capability(const ComputeDevice& device,
                                          BackendProfile profile = BackendProfile::kNative);
  /// vLLM: where kernels that take block tables are available and not forced off; July 2025: no; native: yes.
  static bool supports_sink(const FlashInferFacts& facts);
  /// Decoders only.
  static bool supports_attn_type(AttentionType type) noexcept;
  /// vLLM: HND on 10.x (not in July 2025); native: none, every kernel takes both.
  static std::optional<KvCacheLayout> get_required_kv_cache_layout(const FlashInferFacts& facts);
  /// vLLM: kUniformBatch where the kernels that take block tables can serve these heads, in March 2026 those of every
  /// group of layers, otherwise kUniformSingleTokenDecode; July 2025: kNever. Native: kUniformBatch on a GPU, where
  /// decodes have plans whose memory stays; kAlways elsewhere. `num_kv_heads` has an entry for each group of layers.
  static GraphSupport get_cudagraph_support(const FlashInferFacts& facts, int32_t num_qo_heads,
                                            std::span<const int32_t> num_kv_heads);

  /// Throws kInvalidArgument, with July 2025's text, for an unsupported head size.
  static void validate_head_size(int32_t head_size, BackendProfile profile = BackendProfile::kNative);

  static std::array<int64_t, 5> get_kv_cache_shape(int64_t num_pages, int32_t page_size, int32_t num_kv_heads,
                                                   int32_t head_size);

  /// 0: which dimension of that shape counts pages.
  static int32_t get_kv_cache_page_dim();
  /// Which logical dimension stands at each physical position, outermost first.
  static std::array<int32_t, 5> get_kv_cache_stride_order(KvCacheLayout layout);
  /// The same with a leading logical dimension of layers: one memory for all layers. NHD is [pages, layers, 2,
  /// tokens, heads, dim], HND is [pages, 2, heads, layers, tokens, dim].
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
