#include "folio/backends/attention_layer.hpp"

#include "core/error.hpp"

namespace folio::inline v0::backends {

GlobalHyperparameters infer_global_hyperparameters(std::span<const NamedLayerParameters> layers) {
  core::require(!layers.empty(), "No attention layers found in the model.");
  GlobalHyperparameters global;
  global.first = layers.front().second;
  for (const auto& [name, parameters] : layers) {
    global.has_same_window_lefts &= parameters.window_left == global.first.window_left;
    global.has_same_all_params &= parameters == global.first;
  }
  return global;
}

}  // namespace folio::inline v0::backends
