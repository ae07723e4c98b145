#include <algorithm>
#include <exception>

#include "backends/dispatch/dispatch_state.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends {
namespace {

constexpr int32_t kArtifactoryTimeout = 5;  // seconds: not to hold up an engine's start
constexpr int32_t kHttpOk = 200;

FamilyAnswer yes() {
  return {true, {}};
}

template <typename... Parts>
FamilyAnswer no(const Parts&... parts) {
  return {false, core::message(parts...)};
}

}  // namespace

KernelDispatch::State::State(DispatchFacts given) : facts(std::move(given)), log(facts.log) {
  const bool has_probes = facts.has_module || facts.has_attribute || facts.has_nvcc || facts.probe_artifactory;
  core::require(!native() || !has_probes,
                "the native profile asks Folio's own registry; leave has_module, has_attribute, has_nvcc and "
                "probe_artifactory empty");
}

bool KernelDispatch::State::has_module(std::string_view module) const {
  if (!native()) return facts.has_module && facts.has_module(module);
  return std::ranges::count(dispatch::folio_entry_points(), dispatch::EntryPoint{module, ""}) > 0;
}

bool KernelDispatch::State::has_attribute(std::string_view module, std::string_view attribute) const {
  if (!native()) return has_module(module) && facts.has_attribute && facts.has_attribute(module, attribute);
  return std::ranges::count(dispatch::folio_entry_points(), dispatch::EntryPoint{module, attribute}) > 0;
}

const FamilyAnswer& KernelDispatch::State::query(KernelFamily family) const {
  const auto at = static_cast<size_t>(family);
  core::require(at < dispatch::kNumFamilies, "there is no kernel family ", static_cast<int32_t>(family));
  std::call_once(looked_up[at], [&] { answers[at] = look_up(family); });
  return answers[at];
}

FamilyAnswer KernelDispatch::State::look_up(KernelFamily family) const {
  if (family == KernelFamily::kCubin) return cubin();
  if (family == KernelFamily::kFlashInfer) return flashinfer();
  if (family == KernelFamily::kArtifactory) return artifactory();
  if (family == KernelFamily::kTrtllmAttention) return trtllm_attention();
  const auto rules = dispatch::family_rules();
  return look_up(*std::ranges::find(rules, family, &dispatch::FamilyRule::family));
}

FamilyAnswer KernelDispatch::State::look_up(const dispatch::FamilyRule& rule) const {
  const FamilyAnswer& base = query(rule.base);
  if (!base.available) return base;
  if (rule.only_on && !native() && facts.device.capability != rule.only_on) {
    return no(rule.what, " are for compute capability ", rule.only_on->major, ".", rule.only_on->minor, " only");
  }
  for (const dispatch::EntryPoint& needed : rule.needs) {
    if (needed.module.empty()) break;
    const bool found =
        needed.attribute.empty() ? has_module(needed.module) : has_attribute(needed.module, needed.attribute);
    if (found) continue;
    if (native()) {
      return no("Folio has no ", rule.what, "; it has attention, KV cache writes, merges and concat_mla_k");
    }
    return no(needed.module, needed.attribute.empty() ? "" : ".", needed.attribute, " was not found");
  }
  return yes();
}

FamilyAnswer KernelDispatch::State::cubin() const {
  // Folio's kernels are compiled with it.
  if (native() || facts.has_flashinfer_cubin || has_module("flashinfer_cubin")) return yes();
  log(LogLevel::kDebug, "flashinfer-cubin package was not found");
  return no("flashinfer-cubin package was not found");
}

FamilyAnswer KernelDispatch::State::flashinfer() const {
  const auto refuse = [this](std::string_view line) {
    log(LogLevel::kDebug, line);
    return no(line);
  };
  if (!has_module("flashinfer")) return refuse("FlashInfer unavailable since package was not found");
  if (!query(KernelFamily::kCubin).available && !(facts.has_nvcc && facts.has_nvcc())) {
    return refuse("FlashInfer unavailable since nvcc was not found and not using pre-downloaded cubins");
  }
  return yes();
}

FamilyAnswer KernelDispatch::State::artifactory() const {
  if (query(KernelFamily::kCubin).available) return yes();
  const auto refuse = [this](const std::string& line) {
    log(LogLevel::kWarning, line);
    return no(line);
  };
  if (!facts.probe_artifactory) return refuse("Failed to connect to NVIDIA artifactory: no probe was given");
  try {
    const int32_t status = facts.probe_artifactory(kArtifactoryTimeout);
    if (status != kHttpOk) {
      return refuse(core::message("NVIDIA artifactory returned failed status code: ", status));
    }
  } catch (const std::exception& error) {
    return refuse(core::message("Failed to connect to NVIDIA artifactory: ", error.what()));
  }
  log(LogLevel::kDebug, "NVIDIA artifactory is accessible");
  return yes();
}

FamilyAnswer KernelDispatch::State::trtllm_attention() const {
  if (native()) return yes();
  if (facts.profile == BackendProfile::kVllm2025_07) return no("vLLM's FlashInfer backend of July 2025 has none");
  if (facts.batch_invariant) return no("batch-invariant mode takes no TRTLLM attention");
  // The device first: others are not to wait for the server.
  if (!facts.device.capability || !facts.device.capability->is_family(100)) {
    return no("TRTLLM attention is for compute capabilities 10.x");
  }
  return query(KernelFamily::kArtifactory);
}

KernelDispatch::KernelDispatch(DispatchFacts facts) : state_(std::make_shared<const State>(std::move(facts))) {}

const FamilyAnswer& KernelDispatch::query(KernelFamily family) const {
  return state_->query(family);
}

BackendProfile KernelDispatch::profile() const noexcept {
  return state_->facts.profile;
}

bool KernelDispatch::batch_invariant() const noexcept {
  return state_->facts.batch_invariant;
}

void KernelDispatch::check_agrees(BackendProfile profile, const EngineConfig& config) const {
  core::require(profile == this->profile(), "the dispatch was made for the profile ", to_string(this->profile()),
                "; the builder's is ", to_string(profile));
  const bool invariant = config.determinism >= Determinism::kBatchInvariant;
  const auto text = [](bool value) { return value ? "batch-invariant" : "not batch-invariant"; };
  core::require(state_->native() || invariant == batch_invariant(), "the engine's configuration is ", text(invariant),
                "; the dispatch is ", text(batch_invariant()));
}

bool KernelDispatch::is_flashinfer_fp8_blockscale_gemm_supported() const {
  return state_->facts.use_flashinfer_fp8_blockscale_gemm && has_flashinfer_fp8_blockscale_gemm();
}

bool KernelDispatch::has_submodule(std::string_view module) const {
  return state_->has_module(module);
}

bool KernelDispatch::has_entry_point(std::string_view module, std::string_view attribute) const {
  return has_flashinfer() && state_->has_attribute(module, attribute);
}

void missing_flashinfer() {
  core::fail(ErrorCode::kUnavailable,
             "FlashInfer backend is not available. Please install the package to enable FlashInfer kernels: "
             "https://github.com/flashinfer-ai/flashinfer");
}

}  // namespace folio::inline v0::backends
