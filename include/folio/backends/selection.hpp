#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "folio/backends/capability.hpp"
#include "folio/backends/engine_config.hpp"
#include "folio/types/export.hpp"

namespace folio::inline v0::backends {

/// A backend that an engine could use.
struct BackendCandidate {
  std::string name;
  std::optional<BackendCapability> capability;  ///< none: not part of this build, which counts as "ImportError"
};

/// The order in which vLLM tries its backends for layers without latent attention: on 10.x FLASHINFER, FLASH_ATTN,
/// TRITON_ATTN, FLEX_ATTENTION; elsewhere FLASH_ATTN before FLASHINFER.
FOLIO_API std::span<const std::string_view> backend_priorities(const ComputeDevice& device);

/// Why a candidate was passed over.
struct RejectedBackend {
  std::string_view name;  ///< of backend_priorities
  std::vector<std::string> reasons;
};

struct SelectedBackend {
  std::string name;
  /// What the cache's layout must be; give it to resolve_kv_cache_layout. None: any.
  std::optional<KvCacheLayout> required_layout;
  int32_t page_size = 0;                  ///< the one asked for, or what the backend prefers to the default of 16
  std::vector<RejectedBackend> rejected;  ///< those tried before it
};

/// The first backend in order of priority that has no reason against the requirements; only `chosen` is tried where it
/// is given. Names without a candidate count as "ImportError". Throws kInvalidArgument: "Selected backend X is not
/// valid for this configuration. Reason: [...]" or "No valid attention backend found for <platform>. Reasons: {...}".
FOLIO_API SelectedBackend select_backend(const AttentionRequirements& requirements,
                                         std::span<const BackendCandidate> candidates,
                                         const std::optional<std::string>& chosen = std::nullopt);

/// Where a layout came from.
enum class KvCacheLayoutSource : int32_t { kRequired = 0, kConfigured = 1, kKvConnector = 2, kDefault = 3 };

/// Who has a say in the layout, the strongest first.
struct KvCacheLayoutRequests {
  std::optional<KvCacheLayout> required;      ///< by the selected backend
  std::optional<KvCacheLayout> configured;    ///< by the user (VLLM_KV_CACHE_LAYOUT)
  std::optional<KvCacheLayout> kv_connector;  ///< preferred by what moves caches between machines
};

struct ResolvedKvCacheLayout {
  KvCacheLayout layout = KvCacheLayout::kNhd;
  KvCacheLayoutSource source = KvCacheLayoutSource::kDefault;
  bool overrules_configured = false;  ///< the user asked for the other one
};

/// The strongest request; NHD without any. A pure function of its argument: put the result into CacheConfig::layout,
/// which nothing changes afterwards. (The original remembers the first answer of the process, so that later requests
/// are lost.)
FOLIO_API ResolvedKvCacheLayout resolve_kv_cache_layout(const KvCacheLayoutRequests& requests);

}  // namespace folio::inline v0::backends
