#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "folio/backends/flash_attn.hpp"
#include "folio/backends/flashinfer.hpp"
#include "replay/stack_config.hpp"

/// What BackendStack asks of a backend: its types, its cache, its two calls a layer, and the plans of a step.
namespace folio::replay {

/// One layer's tensors on one rank, as both calls take them.
struct LayerTensors {
  ConstTensorView q;
  ConstTensorView k;
  ConstTensorView v;
  TensorView out;
  TensorView cache;
};

/// Calls visit(window_left, plan) for every plan of a step, those of a divided cache too.
template <typename Metadata, typename Visit>
void for_each_plan(const Metadata& metadata, const Visit& visit) {
  for (const auto& planned : metadata.plans) {
    if (planned) visit(planned->window_left, planned->plan);
  }
  for (const auto& planned : metadata.dcp_plans) {
    if (!planned) continue;
    if (planned->plan.cached) visit(planned->window_left, *planned->plan.cached);
    if (planned->plan.fresh) visit(planned->window_left, *planned->plan.fresh);
  }
}

/// Its `forward` writes the new keys and values itself; its batches have decodes in front.
struct FlashInferFamily {
  using Backend = backends::FlashInferBackend;
  using Impl = backends::FlashInferImpl;
  using LayerConfig = backends::FlashInferLayerConfig;
  using Builder = backends::FlashInferMetadataBuilder;
  using Metadata = backends::FlashInferMetadata;
  using Options = backends::FlashInferOptions;

  template <typename Swap>
  static void order(Builder& builder, std::span<const int32_t> scheduled, std::span<const int32_t> computed,
                    const Swap& swap) {
    builder.reorder_batch(scheduled, computed, swap);
  }
  static void write(const Impl&, const backends::AttentionLayerScales&, const LayerTensors&, std::span<const int64_t>) {
  }
  static void attend(const Impl& impl, const backends::AttentionLayerScales& scales, const LayerTensors& tensors,
                     const Metadata& metadata) {
    impl.forward(scales, tensors.q, tensors.k, tensors.v, tensors.cache, &metadata, tensors.out);
  }
};

/// The engine writes before `forward`; any order of requests will do.
struct FlashAttentionFamily {
  using Backend = backends::FlashAttentionBackend;
  using Impl = backends::FlashAttentionImpl;
  using LayerConfig = backends::FlashAttentionLayerConfig;
  using Builder = backends::FlashAttentionMetadataBuilder;
  using Metadata = backends::FlashAttentionMetadata;
  using Options = backends::FlashAttentionOptions;

  template <typename Swap>
  static void order(Builder&, std::span<const int32_t>, std::span<const int32_t>, const Swap&) {}
  static void write(const Impl& impl, const backends::AttentionLayerScales& scales, const LayerTensors& tensors,
                    std::span<const int64_t> slots) {
    impl.do_kv_cache_update(scales, tensors.k, tensors.v, tensors.cache, slots);
  }
  static void attend(const Impl& impl, const backends::AttentionLayerScales& scales, const LayerTensors& tensors,
                     const Metadata& metadata) {
    impl.forward(scales, tensors.q, tensors.k, tensors.v, tensors.cache, &metadata, tensors.out);
  }
};

}  // namespace folio::replay
