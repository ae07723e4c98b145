#pragma once

#include <string>
#include <vector>

#include "backends/flashinfer/batch_test_util.hpp"
#include "core/error_test_util.hpp"
#include "folio/types/error.hpp"

namespace folio::inline v0::backends::testing {

using folio::testing::message_of;

/// A group of layers and what its builder is made from.
struct Group {
  explicit Group(const LayerSetup& setup = {}, const BatchLengths& lengths = backend_batch("mixed_small"))
      : fixture(setup, lengths), config(fixture.engine_config()), spec(fixture.spec()), layer(fixture.layer_config()) {
    options.profile = setup.profile;
    options.quantize_query = setup.quantize_query;
    // Sinks, where a test adds a layer with them.
    sinks.assign(static_cast<size_t>(setup.num_heads), 0.5f);
  }

  void add_layer() { impls.emplace_back(fixture.context, layer); }

  FlashInferMetadataBuilder make() {
    if (impls.empty()) add_layer();
    std::vector<AttentionLayer<FlashInferImpl>> layers;
    for (const FlashInferImpl& impl : impls) layers.push_back({"layer" + std::to_string(layers.size()), &impl});
    return FlashInferMetadataBuilder(fixture.context, spec, layers, config, options);
  }

  BatchFixture fixture;
  EngineConfig config;
  AttentionSpec spec;
  FlashInferLayerConfig layer;
  FlashInferOptions options;
  std::vector<FlashInferImpl> impls;
  std::vector<float> sinks;
};

}  // namespace folio::inline v0::backends::testing
