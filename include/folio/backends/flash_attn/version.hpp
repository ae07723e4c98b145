#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "folio/backends/capability.hpp"
#include "folio/backends/once_log.hpp"
#include "folio/types/export.hpp"

namespace folio::inline v0::backends {

/// What decides which FlashAttention an engine of that profile would run. Facts of the caller: nothing looks at the
/// machine. Folio's own kernels have no such versions; the numbers only steer what compatible profiles answer.
struct FlashAttentionPlatform {
  ComputeDevice device;
  std::optional<int32_t> flash_attn_version;  ///< the configuration's choice; none = the device's default
  bool has_version_2 = true;                  ///< which versions the engine was built with
  bool has_version_3 = true;
  bool has_version_4 = true;
};

/// Whether that version is built and runs on the device: 2 from 8.0 on; 3 on 8.x and 9.x but 8.6 and 8.9; 4 on 10.x.
FOLIO_API bool is_fa_version_supported(int32_t version, const FlashAttentionPlatform& platform);
/// Why it is not, in a sentence; empty if it is.
FOLIO_API std::string fa_version_unsupported_reason(int32_t version, const FlashAttentionPlatform& platform);

/// The version that serves such layers. XPU: 2. ROCm and CPU: none. CUDA: 3 on 9.x, 4 on 10.x, otherwise 2; the
/// configuration's choice replaces that; then, each with a warning to `log`: 3 from 10.0 on becomes 4 or 2, ALiBi takes
/// 2, and head sizes above 128 take 2 instead of 4 from 10.0 on. None, with an error to `log`, where the result is not
/// supported.
FOLIO_API std::optional<int32_t> get_flash_attn_version(const FlashAttentionPlatform& platform,
                                                        bool requires_alibi = false,
                                                        std::optional<int32_t> head_size = std::nullopt,
                                                        const OnceLog& log = {});

/// Version 3 on 9.x.
FOLIO_API bool flash_attn_supports_fp8(const FlashAttentionPlatform& platform);
/// XPU, or version 3.
FOLIO_API bool flash_attn_supports_sinks(const FlashAttentionPlatform& platform);

}  // namespace folio::inline v0::backends
