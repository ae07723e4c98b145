#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "folio/backends/attention_layer.hpp"
#include "folio/backends/engine_config.hpp"
#include "folio/types/dtype.hpp"
#include "folio/types/export.hpp"

namespace folio::inline v0::backends {

/// Where an engine runs, in the words of engines.
enum class Platform : int32_t { kCpu = 0, kCuda = 1, kRocm = 2, kXpu = 3 };

/// A GPU's compute capability; 9.0 is a Hopper. Compares by major, then minor.
struct DeviceCapability {
  int32_t major = 0;
  int32_t minor = 0;
  friend constexpr auto operator<=>(const DeviceCapability&, const DeviceCapability&) = default;
  /// 90 for 9.0, 103 for 10.3.
  constexpr int32_t to_int() const noexcept { return major * 10 + minor; }
  /// Whether it is of the family that `family` (90, 100, ...) begins: the same major number.
  constexpr bool is_family(int32_t family) const noexcept { return major == family / 10; }
};

/// The device that attention is to run on, as a fact that the caller states: nothing here looks at the machine.
struct ComputeDevice {
  Platform platform = Platform::kCpu;
  std::optional<DeviceCapability> capability;  ///< none where the platform has no such number: a CPU
  friend bool operator==(const ComputeDevice&, const ComputeDevice&) = default;
};

/// A page size a backend takes: `value` alone, or every multiple of it.
struct PageSizeRule {
  int32_t value = 1;
  bool multiples = false;
  friend bool operator==(const PageSizeRule&, const PageSizeRule&) = default;
};

/// Which batches a backend's metadata can be replayed from a captured graph for. Ordered: each level includes those
/// below. Batches with a shared prefix (cascade) are never replayed.
enum class GraphSupport : int32_t {
  kNever = 0,
  kUniformSingleTokenDecode = 1,  ///< every request has one query token
  kUniformBatch = 2,              ///< every request has equally many: one and its drafts, say
  kAlways = 3,                    ///< any batch within the captured sizes, mixed ones too
};

/// What an engine asks of a backend for one group of layers.
struct AttentionRequirements {
  int32_t head_size = 0;
  DType dtype = DType::kBFloat16;
  std::optional<std::string> kv_cache_dtype;  ///< see kv_cache_dtype_from_name; none = not asked
  std::optional<int32_t> page_size;           ///< tokens of an engine's page, where the user chose it; none = not asked
  bool use_mla = false;                       ///< multi-head latent attention
  bool has_sinks = false;
  bool use_sparse = false;
  bool use_mm_prefix = false;  ///< full attention among the tokens of an image in a causal prompt
  bool use_per_head_quant_scales = false;
  ComputeDevice device;
  AttentionType attn_type = AttentionType::kDecoder;
  bool use_non_causal = false;  ///< non-causal attention over a paged cache in a decoder
  bool use_batch_invariant = false;
  bool use_kv_connector = false;  ///< caches that are moved between machines
};

/// What one backend takes, under one profile and on one device: values only, borrowed from constants. The defaults are
/// those of vLLM's abstract backend.
struct BackendCapability {
  std::string_view name;
  std::span<const DType> dtypes;                      ///< of the model
  std::span<const std::string_view> kv_cache_dtypes;  ///< empty = any
  std::span<const int32_t> head_sizes;                ///< empty = any
  std::span<const PageSizeRule> page_sizes;           ///< of the kernels; empty = any
  int32_t least_preferred_page_size = 0;  ///< where positive, the larger of this and the default is preferred
  std::span<const AttentionType> attn_types;
  std::optional<DeviceCapability> min_capability;            ///< none: any device, CPUs too
  std::optional<DeviceCapability> max_capability;            ///< none: no upper limit
  std::optional<DeviceCapability> min_capability_for_sinks;  ///< asked of devices after all else, as a combination
  bool is_mla = false;
  bool is_sparse = false;
  bool is_ssm = false;
  bool supports_sink = false;
  bool supports_alibi_sqrt = false;
  bool supports_mm_prefix = false;
  bool supports_per_head_quant_scales = false;
  bool supports_non_causal = false;
  bool supports_batch_invariance = false;
  bool supports_kv_connector = true;
  std::optional<KvCacheLayout> required_layout;  ///< none: the engine's choice

  FOLIO_API bool supports_head_size(int32_t head_size) const noexcept;
  FOLIO_API bool supports_dtype(DType dtype) const noexcept;
  FOLIO_API bool supports_kv_cache_dtype(const std::optional<std::string>& name) const noexcept;
  /// A multiple of any of the kernels' sizes: an engine's page may be several of the kernel's.
  FOLIO_API bool supports_page_size(std::optional<int32_t> page_size) const noexcept;
  FOLIO_API bool supports_attn_type(AttentionType type) const noexcept;
  FOLIO_API bool supports_compute_capability(const ComputeDevice& device) const noexcept;
  /// `default_page_size` where it is supported, otherwise the smallest of the kernels' sizes.
  FOLIO_API int32_t get_preferred_page_size(int32_t default_page_size) const noexcept;
  /// Why a combination is not taken though each part is: "sink not supported on compute capability < 9.0". None if it
  /// is taken.
  FOLIO_API std::optional<std::string> combination_refusal(bool has_sinks, const ComputeDevice& device) const;
};

/// Every reason why the backend cannot serve those requirements, in vLLM's order and words; empty = it can:
/// "head_size not supported", "dtype not supported", "kv_cache_dtype not supported", "block_size not supported",
/// "partial multimodal token full attention not supported", "MLA not supported" or "non-MLA not supported", "attention
/// sinks not supported", "sparse not supported" or "non-sparse not supported", "per-head quant scales not supported",
/// "compute capability not supported", "attention type X not supported", "non-causal attention not supported", "batch
/// invariance not supported", "KV connector not supported", and last what only a combination rules out.
FOLIO_API std::vector<std::string> validate_configuration(const BackendCapability& backend,
                                                          const AttentionRequirements& requirements);

/// "decoder", "encoder", "encoder_only", "encoder_decoder"; "invalid" for any other value.
FOLIO_API std::string_view to_string(AttentionType type);
/// "cpu", "cuda", "rocm", "xpu"; "invalid" for any other value.
FOLIO_API std::string_view to_string(Platform platform);
/// "NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS"; "invalid" for any other value.
FOLIO_API std::string_view to_string(GraphSupport support);

/// Which dimension of a backend's KV cache counts pages, found by asking its shape function for a number of pages that
/// nothing else can be. -1 if none does.
template <typename ShapeFunction>
int32_t kv_cache_page_dim(ShapeFunction&& shape_of, int32_t page_size, int32_t num_kv_heads, int32_t head_size) {
  constexpr int64_t kNumPages = 1234567;
  const auto shape = shape_of(kNumPages, page_size, num_kv_heads, head_size);
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] == kNumPages) return static_cast<int32_t>(i);
  }
  return -1;
}

/// Whether pages of a cache that holds all layers are found by a page stride: its stride order (which logical dimension
/// stands at each physical position, layers being logical dimension 0) does not keep layers outermost.
constexpr bool indexes_kv_by_page_stride(std::span<const int32_t> layered_stride_order) noexcept {
  return !layered_stride_order.empty() && layered_stride_order.front() != 0;
}

}  // namespace folio::inline v0::backends
