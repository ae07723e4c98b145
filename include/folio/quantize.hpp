#pragma once

#include <cstdint>
#include <span>

#include "folio/context.hpp"
#include "folio/types/attention.hpp"
#include "folio/types/nvfp4.hpp"
#include "folio/types/tensor_view.hpp"

/// Quantisation of whole tensors, for outputs that attention has not quantised itself: the same arithmetic, bit for
/// bit, as its epilogue (AttentionConfig::out = fp8 or kFloat4E2M1x2). O(elements); allocates nothing. On a GPU all
/// memory is the device's, calls are enqueued on `stream` and may be captured, scales in memory are not checked, and
/// the results are those of a CPU but for the sign and payload of NaNs. Tensors are [tokens, heads, head_dim] of any
/// token and head strides, innermost contiguous. All functions throw kInvalidArgument for shapes, dtypes and scales
/// that do not fit, outputs whose rows overlap, and outputs that overlap inputs or each other, before anything is
/// written.
namespace folio::inline v0 {

/// out = fp8(in / scale), rounded to nearest even, saturated. `in`: float32, float16, bfloat16; `out`: fp8_e4m3 or
/// fp8_e5m2 of the same shape. `scale` is positive, per tensor.
FOLIO_API void quantize_fp8(const Context& context, const ConstTensorView& in, const TensorView& out,
                            const Scale& scale, Stream stream = {});

/// NVFP4: per 16 neighbouring values of a head, sf = e4m3(global_scale * max|x| / 6) and e2m1(x * global_scale / sf),
/// rounded to nearest even, saturated; 0 where sf is 0. `in`: float32, float16, bfloat16, head_dim a multiple of 16;
/// `out`: kFloat4E2M1x2 [tokens, heads, head_dim / 2], value 2i in the low nibble of byte i; `block_scale`: of the
/// matrix whose row block_scale.first_row is token 0, nvfp4_scale_bytes long; only the tokens' own bytes are written.
/// `global_scale` is positive; real value = stored * sf / global_scale.
FOLIO_API void quantize_nvfp4(const Context& context, const ConstTensorView& in, const TensorView& out,
                              const BlockScaleArgs& block_scale, float global_scale, Stream stream = {});

/// The inverse; `out` is float32 [tokens, heads, head_dim].
FOLIO_API void dequantize_nvfp4(const Context& context, const ConstTensorView& in, const BlockScaleArgs& block_scale,
                                float global_scale, const TensorView& out, Stream stream = {});

/// What the largest magnitudes of queries, keys and values are divided by: vLLM's Q_SCALE_CONSTANT, K_SCALE_CONSTANT
/// and V_SCALE_CONSTANT. Smaller than fp8's range (448), so that later tokens may be larger than those of the first
/// batch.
struct KvScaleConstants {
  float q = 200.0f;
  float k = 200.0f;
  float v = 100.0f;
};

/// A layer's fp8 scales from its first batch, where a checkpoint brings none: per tensor, max |x| / constant, into
/// `scales` [3], those of q, k and v, for Scale::data of writes and attention. A tensor without values or of zeros only
/// keeps 1, because nothing can be divided by 0; a NaN stays visible as a NaN. q, k, v: float32, float16 or bfloat16,
/// any shape of up to kMaxRank dimensions and any strides. O(elements). Throws kInvalidArgument for other dtypes, null
/// memory and constants that are not positive.
FOLIO_API void calculate_kv_scales(const Context& context, const ConstTensorView& q, const ConstTensorView& k,
                                   const ConstTensorView& v, std::span<float> scales,
                                   const KvScaleConstants& constants = {}, Stream stream = {});

}  // namespace folio::inline v0
