#pragma once

#include <span>

#include "folio/backends/attention_layer.hpp"
#include "folio/context.hpp"
#include "folio/types/export.hpp"
#include "folio/types/tensor_view.hpp"

namespace folio::inline v0::backends {

/// What the largest magnitudes are divided by: vLLM's Q_SCALE_CONSTANT, K_SCALE_CONSTANT and V_SCALE_CONSTANT. Smaller
/// than fp8's range (448), so that later tokens may be larger than those of the first batch.
struct KvScaleConstants {
  float q = 200.0f;
  float k = 200.0f;
  float v = 100.0f;
};

/// A layer's scales from its first batch, where a checkpoint brings none (vLLM's calculate_kv_scales): per tensor, max
/// |x| / constant. A tensor without values or of zeros only keeps 1, because nothing can be divided by 0; a NaN stays
/// visible as a NaN. q, k, v: float32, float16 or bfloat16 in host memory, any shape of up to kMaxRank dimensions and
/// any strides. O(elements). Throws kInvalidArgument for other dtypes, null memory and constants that are not positive.
FOLIO_API AttentionLayerScales calculate_kv_scales(const ConstTensorView& q, const ConstTensorView& k,
                                                   const ConstTensorView& v, const KvScaleConstants& constants = {});

/// The same on a context's device and into its memory, `scales` [3] being those of q, k and v: for Scale::data of
/// writes and attention, without a look at them on the host. On a GPU the call is enqueued on `stream` and may be
/// captured.
FOLIO_API void calculate_kv_scales(const Context& context, const ConstTensorView& q, const ConstTensorView& k,
                                   const ConstTensorView& v, std::span<float> scales,
                                   const KvScaleConstants& constants = {}, Stream stream = {});

}  // namespace folio::inline v0::backends
