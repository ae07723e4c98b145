#include "folio/backends/selection.hpp"

#include <algorithm>
#include <array>

#include "core/error.hpp"

namespace folio::inline v0::backends {
namespace {

constexpr int32_t kDefaultPageSize = 16;
constexpr std::array<std::string_view, 4> kOnBlackwell{"FLASHINFER", "FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION"};
constexpr std::array<std::string_view, 4> kElsewhere{"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"};

std::string joined(const std::vector<std::string>& texts, const char* quote) {
  std::string list = "[";
  for (const std::string& text : texts) {
    if (list.size() > 1) list += ", ";
    list += quote + text + quote;
  }
  return list + "]";
}

const BackendCandidate* find(std::span<const BackendCandidate> candidates, std::string_view name) {
  const auto found = std::ranges::find(candidates, name, &BackendCandidate::name);
  return found != candidates.end() && found->capability ? &*found : nullptr;
}

std::vector<std::string> reasons_against(const BackendCandidate* candidate, const AttentionRequirements& requirements) {
  if (candidate == nullptr) return {"ImportError"};
  return validate_configuration(*candidate->capability, requirements);
}

SelectedBackend selected(const BackendCandidate& candidate, const AttentionRequirements& requirements) {
  SelectedBackend result;
  result.name = candidate.name;
  result.required_layout = candidate.capability->required_layout;
  result.page_size = requirements.page_size.value_or(candidate.capability->get_preferred_page_size(kDefaultPageSize));
  return result;
}

}  // namespace

std::span<const std::string_view> backend_priorities(const ComputeDevice& device) {
  if (device.capability && device.capability->major == 10) return kOnBlackwell;
  return kElsewhere;
}

SelectedBackend select_backend(const AttentionRequirements& requirements, std::span<const BackendCandidate> candidates,
                               const std::optional<std::string>& chosen) {
  if (chosen) {
    const BackendCandidate* candidate = find(candidates, *chosen);
    const std::vector<std::string> reasons = reasons_against(candidate, requirements);
    core::require(reasons.empty(), "Selected backend ", *chosen,
                  " is not valid for this configuration. Reason: ", joined(reasons, "'"));
    return selected(*candidate, requirements);
  }
  std::vector<RejectedBackend> rejected;
  for (std::string_view name : backend_priorities(requirements.device)) {
    const BackendCandidate* candidate = find(candidates, name);
    std::vector<std::string> reasons = reasons_against(candidate, requirements);
    if (reasons.empty()) {
      SelectedBackend result = selected(*candidate, requirements);
      result.rejected = std::move(rejected);
      return result;
    }
    rejected.push_back({name, std::move(reasons)});
  }
  std::string all;
  for (const RejectedBackend& backend : rejected) {
    if (!all.empty()) all += ", ";
    all += std::string(backend.name) + ": " + joined(backend.reasons, "");
  }
  core::fail(ErrorCode::kInvalidArgument, "No valid attention backend found for ",
             to_string(requirements.device.platform), ". Reasons: {", all, "}.");
}

ResolvedKvCacheLayout resolve_kv_cache_layout(const KvCacheLayoutRequests& requests) {
  ResolvedKvCacheLayout result;
  if (requests.required) {
    result = {*requests.required, KvCacheLayoutSource::kRequired};
  } else if (requests.configured) {
    result = {*requests.configured, KvCacheLayoutSource::kConfigured};
  } else if (requests.kv_connector) {
    result = {*requests.kv_connector, KvCacheLayoutSource::kKvConnector};
  }
  result.overrules_configured = requests.configured && *requests.configured != result.layout;
  return result;
}

}  // namespace folio::inline v0::backends
