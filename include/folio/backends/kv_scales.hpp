#pragma once

#include "folio/backends/attention_layer.hpp"
#include "folio/quantize.hpp"
#include "folio/types/export.hpp"
#include "folio/types/tensor_view.hpp"

namespace folio::inline v0::backends {

using folio::calculate_kv_scales;
using folio::KvScaleConstants;

/// A layer's scales from its first batch, as values: what the function of folio/quantize.hpp writes into memory. q, k
/// and v lie in host memory.
FOLIO_API AttentionLayerScales calculate_kv_scales(const ConstTensorView& q, const ConstTensorView& k,
                                                   const ConstTensorView& v, const KvScaleConstants& constants = {});

}  // namespace folio::inline v0::backends
