#include "folio/backends/flash_attn/version.hpp"

#include "core/error.hpp"

namespace folio::inline v0::backends {
namespace {

constexpr DeviceCapability kSm86{8, 6};
constexpr DeviceCapability kSm89{8, 9};

}  // namespace

std::string fa_version_unsupported_reason(int32_t version, const FlashAttentionPlatform& platform) {
  const bool built = version == 2   ? platform.has_version_2
                     : version == 3 ? platform.has_version_3
                     : version == 4 ? platform.has_version_4
                                    : false;
  if (version < 2 || version > 4) return core::message("there is no version ", version, "; versions are 2, 3 and 4");
  if (!built) return core::message("version ", version, " is not part of this build");
  if (!platform.device.capability) return "the device has no compute capability";
  const DeviceCapability device = *platform.device.capability;
  if (version == 2 && device.major < 8) return "version 2 takes compute capabilities from 8.0 on";
  if (version == 3 && ((device.major != 8 && device.major != 9) || device == kSm86 || device == kSm89)) {
    return "version 3 takes compute capabilities 8.x and 9.x other than 8.6 and 8.9";
  }
  if (version == 4 && device.major != 10) return "version 4 takes compute capabilities 10.x";
  return {};
}

bool is_fa_version_supported(int32_t version, const FlashAttentionPlatform& platform) {
  return fa_version_unsupported_reason(version, platform).empty();
}

std::optional<int32_t> get_flash_attn_version(const FlashAttentionPlatform& platform, bool requires_alibi,
                                              std::optional<int32_t> head_size, const OnceLog& log) {
  if (platform.device.platform == Platform::kXpu) return 2;
  if (platform.device.platform != Platform::kCuda || !platform.device.capability) return std::nullopt;
  const int32_t major = platform.device.capability->major;

  int32_t version = 2;
  if (major == 9 && is_fa_version_supported(3, platform)) version = 3;
  if (major == 10 && is_fa_version_supported(4, platform)) version = 4;
  version = platform.flash_attn_version.value_or(version);

  if (major >= 10 && version == 3) {
    log(LogLevel::kWarning,
        "Cannot use FA version 3 on Blackwell platform, defaulting to FA version 4 if supported, otherwise FA2.");
    version = is_fa_version_supported(4, platform) ? 4 : 2;
  }
  if (requires_alibi && (version == 3 || version == 4)) {
    log(LogLevel::kWarning,
        core::message("Cannot use FA version ", version, " with ALiBi, defaulting to FA version 2."));
    version = 2;
  }
  if (version == 4 && major >= 10 && head_size && *head_size > 128) {
    log(LogLevel::kWarning, core::message("FA4 on Blackwell does not support head_size=", *head_size,
                                          " due to TMEM capacity limits, defaulting to FA version 2."));
    version = 2;
  }

  const std::string refusal = fa_version_unsupported_reason(version, platform);
  if (refusal.empty()) return version;
  log(LogLevel::kError, core::message("Cannot use FA version ", version, " is not supported due to ", refusal));
  return std::nullopt;
}

bool flash_attn_supports_fp8(const FlashAttentionPlatform& platform) {
  return get_flash_attn_version(platform) == 3 && platform.device.capability &&
         platform.device.capability->is_family(90);
}

bool flash_attn_supports_sinks(const FlashAttentionPlatform& platform) {
  return platform.device.platform == Platform::kXpu || get_flash_attn_version(platform) == 3;
}

}  // namespace folio::inline v0::backends
