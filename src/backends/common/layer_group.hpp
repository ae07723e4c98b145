#pragma once

#include <cstdint>
#include <span>

#include "core/error.hpp"
#include "folio/backends/attention_layer.hpp"
#include "folio/backends/engine_config.hpp"
#include "folio/types/attention.hpp"

namespace folio::inline v0::backends {

/// The dtype of a group's cache, from the engine's name for it: the model's or fp8, and what the spec says. Throws
/// kInvalidArgument.
DType resolve_kv_cache_dtype(const AttentionSpec& spec, const EngineConfig& config);

/// Throws kInvalidArgument where a layer is not like its group's spec.
template <typename Impl>
void check_layers(std::span<const AttentionLayer<Impl>> layers, const AttentionSpec& spec, int32_t num_qo_heads,
                  DType kv_cache_dtype) {
  for (const AttentionLayer<Impl>& layer : layers) {
    core::require(layer.impl != nullptr, "layer ", layer.name, " has no implementation");
    const Impl& impl = *layer.impl;
    core::require(impl.num_heads() == num_qo_heads && impl.num_kv_heads() == spec.num_kv_heads &&
                      impl.head_size() == spec.head_size,
                  "layer ", layer.name, " has ", impl.num_heads(), " q heads, ", impl.num_kv_heads(),
                  " KV heads and head size ", impl.head_size(), "; the group has ", num_qo_heads, ", ",
                  spec.num_kv_heads, " and ", spec.head_size);
    core::require(impl.kv_cache_dtype() == kv_cache_dtype, "layer ", layer.name, " has a cache of ",
                  impl.kv_cache_dtype(), "; the group's is ", kv_cache_dtype);
  }
}

/// All features that any layer needs.
template <typename Impl>
Features features_of(std::span<const AttentionLayer<Impl>> layers) {
  Features features;
  for (const AttentionLayer<Impl>& layer : layers) {
    if (layer.impl->logits_soft_cap() > 0.0f) features = features | Feature::kSoftCap;
    if (!layer.impl->alibi_slopes().empty()) features = features | Feature::kAlibi;
    if (!layer.impl->sinks().empty()) features = features | Feature::kSinks;
  }
  return features;
}

}  // namespace folio::inline v0::backends
