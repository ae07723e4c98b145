#pragma once

#include <array>
#include <string>

#include "core/golden_test.hpp"
#include "folio/backends/capability.hpp"

namespace folio::inline v0::backends::testing {

/// The value of type Enum whose name is `name`, of the first `count`.
template <typename Enum>
Enum named(const std::string& name, int count) {
  for (int i = 0; i < count; ++i) {
    if (to_string(static_cast<Enum>(i)) == name) return static_cast<Enum>(i);
  }
  throw std::runtime_error("no value is called " + name);
}

/// {"platform": "cuda" by default, "capability": [9, 0]}
inline ComputeDevice device_of(const nlohmann::json& facts) {
  ComputeDevice device;
  device.platform = named<Platform>(facts.value("platform", "cuda"), 4);
  if (facts.contains("capability")) {
    const auto version = facts.at("capability").get<std::array<int32_t, 2>>();
    device.capability = DeviceCapability{version[0], version[1]};
  }
  return device;
}

inline BackendProfile profile_of(const nlohmann::json& facts) {
  return named<BackendProfile>(facts.at("profile").get<std::string>(), 4);
}

/// What a case asks for; its device is that of its facts.
inline AttentionRequirements requirements_of(const nlohmann::json& ask, const ComputeDevice& device) {
  AttentionRequirements result;
  result.head_size = ask.at("head_size").get<int32_t>();
  result.dtype = named<DType>(ask.value("dtype", "bfloat16"), 7);
  if (ask.contains("kv_cache_dtype")) result.kv_cache_dtype = ask.at("kv_cache_dtype").get<std::string>();
  if (ask.contains("page_size")) result.page_size = ask.at("page_size").get<int32_t>();
  result.use_mla = ask.value("mla", false);
  result.has_sinks = ask.value("sinks", false);
  result.use_sparse = ask.value("sparse", false);
  result.use_mm_prefix = ask.value("mm_prefix", false);
  result.use_per_head_quant_scales = ask.value("per_head_scales", false);
  result.device = device;
  result.attn_type = named<AttentionType>(ask.value("attn_type", "decoder"), 4);
  result.use_non_causal = ask.value("non_causal", false);
  result.use_batch_invariant = ask.value("batch_invariant", false);
  result.use_kv_connector = ask.value("kv_connector", false);
  return result;
}

}  // namespace folio::inline v0::backends::testing
