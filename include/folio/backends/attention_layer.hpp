#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "folio/types/export.hpp"
#include "folio/types/kv_cache.hpp"

namespace folio::inline v0::backends {

/// What a layer's attention is for. Backends say which they offer.
enum class AttentionType : int32_t { kDecoder = 0, kEncoder = 1, kEncoderOnly = 2, kEncoderDecoder = 3 };

/// A layer's quantisation scales: real value = stored value * scale. `q` matters where queries are fp8, `k` and `v`
/// where the cache is; with 16-bit queries `q` is not applied.
struct AttentionLayerScales {
  Scale q;
  Scale k;
  Scale v;
};

/// One layer of the model and the implementation that serves it (borrowed).
template <typename Impl>
struct AttentionLayer {
  std::string name;
  const Impl* impl = nullptr;
};

/// The values of a layer that planned kernels of the originals must share; Folio takes each layer's own.
struct PerLayerParameters {
  int32_t window_left = -1;      ///< keys left of the query that it sees; -1 = all
  float logits_soft_cap = 0.0f;  ///< 0 = none
  float sm_scale = 0.0f;
  bool has_sinks = false;
  friend bool operator==(const PerLayerParameters&, const PerLayerParameters&) = default;
};

using NamedLayerParameters = std::pair<std::string, PerLayerParameters>;

/// Reads every layer's parameters off its implementation, in the order of the layers.
template <typename Impl>
std::vector<NamedLayerParameters> get_per_layer_parameters(std::span<const AttentionLayer<Impl>> layers) {
  std::vector<NamedLayerParameters> parameters;
  for (const AttentionLayer<Impl>& layer : layers)
    parameters.emplace_back(layer.name, layer.impl->per_layer_parameters());
  return parameters;
}

/// The first layer's parameters, and whether the others have the same.
struct GlobalHyperparameters {
  PerLayerParameters first;
  bool has_same_window_lefts = true;
  bool has_same_all_params = true;
};

/// Throws kInvalidArgument without layers.
FOLIO_API GlobalHyperparameters infer_global_hyperparameters(std::span<const NamedLayerParameters> layers);

}  // namespace folio::inline v0::backends
