#pragma once

#include <string>
#include <vector>

#include "backends/flashinfer/batch_test_util.hpp"
#include "core/error_test_util.hpp"
#include "core/golden_test.hpp"
#include "folio/backends/flash_attn.hpp"
#include "folio/types/error.hpp"

namespace folio::inline v0::backends::testing {

using folio::testing::message_of;

/// One layer, its cache [2, pages, ...] and one step's batch, for this backend. What tests change of `layer`, `config`
/// and `options` counts when an implementation or a builder is made.
struct FlashAttnFixture : BatchFixture {
  explicit FlashAttnFixture(LayerSetup given = {}, const BatchLengths& lengths = backend_batch("mixed_small"))
      : BatchFixture(apart(std::move(given)), lengths), config(engine_config()), kv(logical_cache()) {
    const FlashInferLayerConfig same = layer_config();
    layer.num_heads = same.num_heads;
    layer.head_size = same.head_size;
    layer.scale = same.scale;
    layer.num_kv_heads = same.num_kv_heads;
    layer.alibi_slopes = same.alibi_slopes;
    layer.sliding_window = same.sliding_window;
    layer.kv_cache_dtype = same.kv_cache_dtype;
    layer.model_dtype = same.model_dtype;
    layer.logits_soft_cap = same.logits_soft_cap;
    layer.kv_sharing_target_layer_name = same.kv_sharing_target_layer_name;
    layer.sinks = same.sinks;
    if (setup.quantize_query) options.quantize_query = true;
    options.facts.profile = setup.profile;
  }

  FlashAttentionImpl make_impl() const { return FlashAttentionImpl(context, layer, options.facts); }

  FlashAttentionMetadataBuilder make_builder(const std::vector<const FlashAttentionImpl*>& impls) const {
    std::vector<AttentionLayer<FlashAttentionImpl>> layers;
    for (const FlashAttentionImpl* impl : impls) layers.push_back({"layer" + std::to_string(layers.size()), impl});
    return FlashAttentionMetadataBuilder(context, spec(), layers, config, options);
  }

  /// The cache update and the layer, as an engine calls them.
  TensorView forward(const FlashAttentionImpl& impl, const FlashAttentionMetadata& metadata) {
    impl.do_kv_cache_update(scales(), key, value, kv, metadata.slot_mapping);
    return impl.forward(scales(), query, key, value, kv, &metadata, output);
  }

  /// A whole step with a new implementation and builder.
  TensorView step(int32_t common_prefix_len = 0) {
    const FlashAttentionImpl impl = make_impl();
    FlashAttentionMetadataBuilder builder = make_builder({&impl});
    return forward(impl, builder.build(common_prefix_len, batch));
  }

  FlashAttentionLayerConfig layer;
  EngineConfig config;
  FlashAttentionOptions options;
  TensorView kv;  ///< the cache in this backend's logical shape

  /// kv_cache as it is now, in this backend's logical shape.
  TensorView logical_cache() const {
    TensorView logical = kv_cache;
    std::swap(logical.shape[0], logical.shape[1]);
    std::swap(logical.strides[0], logical.strides[1]);
    return logical;
  }

 private:
  static LayerSetup apart(LayerSetup setup) {
    setup.halves_apart = true;
    return setup;
  }
};

/// A golden batch's lengths: [n, [a, b]] is a, b repeated n times.
inline BatchLengths golden_batch(const folio::testing::GoldenCase& golden) {
  const auto repeated = [&golden](const char* field) {
    std::vector<int32_t> lens;
    const auto& entry = golden.data[field];
    for (int32_t i = 0; i < entry[0].get<int32_t>(); ++i) {
      for (int32_t len : entry[1]) lens.push_back(len);
    }
    return lens;
  };
  return {golden.name, repeated("seq_lens"), repeated("query_lens")};
}

/// vLLM of March 2026 on a Hopper, or on an Ampere.
inline FlashAttentionFacts vllm_on(DeviceCapability capability) {
  FlashAttentionFacts facts;
  facts.profile = BackendProfile::kVllm2026_03;
  facts.platform.device = {Platform::kCuda, capability};
  return facts;
}
inline FlashAttentionFacts vllm_on_hopper() {
  return vllm_on({9, 0});
}
inline FlashAttentionFacts vllm_on_ampere() {
  return vllm_on({8, 0});
}

}  // namespace folio::inline v0::backends::testing
