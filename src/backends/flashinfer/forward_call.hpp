#pragma once

#include "folio/backends/attention_layer.hpp"
#include "folio/backends/flashinfer/impl.hpp"
#include "folio/backends/flashinfer/metadata_builder.hpp"
#include "folio/types/kv_cache.hpp"

namespace folio::inline v0::backends {

/// One forward, checked.
struct FlashInferImpl::Call {
  const AttentionLayerScales& layer;
  const ConstTensorView& query;
  const ConstTensorView& key;
  const ConstTensorView& value;
  const TensorView& output;
  const OutputQuantization& quantization;
  const FlashInferMetadata& metadata;
  KvCacheView cache;
  bool as_planned;  ///< queries and output are of the types that the step's plans are for
};

}  // namespace folio::inline v0::backends
